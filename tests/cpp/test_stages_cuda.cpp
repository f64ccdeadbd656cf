// Compares CUDA's products with the CPU's, bit for bit, in cases that random_cases.h does not draw,
// and tests layers in CUDA graphs. Skipped without a device. The main comparisons of CUDA and CPU
// are TrustCuda.random_cases_equal_cpu and TrustCuda.every_plan_equals_cpu.
#include "support_cuda.h"

using namespace hot_test;

namespace {

class StagesCuda : public CudaTest {
 protected:
  hot::Context context(bool on_gpu, hot::Key key) const {
    return on_gpu ? hot::Context::cuda(0, stream_).with_key(key) : cpu(4).with_key(key);
  }
  static hot::Key any_key() {
    return {generator()(), generator()(), static_cast<std::uint32_t>(random_int(0, 8191))};
  }
  // Runs a call on both devices and waits for the stream.
  template <class Call>
  void both(const Call& call) {
    const hot::Key key = any_key();
    call(context(false, key), false);
    call(context(true, key), true);
    synchronize();
  }

  struct GemmShape {
    std::int64_t M, N, K;
  };
  // Compares products with rows of 16 bytes, which the fast kernels need. An accumulating product
  // runs twice, so that the second reads the first's result.
  void compare_aligned_gemm(const GemmShape& shape, DType dtype, bool accumulate, int arch) {
    const std::int64_t M = shape.M, N = shape.N, K = shape.K;
    Mirror a(M, K, DType::i8, 16 * random_int(0, 2)), b(N, K, DType::i8, 16 * random_int(0, 2));
    a.fill_codes();
    b.fill_codes();
    const std::int64_t a_scales = random_int(0, 2) == 0 ? 1 : M,
                       b_scales = random_int(0, 2) == 0 ? 1 : N;
    Mirror sa(1, a_scales, DType::f32), sb(1, b_scales, DType::f32);
    sa.fill(normal(a_scales, 0.01F));
    sb.fill(normal(b_scales, 0.01F));
    Mirror out(M, N, dtype, 16 * random_int(0, 1));
    if (accumulate) out.fill(normal(M * N));
    both([&](hot::Context c, bool on_gpu) {
      if (on_gpu && arch != 0) c = c.with_arch(arch);
      const std::size_t bytes = hot::gemm_workspace(c, M, N, K);
      Mirrored scratch(bytes + 1, 0x5A);
      scratch.push();
      for (int time = 0; time < (accumulate ? 2 : 1); ++time) {
        hot::gemm_int8(c, a.view(on_gpu), b.view(on_gpu), sa.flat(on_gpu), sb.flat(on_gpu),
                       {16, accumulate}, out.view(on_gpu), {scratch.on<void>(on_gpu), bytes});
      }
      synchronize();
    });
    out.expect_equal(words("gemm ", hot::dtype_name(dtype), " ", M, " ", N, " ", K, ", arch ", arch,
                           accumulate ? ", accumulating" : ""));
  }
};

}  // namespace

// Sizes around blocks and CTAs, and a long vector; 1 to 8 ranks; vectors that begin at any element.
TEST_F(StagesCuda, blocks_equal_cpu) {
  const std::int64_t any = random_int(1, 9999), large = (1 << 20) + random_int(1, 9999);
  const std::int64_t sizes[] = {0,    1,     15,    63,  64,    65,     997,  4095,
                                4097, 12288, 32768, any, 65536, 104729, large};
  for (const std::int64_t n : sizes) {
    for (const DType dtype : float_types) {
      const std::int64_t ranks = random_int(1, 8), parts = random_int(0, 1) * random_int(0, 7) + 1;
      const std::int64_t bytes = ((n + parts - 1) / parts + 63) / 64 * 68;
      const auto rounding = static_cast<hot::Rounding>(random_int(0, 2));
      const DType out_type = any_float();
      Mirror wire(1, ranks * parts * bytes, DType::i8, 0, 4 * random_int(0, 4));
      Mirror out(1, n, out_type, 0, random_int(0, 8));
      std::vector<std::unique_ptr<Mirror>> x;
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        x.push_back(std::make_unique<Mirror>(1, n, dtype, 0, random_int(0, 8)));
        if (n > 0) x.back()->fill(awkward(n));
      }
      both([&](const hot::Context& c, bool on_gpu) {
        char* const base = static_cast<char*>(wire.view(on_gpu).data);
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
          hot::Key key = c.key();
          key.stream = static_cast<std::uint32_t>(rank);
          hot::encode_blocks(c.with_key(key), x[static_cast<std::size_t>(rank)]->flat(on_gpu),
                             rounding,
                             hot::matrix(base + rank * parts * bytes, DType::i8, parts, bytes, 0,
                                         on_gpu ? gpu : hot::Device{}));
        }
        const hot::Device device = on_gpu ? gpu : hot::Device{};
        const TensorView all = cube(base, DType::i8, ranks, parts, bytes, device);
        hot::sum_blocks(c, all, 1.0F / 3, out.flat(on_gpu));
      });
      const std::string what = words(n, " values of ", hot::dtype_name(dtype), ", ", ranks,
                                     " ranks, ", parts, " parts, ", hot::rounding_name(rounding));
      wire.expect_equal(what + ": wire");
      out.expect_equal(what + ": sum in " + hot::dtype_name(out_type));
    }
  }
}

TEST_F(StagesCuda, every_sm90_gemm_equals_cpu) {
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  // Number of columns for some tiles of 128 x 128. Some last tiles are incomplete.
  const std::int64_t few = 3, many = multiprocessors / 6, most = multiprocessors / 2 + 1;
  const auto cut = [](std::int64_t tiles) { return 128 * tiles - 16 * random_int(0, 7); };
  for (const DType dtype : float_types) {
    for (const bool accumulate : {false, true}) {
      const std::int64_t long_k = 16 * random_int(256, 300), short_k = 16 * random_int(1, 40);
      // Stream-K, if the type has an instance: equal parts, then CUTLASS's division.
      compare_aligned_gemm({random_int(1, 256), cut(few), long_k}, dtype, accumulate, 0);
      compare_aligned_gemm({random_int(385, 512), cut(many), long_k}, dtype, accumulate, 0);
      // Pingpong: more tiles than two waves.
      compare_aligned_gemm({random_int(385, 512), cut(most), short_k}, dtype, accumulate, 0);
      // Pingpong in stripes of 8 tiles, with full stripes in both directions.
      compare_aligned_gemm({random_int(1921, 2048), cut(16), short_k}, dtype, accumulate, 0);
      // Tiles of 128 x 192, if the type has an instance, two in a row.
      compare_aligned_gemm({random_int(8833, 8960), cut(few), short_k}, dtype, accumulate, 0);
      // Tiles of 128 x 256, if the type has an instance, nearly a wave.
      const std::int64_t longest_k = 16 * random_int(512, 530);
      compare_aligned_gemm({random_int(1921, 2048), cut(16), longest_k}, dtype, accumulate, 0);
    }
  }
}

// Sums that exceed 32 bits are exact on both sides, and rounded once to the output's type.
TEST_F(StagesCuda, contraction_beyond_int32) {
  struct Case {
    std::int64_t m, n, k;
    bool largest;
  };
  const Case cases[] = {{24, 16, 16 * random_int(8322, 26000), false},
                        {16, 16, 300000, false},
                        {3, 8, 600000, true},                       // 127 * 127 * K
                        {5, 7, random_int(133144, 300000), false},  // unaligned: the tile `any`
                        {3, 2, 300001, true},                       // unaligned, too
                        {200, 136, 16 * random_int(8322, 9000), false}};  // several tiles
  for (const Case& one : cases) {
    for (const DType dtype : float_types) {
      for (const int arch : {0, 80}) {
        for (const bool accumulate : {false, true}) {
          const std::int64_t M = one.m, N = one.n, K = one.k;
          Mirror a(M, K, DType::i8), b(N, K, DType::i8), out(M, N, dtype);
          Mirror a_scale(1, 1, DType::f32), b_scale(1, N, DType::f32);
          for (Mirror* m : {&a, &b}) {
            m->fill_codes();
            if (!one.largest) continue;
            std::fill(m->host.begin(), m->host.end(), static_cast<char>(127));
            m->push();
          }
          a_scale.fill({0x1p-20F});
          b_scale.fill(normal(N));
          if (accumulate) out.fill(normal(M * N));
          const auto run = [&](hot::Context c, bool on_gpu) {
            Mirrored scratch(hot::gemm_workspace(c, M, N, K) + 1, 0x5A);
            scratch.push();
            hot::gemm_int8(c, a.view(on_gpu), b.view(on_gpu), a_scale.flat(on_gpu),
                           b_scale.flat(on_gpu), {4, accumulate}, out.view(on_gpu),
                           {scratch.on<void>(on_gpu), scratch.host.size()});
            synchronize();
          };
          run(context(false, {}), false);
          hot::Context c = context(true, {});
          run(arch == 0 ? c : c.with_arch(arch), true);
          out.expect_equal(words(hot::dtype_name(dtype), " ", M, " ", N, " ", K, " arch ", arch,
                                 accumulate ? ", accumulating" : ""));
        }
      }
    }
  }
}

namespace {

// Layer on the device: compress_activation, backward_linear and all their outputs.
class Step {
 public:
  Step(const hot::Context& c, const hot::LinearShape& shape, const hot::BackwardLinearSpec& spec,
       DType dtype)
      : spec_(spec),
        layout_(hot::saved_layout(shape.tokens, shape.in_features, spec)),
        bytes_(
            std::max(hot::compress_activation_workspace(c, shape.tokens, shape.in_features, spec),
                     hot::backward_linear_workspace(c, shape, spec, true, true))),
        gy_(shape.tokens, shape.out_features, dtype),
        w_(shape.out_features, shape.in_features, dtype),
        x_(shape.tokens, shape.in_features, dtype),
        gx_(shape.tokens, shape.in_features, dtype),
        gw_(shape.out_features, shape.in_features, DType::f32),
        gb_(1, shape.out_features, DType::f32),
        saved_(1, static_cast<std::int64_t>(layout_.bytes), DType::i8),
        scratch_(1, static_cast<std::int64_t>(bytes_), DType::i8) {
    gy_.fill(normal(shape.tokens * shape.out_features));
    w_.fill(normal(shape.out_features * shape.in_features));
    x_.fill(normal(shape.tokens * shape.in_features));
  }

  void queue(const hot::Context& c) {
    void* const memory = saved_.view(true).data;
    const hot::Workspace scratch{scratch_.view(true).data, bytes_};
    const TensorView vx = gx_.view(true), vw = gw_.view(true), vb = gb_.flat(true);
    const hot::ConstSavedActivation of_x =
        hot::compress_activation(c, x_.view(true), spec_, {memory, layout_.bytes}, scratch);
    hot::backward_linear(c, gy_.view(true), w_.view(true), of_x, spec_, {&vx, &vw, &vb, false},
                         scratch);
  }

  // Results of `launch` in poisoned memory: g_x, g_w, g_b and the saved x.
  std::vector<std::vector<char>> results(cudaStream_t stream, const std::function<void()>& launch) {
    for (Mirror* m : {&gx_, &gw_, &gb_, &saved_, &scratch_}) m->push();
    launch();
    check(cudaStreamSynchronize(stream));
    return {gx_.pulled(), gw_.pulled(), gb_.pulled(), saved_.pulled()};
  }

 private:
  hot::BackwardLinearSpec spec_;
  hot::SavedLayout layout_;
  std::size_t bytes_;
  Mirror gy_, w_, x_, gx_, gw_, gb_, saved_, scratch_;
};

}  // namespace

TEST_F(StagesCuda, repeats_and_captures) {
  // Expects equal bits from two runs and a CUDA graph, for a small layer, a large cluster, and more
  // tokens than a cluster holds.
  const hot::LinearShape shapes[] = {{394, 192, 160}, {8210, 32, 16}, {16400, 16, 16}};
  for (const std::string& name : recipe_names()) {
    for (const hot::LinearShape& shape : shapes) {
      const hot::Context c = context(true, any_key());
      Step step(c, shape, recipe(name), DType::bf16);
      const auto run = [&] { step.queue(c); };
      const auto first = step.results(stream_, run);
      EXPECT_EQ(first, step.results(stream_, run)) << name;
      const Graph graph(stream_, run);
      EXPECT_EQ(first, step.results(stream_, [&] { graph.replay(); })) << name << ", captured";
    }
  }
}

TEST_F(StagesCuda, every_replay_reads_the_counter) {
  // Cases: one launch of quantisers, separate kernels, more tokens than a cluster holds, and short
  // rows of many blocks (cuda/quantize_rows_column_amax.cu).
  const hot::LinearShape shapes[] = {
      {394, 192, 160}, {2100, 1040, 528}, {16400, 48, 40}, {16500, 768, 64}};
  int unit = 0;
  for (const std::string& name : recipe_names()) {
    for (const hot::LinearShape& shape : shapes) {
      if (!in_part(unit++)) continue;
      Mirrored numbers(2 * sizeof(std::uint64_t));
      auto* const counter = numbers.on<std::uint64_t>(true);
      hot::Key key = any_key();
      const hot::Context direct = context(true, key);
      key.counter = counter;
      const hot::Context counting = context(true, key);
      Step step(direct, shape, recipe(name), any_float());
      step.queue(direct);  // loads the kernels before the capture
      synchronize();
      // The graph increments its counter itself, before the first kernel.
      const Graph graph(stream_, [&] {
        check(cudaMemcpyAsync(counter, counter + 1, sizeof *counter, cudaMemcpyDeviceToDevice,
                              stream_));
        step.queue(counting);
      });
      std::vector<std::vector<char>> before;
      for (int replay = 0; replay < 3; ++replay) {
        const std::uint64_t value = generator()();  // the sum exceeds 2^64 in half of the cases
        const std::uint64_t values[] = {0, value};
        std::memcpy(numbers.host.data(), values, sizeof values);
        numbers.push();
        const auto got = step.results(stream_, [&] { graph.replay(); });
        const hot::Context then = context(true, {key.seed, key.offset + value, key.stream});
        const auto expected = step.results(stream_, [&] { step.queue(then); });
        for (std::size_t i = 0; i < got.size(); ++i) {
          EXPECT_EQ(got[i], expected[i])
              << name << " " << shape.tokens << " x " << shape.out_features << ", result " << i;
        }
        EXPECT_NE(got[1], before.empty() ? std::vector<char>{} : before[1]) << "the same g_w";
        before = got;
      }
    }
  }
}

// Stages on CUDA against the CPU, bit for bit, at sizes and edges that random_cases.h does not
// draw: long contractions, many tokens, every plan, what is kept of awkward values. Random calls of
// every stage: TrustCuda.random_cases_equal_cpu. Built with CUDA only, skipped without a device.
#include <set>
#include <tuple>
#include <utility>

#include "plan_cases.h"
#include "support_cuda.h"

using namespace hot_test;
using hot::Basis;
using hot::Granularity;
using hot::Rounding;

namespace {

constexpr Rounding roundings[] = {Rounding::nearest, Rounding::stochastic,
                                  Rounding::pseudo_stochastic};

class StagesCuda : public CudaTest {
 protected:
  hot::Context context(bool on_gpu, hot::Key key) const {
    return on_gpu ? hot::Context::cuda(0, stream_).with_key(key) : cpu(4).with_key(key);
  }
  static hot::Key any_key() {
    return {generator()(), generator()(), static_cast<std::uint32_t>(random_int(0, 8191))};
  }
  // The same call on both devices; the stream is done at the end.
  template <class Call>
  void both(const Call& call) {
    const hot::Key key = any_key();
    call(context(false, key), false);
    call(context(true, key), true);
    check(cudaStreamSynchronize(stream_));
  }

  struct GemmShape {
    std::int64_t M, N, K;
  };
  // Rows of 16 bytes, as the fast kernels want them; arch 0: the device's own. Accumulating is done
  // twice in a row: the second product reads what the first has just written.
  void compare_aligned_gemm(const GemmShape& shape, DType dtype, bool accumulate, int arch) {
    const std::int64_t M = shape.M, N = shape.N, K = shape.K;
    Mirror a(M, K, DType::i8, 16 * random_int(0, 2)), b(N, K, DType::i8, 16 * random_int(0, 2));
    for (Mirror* m : {&a, &b}) {
      const auto values = codes(static_cast<std::int64_t>(m->host.size()), 127);
      std::memcpy(m->host.data(), values.data(), values.size());
      m->push();
    }
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
      check(cudaStreamSynchronize(stream_));
    });
    out.expect_equal("gemm " + std::string(hot::dtype_name(dtype)) + " " + std::to_string(M) + " " +
                     std::to_string(N) + " " + std::to_string(K) + ", arch " +
                     std::to_string(arch) + (accumulate ? ", accumulating" : ""));
  }

  struct BackwardWork {
    std::string name;
    hot::BackwardLinearSpec spec;
    hot::LinearShape shape;  // tokens, out_features, in_features
    DType gy;
    std::int64_t gy_gap = 0, gy_offset = 0;
    bool accumulate = false, old_arch = false, quantized_weight = false;
    bool plain = false;  // contiguous arrays of gy's type, g_w in fp32, as hot::explain takes them
    bool outlier = false;     // one token of x is large, one zero, one tiny
    bool by_columns = false;  // x lies column by column
  };
  // compress_activation and backward_linear.
  void compare_backward(const BackwardWork& work) {
    const auto [L, O, I] = work.shape;
    const hot::BackwardLinearSpec& spec = work.spec;
    Mirror gy(L, O, work.gy, work.gy_gap, work.gy_offset);
    const auto any_type = [&] { return work.plain ? work.gy : any_float(); };
    const auto gap = [&](std::int64_t most) { return work.plain ? 0 : random_int(0, most); };
    const DType weight_dtype = random_int(0, 1) == 0 ? gy.view(false).dtype : any_type();
    const DType x_dtype = any_type();
    Mirror w(O, I, weight_dtype, gap(2));
    Mirror x(work.by_columns ? I : L, work.by_columns ? L : I, x_dtype, gap(2));
    gy.fill(awkward(L * O));
    w.fill(awkward(O * I));
    std::vector<float> x_values = awkward(L * I);
    for (std::size_t i = 0; work.outlier && i < x_values.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      const std::int64_t token = work.by_columns ? at % L : at / I;
      if (token == L / 3) x_values[i] *= 500.0F;
      if (token == L / 2) x_values[i] = 0.0F;
      if (token == L - 1) x_values[i] *= 1e-4F;
    }
    x.fill(x_values);
    const auto x_view = [&](bool on_gpu) {
      TensorView view = x.view(on_gpu);
      if (work.by_columns) {
        std::swap(view.shape[0], view.shape[1]);
        std::swap(view.stride[0], view.stride[1]);
      }
      return view;
    };
    Mirror gx(L, I, any_type(), work.plain ? 0 : 3), gb(1, O, DType::f32);
    Mirror gw(O, I, work.plain ? DType::f32 : any_float(), work.plain ? 0 : 1);
    gw.fill(normal(O * I));
    gb.fill(normal(O));
    const hot::SavedLayout layout = hot::saved_layout(L, I, spec);
    Mirror saved(1, static_cast<std::int64_t>(layout.bytes), DType::i8);
    both([&](hot::Context c, bool on_gpu) {
      if (on_gpu && work.old_arch) c = c.with_arch(80);
      const std::size_t ws = hot::compress_activation_workspace(c, L, I, spec);
      const std::size_t bytes =
          std::max(ws, hot::backward_linear_workspace(c, {L, O, I}, spec, true, true));
      Mirrored memory(bytes + 64, 0x5A);
      memory.push();
      const hot::Workspace scratch{memory.on<void>(on_gpu), bytes};
      void* kept = saved.view(on_gpu).data;
      std::vector<char> aligned_host;
      if (!on_gpu) {  // the host vector may start anywhere
        aligned_host.resize(layout.bytes + 16);
        kept = aligned_host.data() +
               (16 - reinterpret_cast<std::uintptr_t>(aligned_host.data()) % 16) % 16;
      }
      if (!on_gpu) std::memset(kept, 0xA5, layout.bytes);
      const hot::ConstSavedActivation of_x =
          hot::compress_activation(c, x_view(on_gpu), spec, {kept, layout.bytes}, scratch);
      const TensorView vx = gx.view(on_gpu), vw = gw.view(on_gpu), vb = gb.flat(on_gpu);
      const hot::BackwardOutputs outputs{&vx, &vw, &vb, work.accumulate};
      if (on_gpu && work.quantized_weight) {  // w quantised before; the CPU takes w itself
        const std::size_t weight_bytes = hot::quantized_weight_bytes(O, I, spec);
        Mirrored quantized(weight_bytes + 1, 0x5A);
        quantized.push();
        void* const codes = quantized.on<void>(true);
        ASSERT_LE(hot::quantize_weight_workspace(c, O, I, spec), bytes);
        const hot::ConstQuantizedWeight of_w =
            hot::quantize_weight(c, w.view(true), spec, {codes, weight_bytes}, scratch);
        hot::backward_linear(c, gy.view(true), of_w, of_x, spec, outputs, scratch);
        check(cudaStreamSynchronize(stream_));  // before `quantized` goes
      } else {
        hot::backward_linear(c, gy.view(on_gpu), w.view(on_gpu), of_x, spec, outputs, scratch);
      }
      check(cudaStreamSynchronize(stream_));
      if (!on_gpu) std::memcpy(saved.view(false).data, kept, layout.bytes);
    });
    const std::string what =
        work.name + " L " + std::to_string(L) + " O " + std::to_string(O) + " I " +
        std::to_string(I) + " " + hot::basis_name(spec.low_rank.basis) + " gw " +
        hot::granularity_name(spec.gw_scale) + " n " + std::to_string(spec.hadamard_block) + " " +
        hot::storage_name(spec.storage) + (spec.equalize_tokens ? " equalised" : "");
    saved.expect_equal(what + ": saved");
    gx.expect_equal(what + ": gx");
    gw.expect_equal(what + ": gw");
    const std::vector<char> got = gb.pulled();
    for (std::int64_t o = 0; o < O; ++o) {  // a sum in another order: a bound
      float a, b;
      std::memcpy(&a, got.data() + 4 * o, 4);
      std::memcpy(&b, gb.host.data() + 4 * o, 4);
      if (!std::isfinite(b)) {
        EXPECT_FALSE(std::isfinite(a));
        continue;
      }
      EXPECT_NEAR(a, b, 68 * std::ldexp(1.0, -24) * 60 * static_cast<double>(L + 1)) << what;
    }
  }

  // A form of storage that the basis can have.
  static void any_storage(hot::BackwardLinearSpec& spec) {
    const bool packed = spec.low_rank.basis == Basis::full && random_int(0, 2) > 0;
    spec.storage = packed ? hot::Storage::int4 : hot::Storage::int8;
    spec.equalize_tokens = random_int(0, 2) == 0;
  }

  static hot::LowRank any_low_rank(std::int64_t& tokens) {
    hot::LowRank spec;
    const int kind = static_cast<int>(random_int(0, 6));
    if (kind == 0) return spec;
    const int block = kind <= 3 ? 16 : 1 << random_int(1, 6);
    spec.block = block;
    if (kind == 1 || kind == 4) {
      spec.basis = Basis::sketch;
      spec.rank = kind == 1 ? 8 : std::max(2, block >> random_int(0, 3));
    } else if (kind == 2 || kind == 5) {
      spec.basis = Basis::lowpass;
      spec.rank = kind == 2 ? 8 : static_cast<int>(random_int(1, block));
    } else if (kind == 3) {
      spec.basis = Basis::lowpass;
      spec.rows = {14, 0, 3, 9, 5};
    } else {
      spec.basis = Basis::sequency;
      spec.rank = static_cast<int>(random_int(1, block));
    }
    if (random_int(0, 2) == 0) {
      spec.layout = {static_cast<int>(random_int(1, 14)), static_cast<int>(random_int(1, 14)),
                     static_cast<int>(random_int(0, 2))};
      tokens =
          random_int(0, 4) * (spec.layout.grid_h * spec.layout.grid_w + spec.layout.prefix_tokens);
    }
    return spec;
  }
};

}  // namespace

TEST_F(StagesCuda, decompress_activation_equals_cpu) {
  for (int round = 0; round < 120; ++round) {
    hot::BackwardLinearSpec spec;
    spec.storage = round % 2 == 0 ? hot::Storage::int4 : hot::Storage::int8;
    spec.equalize_tokens = round % 4 >= 2;
    if (random_int(0, 2) == 0) spec.gw_scale = Granularity::tensor;
    const std::int64_t L = round < 100 ? any_size() : random_int(0, 5000), I = any_size();
    const std::int64_t first = random_int(0, 2) == 0 ? 0 : random_int(0, L);
    const std::int64_t last = random_int(0, 2) == 0 ? L : random_int(first, L);
    Mirror x(L, I, any_float());
    x.fill(awkward(L * I));
    const hot::SavedLayout layout = hot::saved_layout(L, I, spec);
    // The CPU keeps x, and both read the same bytes back. Columns in pairs or not, rows anywhere.
    Mirrored kept(layout.bytes + 16, 0x5A);
    const auto address = reinterpret_cast<std::uintptr_t>(kept.on<char>(false));
    const std::size_t shift = (16 - address % 16) % 16;
    hot::ConstSavedActivation of_x =
        hot::compress_activation(cpu().with_key(any_key()), x.view(false), spec,
                                 {kept.on<char>(false) + shift, layout.bytes}, {});
    Mirrored aligned(layout.bytes + 1, 0x5A);
    std::memcpy(aligned.host.data(), kept.on<char>(false) + shift, layout.bytes);
    aligned.push();
    Mirror out(last - first, I, any_float(), random_int(0, 3), random_int(0, 1));
    Mirror turned(I, last - first, any_float(), random_int(0, 1));
    both([&](const hot::Context& c, bool on_gpu) {
      if (on_gpu) of_x.data = aligned.on<void>(true);
      hot::decompress_activation(c, of_x, first, last, spec, out.view(on_gpu));
      TensorView columns = turned.view(on_gpu);
      std::swap(columns.shape[0], columns.shape[1]);
      std::swap(columns.stride[0], columns.stride[1]);
      hot::decompress_activation(c, of_x, first, last, spec, columns);
    });
    const std::string what = std::string(" ") + hot::storage_name(spec.storage) + " L " +
                             std::to_string(L) + " I " + std::to_string(I) + " from " +
                             std::to_string(first) + " to " + std::to_string(last);
    out.expect_equal("decompressed" + what);
    turned.expect_equal("decompressed, transposed" + what);
  }
}

TEST_F(StagesCuda, aligned_gemm_equals_cpu) {
  // What the sm_90a kernels take, and the same through the mma.sync kernels.
  for (int round = 0; round < 36; ++round) {
    const std::int64_t M = random_int(1, 700), N = 16 * random_int(1, round % 4 == 0 ? 200 : 30);
    const std::int64_t K = 16 * random_int(1, round % 6 == 0 ? 200 : 40);
    const DType dtype = float_types[round % 3];
    const bool big = round == 0, accumulate = round % 2 == 1;
    compare_aligned_gemm({big ? 12000 : M, big ? 2304 : N, K}, dtype, accumulate, 0);
    compare_aligned_gemm({M, N, K}, dtype, accumulate, 80);
  }
}

TEST_F(StagesCuda, every_sm90_gemm_equals_cpu) {
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  // Columns of tiles; a tile of the result is 128 x 128, the last ones are cut off here and there.
  const std::int64_t few = 3, many = multiprocessors / 6, most = multiprocessors / 2 + 1;
  const auto cut = [](std::int64_t tiles) { return 128 * tiles - 16 * random_int(0, 7); };
  for (const DType dtype : float_types) {
    for (const bool accumulate : {false, true}) {
      const std::int64_t long_k = 16 * random_int(256, 300), short_k = 16 * random_int(1, 40);
      // Stream-K where there is one for the type: equal parts, then CUTLASS's division.
      compare_aligned_gemm({random_int(1, 256), cut(few), long_k}, dtype, accumulate, 0);
      compare_aligned_gemm({random_int(385, 512), cut(many), long_k}, dtype, accumulate, 0);
      // Pingpong: more tiles than two waves.
      compare_aligned_gemm({random_int(385, 512), cut(most), short_k}, dtype, accumulate, 0);
      // The same in stripes of 8 tiles, both ways of which fill them.
      compare_aligned_gemm({random_int(1921, 2048), cut(16), short_k}, dtype, accumulate, 0);
      // Tiles of 128 x 192 where there are such, two of them in a row.
      compare_aligned_gemm({random_int(8833, 8960), cut(few), short_k}, dtype, accumulate, 0);
      // Tiles of 128 x 256 where there are such, which fill nearly a wave.
      const std::int64_t longest_k = 16 * random_int(512, 530);
      compare_aligned_gemm({random_int(1921, 2048), cut(16), longest_k}, dtype, accumulate, 0);
    }
  }
}

// Sums that pass 32 bits are exact on both sides, and rounded to the output's type once.
TEST_F(StagesCuda, contraction_beyond_int32) {
  struct Case {
    std::int64_t m, n, k;
    bool largest;
  };
  const Case cases[] = {{24, 16, 16 * random_int(8322, 26000), false},
                        {16, 16, 300000, false},
                        {3, 8, 600000, true},                       // 127 * 127 * K
                        {5, 7, random_int(133144, 300000), false},  // unaligned: the tile `any`
                        {3, 2, 300001, true},                       // the same
                        {200, 136, 16 * random_int(8322, 9000), false}};  // several tiles
  for (const Case& of : cases) {
    for (const DType dtype : float_types) {
      for (const int arch : {0, 80}) {
        for (const bool accumulate : {false, true}) {
          const std::int64_t M = of.m, N = of.n, K = of.k;
          Mirror a(M, K, DType::i8), b(N, K, DType::i8), out(M, N, dtype);
          Mirror a_scale(1, 1, DType::f32), b_scale(1, N, DType::f32);
          for (Mirror* m : {&a, &b}) {
            const auto values = codes(static_cast<std::int64_t>(m->host.size()), 127);
            std::memcpy(m->host.data(), values.data(), values.size());
            if (of.largest) std::fill(m->host.begin(), m->host.end(), static_cast<char>(127));
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
            check(cudaStreamSynchronize(stream_));
          };
          run(context(false, {}), false);
          hot::Context c = context(true, {});
          run(arch == 0 ? c : c.with_arch(arch), true);
          out.expect_equal(std::string(hot::dtype_name(dtype)) + " " + std::to_string(M) + " " +
                           std::to_string(N) + " " + std::to_string(K) + " arch " +
                           std::to_string(arch) + (accumulate ? ", accumulating" : ""));
        }
      }
    }
  }
}

TEST_F(StagesCuda, backward_linear_equals_cpu) {
  constexpr int rounds = 95, usual = 90;
  for (int round = 0; round < rounds; ++round) {
    if (!in_part(round)) continue;
    std::int64_t L = round == 0 ? 0 : any_size();
    hot::BackwardLinearSpec spec;
    if (round < 20 || round >= usual) {
      spec = recipe(recipe_names()[static_cast<std::size_t>(round) % recipe_names().size()]);
    } else {
      spec.low_rank = any_low_rank(L);
      spec.hadamard_block = random_int(0, 1) == 0 ? 16 : 1 << random_int(0, 8);
      spec.gx_bits = random_int(0, 1) == 0 ? 4 : 8;
      spec.gx_scale = random_int(0, 1) == 0 ? Granularity::token : Granularity::tensor;
      spec.gw_scale = static_cast<Granularity>(random_int(0, 2));
      spec.gx_rounding = roundings[random_int(0, 2)];
      spec.gw_rounding = roundings[random_int(0, 2)];
      if (round % 2 == 0) {  // as quantize_grouped.cu needs them
        spec.hadamard_block = 16;
        spec.gw_rounding = spec.gx_rounding = Rounding::stochastic;
      }
      any_storage(spec);
    }
    std::int64_t O = random_int(0, 9) == 0 ? random_int(2000, 20000) : any_size();
    std::int64_t I = O > 1000 ? random_int(1, 20) : any_size();
    if (round >= usual) {  // more tokens than stay on chip, or more columns than do at a time
      const bool many_tokens = round % 2 == 0;
      L = many_tokens ? random_int(1, 800) + (round % 4 == 0 ? 8192 : 16384)
                      : random_int(3000, 4096);
      O = random_int(1, 100);
      I = many_tokens ? random_int(1, 200) : 8 * random_int(600, 700);
    } else if (O > 1000 && L > 40)
      L = spec.low_rank.layout.grid_h == 0 ? 37 : L;
    compare_backward({"round " + std::to_string(round),
                      spec,
                      {L, O, I},
                      any_float(),
                      random_int(0, 2) * 8,
                      random_int(0, 3) == 0 ? 1 : 0,
                      round % 3 == 0,
                      round % 4 == 3,
                      round % 5 == 2});
  }
}

// Equalised tokens, in every form: groups of 64 that are whole, short or missing, tokens of unlike
// size, arrays that no vector load fits.
TEST_F(StagesCuda, equalised_storage_equals_cpu) {
  const std::int64_t lengths[] = {1, 5, 63, 64, 65, 127, 128, 129, 200, 391, 1000, 2048};
  for (int round = 0; round < 120; ++round) {
    if (!in_part(round)) continue;
    hot::BackwardLinearSpec spec;
    spec.storage = round % 3 == 0 ? hot::Storage::int8 : hot::Storage::int4;
    std::int64_t L = lengths[random_int(0, 11)];
    if (round % 6 == 0) spec.low_rank = any_low_rank(L);
    spec.equalize_tokens = true;
    spec.gw_rounding = roundings[random_int(0, 5) % 3 == 2 ? 2 : random_int(0, 1)];
    if (random_int(0, 3) == 0) spec.gw_scale = static_cast<Granularity>(random_int(0, 2));
    const std::int64_t O = random_int(0, 5) == 0 ? random_int(1000, 3000) : any_size();
    BackwardWork work{"round " + std::to_string(round),
                      spec,
                      {L, O, any_size()},
                      any_float(),
                      random_int(0, 2) * 8,
                      random_int(0, 3) == 0 ? 1 : 0,
                      round % 3 == 0,
                      round % 4 == 3,
                      round % 7 == 2};
    work.outlier = random_int(0, 1) == 0;
    work.by_columns = random_int(0, 4) == 0;
    compare_backward(work);
  }
  // One cluster, the largest, and more tokens than it holds.
  int round = 0;
  for (const std::int64_t L : {3000, 8200, 16384, 16500, 20000}) {
    for (const char* const scale : {"channel", "tensor"}) {
      if (!in_part(round++)) continue;
      hot::BackwardLinearSpec spec;
      spec.storage = random_int(0, 1) == 0 ? hot::Storage::int8 : hot::Storage::int4;
      if (std::string(scale) == "tensor") spec.gw_scale = Granularity::tensor;
      spec.equalize_tokens = true;
      spec.gw_rounding = roundings[random_int(0, 1)];
      BackwardWork work{"long", spec, {L, random_int(1, 130), random_int(1, 70)}, any_float()};
      work.outlier = true;
      compare_backward(work);
    }
  }
}

// A lone outlier, exact ties of the rounding, blocks of equal values, subnormals, numbers near the
// largest, NaN and Inf: what a kept x is at the edges.
TEST_F(StagesCuda, equalised_storage_at_the_edges_equals_cpu) {
  const float tiny = 1e-40F, huge = 2e38F, infinity = std::numeric_limits<float>::infinity();
  const float levels[] = {0.0F, 1.0F, -1.0F, 0.5F, 3.0F, 7.5F, 1e-31F, tiny, huge, -huge, infinity};
  for (int round = 0; round < 60; ++round) {
    hot::BackwardLinearSpec spec;
    spec.equalize_tokens = round % 4 < 3;
    const std::int64_t L = random_int(1, 150), I = 40;
    std::vector<float> values(static_cast<std::size_t>(L * I));
    for (std::int64_t c = 0; c < I; ++c) {  // a column is of one level, or of two
      const float a = levels[random_int(0, 10)], b = levels[random_int(0, 10)];
      const std::int64_t odd = random_int(0, 3) == 0 ? random_int(1, 8) : L;
      for (std::int64_t l = 0; l < L; ++l) {
        values[static_cast<std::size_t>(l * I + c)] = l % odd == odd - 1 ? b : a;
      }
    }
    Mirror x(L, I, float_types[round % 3]);
    x.fill(values);
    const hot::SavedLayout layout = hot::saved_layout(L, I, spec);
    Mirror saved(1, static_cast<std::int64_t>(layout.bytes), DType::i8);
    Mirror back(L, I, DType::f32);
    std::vector<char> aligned(layout.bytes + 16);
    both([&](const hot::Context& c, bool on_gpu) {
      void* kept = saved.view(on_gpu).data;
      if (!on_gpu) {
        kept = aligned.data() + (16 - reinterpret_cast<std::uintptr_t>(aligned.data()) % 16) % 16;
      }
      const hot::ConstSavedActivation of_x =
          hot::compress_activation(c, x.view(on_gpu), spec, {kept, layout.bytes}, {});
      hot::decompress_activation(c, of_x, 0, L, spec, back.view(on_gpu));
      if (!on_gpu) std::memcpy(saved.view(false).data, kept, layout.bytes);
    });
    const std::string what =
        std::string(hot::storage_name(spec.storage)) + " round " + std::to_string(round);
    saved.expect_equal(what + ": saved");
    back.expect_equal(what + ": decompressed");
  }
}

// Every plan of the table of test_plan.cpp, whatever this device makes of it; an H200 with the
// wgmma kernels runs every kernel of the table.
TEST_F(StagesCuda, every_plan_equals_cpu) {
  std::set<std::string> expected, reached;
  for (const PlanCase& layer : plan_cases()) {
    hot::ExplainOptions options;
    options.dtype = layer.dtype;
    const hot::Explanation plan = hot::explain("cuda:0", layer.shape, layer.spec, options);
    for (const hot::ExplainedStep& step : plan.steps) reached.insert(step.kernel);
    expected.insert(layer.kernels.begin(), layer.kernels.end());
    BackwardWork work{layer.name, layer.spec, layer.shape, layer.dtype};
    work.plain = true;
    SCOPED_TRACE(plan.text);
    compare_backward(work);
  }
  int sm_count = 0, major = 0;
  check(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, 0));
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major == 9 && sm_count == 132 && hot::cuda_wgmma()) {
    EXPECT_EQ(reached, expected);
  }
}

// As cuda/quantize_rows_column_amax.cu needs them: 16-bit g_y with aligned rows of whole blocks,
// and more tokens than stay on the chip (one scale for all: more than a few launches' worth).
TEST_F(StagesCuda, backward_linear_of_many_tokens_equals_cpu) {
  const std::pair<Basis, int> bases[] = {{Basis::full, 16},
                                         {Basis::sketch, 8},
                                         {Basis::lowpass, 8},
                                         {Basis::sequency, 8},
                                         {Basis::sequency, 16}};
  constexpr int rounds = 20;
  int by_one_read = 0;
  for (int round = 0; round < rounds; ++round) {
    hot::BackwardLinearSpec spec = recipe(recipe_names()[static_cast<std::size_t>(round / 5) % 5]);
    spec.low_rank = {};
    std::tie(spec.low_rank.basis, spec.low_rank.rank) = bases[round % 5];
    if (spec.low_rank.basis != Basis::full) spec.storage = hot::Storage::int8;
    spec.gx_scale = random_int(0, 2) == 0 ? Granularity::tensor : Granularity::token;
    spec.gw_scale = random_int(0, 2) == 0 ? Granularity::tensor : Granularity::channel;
    // As long rows as a tile holds; so many tokens that a thread block leaves two partial sums.
    const bool longest = round == 7, most = round == 12;
    const std::int64_t O = longest ? 3072 : most ? 128 : 16 * random_int(1, 64);
    // On both sides of what the largest cluster holds.
    const std::int64_t more = random_int(1, 1500) + (random_int(0, 1) == 0 ? 8192 : 16384);
    const std::int64_t L = most ? 132 * 32 * 64 + random_int(1, 5000) : more;
    const std::int64_t I = random_int(1, 24);
    for (const auto& step : hot::explain("cuda:0", {L, O, I}, spec).steps) {
      if (step.kernel == "rows_column_amax_kernel") ++by_one_read;
    }
    if (!in_part(round)) continue;
    compare_backward({"round " + std::to_string(round),
                      spec,
                      {L, O, I},
                      random_int(0, 1) == 0 ? DType::bf16 : DType::f16,
                      8 * random_int(0, 2),
                      0,
                      round % 3 == 0,
                      false,
                      false});
  }
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major == 9) {
    EXPECT_GE(by_one_read, rounds / 4);
  }
}

namespace {

// A layer on the device: compress_activation and backward_linear, and all that they write.
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
    void* const kept = saved_.view(true).data;
    const hot::Workspace scratch{scratch_.view(true).data, bytes_};
    const TensorView vx = gx_.view(true), vw = gw_.view(true), vb = gb_.flat(true);
    const hot::ConstSavedActivation of_x =
        hot::compress_activation(c, x_.view(true), spec_, {kept, layout_.bytes}, scratch);
    hot::backward_linear(c, gy_.view(true), w_.view(true), of_x, spec_, {&vx, &vw, &vb, false},
                         scratch);
  }

  // What `launch` makes of poisoned memory: g_x, g_w, g_b and the kept x.
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

// A key with its counter on the device.
class DeviceCountedKey : public CountedKey {
 public:
  DeviceCountedKey() : number_(sizeof counter) {
    std::memcpy(number_.host.data(), &counter, sizeof counter);
    number_.push();
  }
  hot::Key on_gpu() {
    hot::Key key = counted();
    key.counter = number_.on<std::uint64_t>(true);
    return key;
  }

 private:
  Mirrored number_;
};

}  // namespace

TEST_F(StagesCuda, repeats_and_captures) {
  // Twice the same bits, and the same again from a CUDA graph.
  // Small, a large cluster, and more tokens than stay on the chip.
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
  // One launch of quantisers, kernels of their own, and more tokens than stay on the chip; the last
  // also with short rows of many blocks (cuda/quantize_rows_column_amax.cu).
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
      step.queue(direct);  // kernels are loaded before a capture
      check(cudaStreamSynchronize(stream_));
      // The graph takes its count itself, right before the first kernel.
      const Graph graph(stream_, [&] {
        check(cudaMemcpyAsync(counter, counter + 1, sizeof *counter, cudaMemcpyDeviceToDevice,
                              stream_));
        step.queue(counting);
      });
      std::vector<std::vector<char>> before;
      for (int replay = 0; replay < 3; ++replay) {
        const std::uint64_t value = generator()();  // the sum passes 2^64 as often as not
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

TEST_F(StagesCuda, single_stages_read_the_counter) {
  for (int round = 0; round < 60; ++round) {
    std::int64_t L = any_size();
    const hot::LowRank low_rank = any_low_rank(L);
    const std::int64_t C = any_size();
    Mirror x(L, C, any_float(), random_int(0, 3), random_int(0, 2));
    x.fill(normal(L * C));
    Mirror rows(hot::hla_rows(L, low_rank), C, any_float()), q(L, C, DType::i8);
    Mirror scale(1, L, DType::f32);
    const hot::QuantSpec spec{4, Granularity::token, Rounding::stochastic};
    DeviceCountedKey key;
    for (const bool on_gpu : {false, true}) {
      const hot::Context c = context(on_gpu, on_gpu ? key.on_gpu() : key.plain);
      hot::hla(c, x.view(on_gpu), low_rank, hot::Side::gradient, rows.view(on_gpu));
      hot::quantize(c, x.view(on_gpu), spec, q.view(on_gpu), scale.flat(on_gpu));
    }
    check(cudaStreamSynchronize(stream_));
    rows.expect_equal(std::string("hla ") + hot::basis_name(low_rank.basis));
    q.expect_equal("codes");
    scale.expect_equal("scale");
  }
}

TEST_F(StagesCuda, any_backward_reads_the_counter) {
  for (int round = 0; round < 40; ++round) {
    std::int64_t L = any_size();
    hot::BackwardLinearSpec spec;
    spec.low_rank = any_low_rank(L);
    spec.hadamard_block = 1 << random_int(0, 8);
    spec.gx_scale = random_int(0, 1) == 0 ? Granularity::token : Granularity::tensor;
    spec.gw_scale = static_cast<Granularity>(random_int(0, 2));
    spec.storage = spec.low_rank.basis == Basis::full && random_int(0, 1) == 0 ? hot::Storage::int4
                                                                               : hot::Storage::int8;
    const hot::LinearShape shape{L, any_size(), any_size()};
    DeviceCountedKey key;
    const hot::Context direct = context(true, key.plain), counting = context(true, key.on_gpu());
    Step step(direct, shape, spec, any_float());
    const auto expected = step.results(stream_, [&] { step.queue(direct); });
    EXPECT_EQ(step.results(stream_, [&] { step.queue(counting); }), expected)
        << "round " << round << " " << hot::basis_name(spec.low_rank.basis);
  }
}

// Compares weight_int4 and inputs with exponents on CUDA with the CPU, bit for bit.
// Shapes, strides, types and steps are random, some rows are long, and a CUDA graph repeats a call.
#include "support_cuda.h"

using namespace hot_test;

namespace {

// A weight on both sides with its codes, and an x of the same features.
class Int4Layer {
 public:
  Int4Layer(std::int64_t tokens, std::int64_t outs, std::int64_t ins,
            const hot::WeightInt4Spec& spec, DType dtype, bool exponents, std::int64_t gap = 0,
            hot::BackwardLinearSpec kept = recipe("default"))
      : kept_spec_(std::move(kept)),
        spec_(spec),
        outs_(outs),
        x_(tokens, ins, dtype, gap, gap),
        w_(outs, ins, dtype, gap, gap),
        exponents_(1, ins, DType::i8),
        with_exponents_(exponents),
        codes_(1, size(hot::weight_int4_bytes(outs, ins, spec)), DType::i8),
        expanded_(1, size(hot::forward_weight_bytes(outs, ins, spec.forward)), DType::i8),
        floats_(outs, ins, dtype, gap, gap),
        x_codes_(1, size(hot::forward_input_bytes(tokens, ins, spec.forward)), DType::i8),
        kept_(1, size(hot::saved_layout(tokens, ins, kept_spec_).bytes), DType::i8) {
    x_.fill(awkward(tokens * ins));
    w_.fill(awkward(outs * ins));
    for (std::int64_t i = 0; i < ins; ++i) {
      exponents_.on<std::int8_t>(false)[i] = static_cast<std::int8_t>(
          random_int(0, 999) == 0 ? random_int(-128, 127) : random_int(-4, 4));
    }
    exponents_.push();
  }

  void queue(const hot::Context& context, bool on_gpu) {
    const ConstTensorView exponents = with_exponents_ ? exponents_.flat(on_gpu) : TensorView{};
    const hot::ConstQuantizedWeight q = hot::quantize_weight_int4(
        context, w_.view(on_gpu), exponents, spec_, {codes_.view(on_gpu).data, bytes(codes_)});
    const hot::ConstQuantizedWeight wide =
        hot::expand_weight_int4(context, q, spec_, {expanded_.view(on_gpu).data, bytes(expanded_)});
    hot::dequantize_weight(context, wide, spec_.forward, floats_.view(on_gpu), exponents);
    const hot::QuantizedInput out{x_codes_.view(on_gpu).data, bytes(x_codes_)};
    hot::quantize_forward_input(context, x_.view(on_gpu), spec_.forward, out, exponents);
  }
  // Queues quantize_forward_input for an x that is also saved, with its scratch.
  void queue_kept(const hot::Context& context, bool on_gpu) {
    const hot::QuantizedInput out{x_codes_.view(on_gpu).data, bytes(x_codes_)};
    const std::size_t needed = hot::compress_activation_workspace(
        context, x_.view(false).shape[0], x_.view(false).shape[1], kept_spec_);
    scratch_ = std::make_unique<Mirrored>(needed);
    hot::quantize_forward_input(context, x_.view(on_gpu), spec_.forward, out, kept_spec_,
                                {kept_.view(on_gpu).data, bytes(kept_)},
                                {scratch_->on<char>(on_gpu), needed}, exponents_.flat(on_gpu));
  }
  // Expands the host's codes with other steps on both sides.
  void expand_any_steps(const hot::Context& context) {
    auto* const host = codes_.on<std::uint8_t>(false);
    for (std::size_t i = 0; i < bytes(codes_); ++i) {
      host[i] = static_cast<std::uint8_t>(random_int(0, 255));
    }
    codes_.push();
    const std::int64_t ins = w_.view(false).shape[1];
    for (const bool on_gpu : {false, true}) {
      hot::expand_weight_int4(
          on_gpu ? context : cpu(4),
          {codes_.view(on_gpu).data, bytes(codes_), outs_, ins, hot::weight_int4_format(spec_)},
          spec_, {expanded_.view(on_gpu).data, bytes(expanded_)});
    }
  }
  void expect_equal(const std::string& what) {
    codes_.expect_equal(what + ": codes");
    expanded_.expect_equal(what + ": expanded");
    floats_.expect_equal(what + ": floats");
    x_codes_.expect_equal(what + ": codes of x");
    kept_.expect_equal(what + ": saved x");
  }
  void poison(cudaStream_t stream) {
    for (Mirror* const one : {&codes_, &expanded_, &x_codes_}) {
      check(cudaMemsetAsync(one->view(true).data, 0xA5, bytes(*one), stream));
    }
  }

 private:
  static std::int64_t size(std::size_t bytes) { return static_cast<std::int64_t>(bytes); }
  static std::size_t bytes(Mirror& one) {
    return static_cast<std::size_t>(one.view(false).shape[1]);
  }

  hot::BackwardLinearSpec kept_spec_;
  hot::WeightInt4Spec spec_;
  std::int64_t outs_;
  Mirror x_, w_, exponents_;
  bool with_exponents_;
  Mirror codes_, expanded_, floats_, x_codes_, kept_;
  std::unique_ptr<Mirrored> scratch_;
};

class WeightInt4Cuda : public CudaTest {
 protected:
  void equals_cpu(Int4Layer& layer, const std::string& what, int arch = 0) {
    layer.queue(cpu(4), false);
    layer.queue(cuda(arch), true);
    synchronize();
    layer.expect_equal(what);
  }
};

hot::WeightInt4Spec any_spec() {
  return {{forward_block(random_int(0, 7))}, random_int(0, 1) == 0 ? 32 : 64};
}

}  // namespace

TEST_F(WeightInt4Cuda, random_layers_equal_cpu) {
  for (int round = 0; round < 120; ++round) {
    const hot::WeightInt4Spec spec = any_spec();
    const std::int64_t block = spec.forward.hadamard_block;
    const std::int64_t ins = random_int(0, 12) * std::max<std::int64_t>(block, spec.group) +
                             (block >= spec.group ? random_int(0, block - 1) : 0);
    Int4Layer layer(any_size(), random_int(0, 5) == 0 ? 0 : any_size(), ins, spec, any_float(),
                    random_int(0, 2) != 0, random_int(0, 1) * random_int(1, 9));
    equals_cpu(layer, "round " + std::to_string(round), random_int(0, 1) * 80);
  }
}

// Rows in one and several chunks of shared memory, and all numbers of lanes per row of x.
TEST_F(WeightInt4Cuda, long_rows_equal_cpu) {
  for (const std::int64_t ins : {64, 192, 768, 2048, 4032, 4096, 4160, 8192, 14336, 28672}) {
    for (const DType dtype : float_types) {
      Int4Layer layer(5, 9, ins, {{64}, 32}, dtype, true);
      equals_cpu(layer, std::to_string(ins));
    }
  }
}

// An x that is also saved: one read of x as INT4, and as INT8 also of more tokens than a cluster
// holds.
TEST_F(WeightInt4Cuda, a_kept_input_with_exponents_equals_cpu) {
  const auto equals = [&](std::int64_t tokens, std::int64_t ins, DType dtype, const char* kept) {
    Int4Layer layer(tokens, 1, ins, {{64}, 32}, dtype, true, 0, recipe(kept));
    layer.queue_kept(cpu(4), false);
    layer.queue_kept(cuda().with_key(cpu().key()), true);
    synchronize();
    layer.expect_equal(std::string(kept) + " " + std::to_string(ins));
  };
  for (const std::int64_t ins : {64, 100, 768, 4096, 14336}) {
    for (const DType dtype : float_types) equals(197, ins, dtype, "default");
  }
  equals(197, 768, DType::bf16, "accurate");
  equals(20000, 256, DType::bf16, "accurate");
}

TEST_F(WeightInt4Cuda, every_byte_expands_as_on_the_cpu) {
  for (const int group : {32, 64}) {
    Int4Layer layer(1, 300, 1088, {{64}, group}, DType::bf16, false);
    layer.expand_any_steps(cuda());
    synchronize();
    layer.expect_equal(std::to_string(group));
  }
}

TEST_F(WeightInt4Cuda, a_captured_call_repeats_its_bits) {
  Int4Layer layer(300, 256, 320, {{64}, 32}, DType::bf16, true);
  layer.queue(cpu(4), false);
  replay([&] { layer.queue(cuda(), true); }, [&] { layer.poison(stream_); });
  layer.expect_equal("captured");
}

// Compares forward_linear and quantize_forward_input on CUDA with the CPU, bit for bit: random
// shapes, strides and types, every plan of the tables, a CUDA graph.
#include "plan_cases.h"
#include "support_cuda.h"

using namespace hot_test;

namespace {

// A layer's arrays on both sides.
class ForwardLayer {
 public:
  ForwardLayer(const hot::LinearShape& shape, int block, DType x, DType w, DType bias, DType y,
               std::int64_t gap = 0)
      : shape_(shape),
        spec_{block},
        x_(shape.tokens, shape.in_features, x, gap, gap),
        w_(shape.out_features, shape.in_features, w, gap),
        bias_(1, shape.out_features, bias, 0, gap),
        y_(shape.tokens, shape.out_features, y, gap, gap),
        codes_(hot::forward_weight_bytes(shape.out_features, shape.in_features, spec_)),
        x_codes_(hot::forward_input_bytes(shape.tokens, shape.in_features, spec_)) {
    x_.fill(awkward(shape.tokens * shape.in_features));
    w_.fill(awkward(shape.out_features * shape.in_features));
    bias_.fill(normal(shape.out_features));
  }

  // Queues the call. Its scratch lives as long as the layer; w and x may be quantised before.
  void queue(const hot::Context& context, bool on_gpu, bool with_bias, bool quantized,
             bool quantized_x = false) {
    const std::size_t bytes =
        hot::forward_linear_workspace(context, shape_, spec_, quantized, quantized_x);
    const hot::Workspace workspace = grown(scratch_, bytes, on_gpu);
    const ConstTensorView bias = with_bias ? bias_.flat(on_gpu) : TensorView{};
    const ConstTensorView x = x_.view(on_gpu), w = w_.view(on_gpu);
    const auto run = [&](const auto& left) {
      if (quantized) {
        const hot::ConstQuantizedWeight codes = hot::quantize_forward_weight(
            context, w, spec_, {codes_.on<char>(on_gpu), codes_.host.size()});
        hot::forward_linear(context, left, codes, bias, spec_, y_.view(on_gpu), workspace);
      } else {
        hot::forward_linear(context, left, w, bias, spec_, y_.view(on_gpu), workspace);
      }
    };
    if (quantized_x) {
      run(hot::quantize_forward_input(context, x, spec_,
                                      {x_codes_.on<char>(on_gpu), x_codes_.host.size()}));
    } else {
      run(x);
    }
  }
  Mirror& y() { return y_; }

 private:
  hot::LinearShape shape_;
  hot::ForwardLinearSpec spec_;
  Mirror x_, w_, bias_, y_;
  Mirrored codes_, x_codes_;
  std::unique_ptr<Mirrored> scratch_;
};

// x on both sides with its codes for the forward product and its saved form.
class KeptInput {
 public:
  KeptInput(std::int64_t tokens, std::int64_t in_features, DType dtype, int block,
            hot::BackwardLinearSpec spec, std::int64_t gap = 0)
      : tokens_(tokens),
        in_features_(in_features),
        forward_{block},
        spec_(std::move(spec)),
        x_(tokens, in_features, dtype, gap, gap),
        codes_(1,
               static_cast<std::int64_t>(hot::forward_input_bytes(tokens, in_features, forward_)),
               DType::i8),
        kept_(1, static_cast<std::int64_t>(hot::saved_layout(tokens, in_features, spec_).bytes),
              DType::i8) {
    x_.fill(awkward(tokens * in_features));
  }

  // Queues the call with its scratch. `kept` requests both forms of x.
  void queue(const hot::Context& context, bool on_gpu, bool kept = true) {
    const ConstTensorView x = x_.view(on_gpu);
    const hot::QuantizedInput out{codes_.view(on_gpu).data,
                                  hot::forward_input_bytes(tokens_, in_features_, forward_)};
    if (!kept) {
      hot::quantize_forward_input(context, x, forward_, out);
      return;
    }
    const std::size_t bytes =
        hot::compress_activation_workspace(context, tokens_, in_features_, spec_);
    hot::quantize_forward_input(
        context, x, forward_, out, spec_,
        {kept_.view(on_gpu).data, hot::saved_layout(tokens_, in_features_, spec_).bytes},
        grown(scratch_, bytes, on_gpu));
  }
  void expect_equal(const std::string& what) {
    codes_.expect_equal(what + ": codes");
    kept_.expect_equal(what + ": kept");
  }
  // Resets both results on the device.
  void poison(cudaStream_t stream) {
    for (Mirror* const one : {&codes_, &kept_}) {
      const auto bytes = static_cast<std::size_t>(one->view(true).shape[1]);
      check(cudaMemsetAsync(one->view(true).data, 0xA5, bytes, stream));
    }
  }

 private:
  std::int64_t tokens_, in_features_;
  hot::ForwardLinearSpec forward_;
  hot::BackwardLinearSpec spec_;
  Mirror x_, codes_, kept_;
  std::unique_ptr<Mirrored> scratch_;
};

class ForwardLinearCuda : public CudaTest {
 protected:
  // Half of the calls on CUDA quantise x before.
  void equals_cpu(ForwardLayer& layer, bool with_bias, bool quantized, const std::string& what,
                  int arch = 0) {
    layer.queue(cpu(4), false, with_bias, quantized);
    layer.queue(cuda(arch), true, with_bias, quantized, random_int(0, 1) == 0);
    synchronize();
    layer.y().expect_equal(what);
  }
  void kept_equals_cpu(KeptInput& input, bool kept, const std::string& what, int arch = 0) {
    const hot::Key key{generator()(), generator()(), static_cast<std::uint32_t>(random_int(0, 99))};
    input.queue(cpu(4).with_key(key), false, kept);
    input.queue(cuda(arch).with_key(key), true, kept);
    synchronize();
    input.expect_equal(what);
  }
};

}  // namespace

TEST_F(ForwardLinearCuda, every_plan_equals_cpu) {
  for (const ForwardPlanCase& one : forward_plan_cases()) {
    hot::LinearShape shape = one.shape;
    shape.tokens = std::min<std::int64_t>(shape.tokens, 6000);  // limits the CPU's time
    for (const bool with_bias : {true, false}) {
      ForwardLayer layer(shape, one.hadamard_block, one.dtype, one.dtype, one.bias_dtype,
                         one.dtype);
      equals_cpu(layer, with_bias, one.quantized_weight, one.name);
    }
  }
}

TEST_F(ForwardLinearCuda, every_plan_of_a_kept_input_equals_cpu) {
  for (const ForwardPlanCase& one : kept_plan_cases()) {
    KeptInput input(one.shape.tokens, one.shape.in_features, one.dtype, one.hadamard_block,
                    *one.kept);
    kept_equals_cpu(input, true, one.name);
  }
}

// All numbers of lanes per row.
TEST_F(ForwardLinearCuda, every_row_of_a_kept_input_equals_cpu) {
  for (const std::int64_t blocks :
       {1,  2,  3,  4,  5,  6,  7,  8,  9,  10,  11,  12,  13,  14,  15,  16,  21,
        24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 192, 208, 224, 384, 512, 768}) {
    for (const std::int64_t tokens : {1, 63, 64, 65, 197}) {
      KeptInput input(tokens, 64 * blocks, random_int(0, 1) == 0 ? DType::bf16 : DType::f16, 64,
                      recipe("default"));
      kept_equals_cpu(input, true, std::to_string(tokens) + " x " + std::to_string(64 * blocks));
    }
  }
}

TEST_F(ForwardLinearCuda, a_captured_kept_input_repeats_its_bits) {
  for (const char* const name : {"default", "fast"}) {
    KeptInput input(197, 1024, DType::bf16, 64, recipe(name));
    input.queue(cpu(4).with_key({1, 2, 3}), false);
    replay([&] { input.queue(cuda().with_key({1, 2, 3}), true); }, [&] { input.poison(stream_); });
    input.expect_equal(name);
  }
}

TEST_F(ForwardLinearCuda, a_captured_call_repeats_its_bits) {
  ForwardLayer layer({300, 256, 320}, 64, DType::bf16, DType::f32, DType::bf16, DType::bf16);
  layer.queue(cpu(4), false, true, false);
  const TensorView y = layer.y().view(true);
  replay([&] { layer.queue(cuda(), true, true, false); },
         [&] { check(cudaMemsetAsync(y.data, 0xA5, 300 * 256 * 2, stream_)); });
  layer.y().expect_equal("captured");
}

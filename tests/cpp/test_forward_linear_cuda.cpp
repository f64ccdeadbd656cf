// forward_linear on CUDA against the CPU, bit for bit: random shapes, strides and types, every plan
// of the table, a CUDA graph.
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
        codes_(hot::forward_weight_bytes(shape.out_features, shape.in_features, spec_)) {
    x_.fill(awkward(shape.tokens * shape.in_features));
    w_.fill(awkward(shape.out_features * shape.in_features));
    bias_.fill(normal(shape.out_features));
  }

  // Queues the call, whose scratch lives as long as the layer.
  void queue(const hot::Context& context, bool on_gpu, bool with_bias, bool quantized) {
    const std::size_t bytes = hot::forward_linear_workspace(context, shape_, spec_, quantized);
    if (scratch_ == nullptr || scratch_->host.size() < bytes) {
      scratch_ = std::make_unique<Mirrored>(bytes, static_cast<char>(0xA5));
    }
    const hot::Workspace workspace{scratch_->on<char>(on_gpu), bytes};
    const ConstTensorView bias = with_bias ? bias_.flat(on_gpu) : TensorView{};
    const ConstTensorView x = x_.view(on_gpu), w = w_.view(on_gpu);
    if (quantized) {
      const hot::ConstQuantizedWeight codes = hot::quantize_forward_weight(
          context, w, spec_, {codes_.on<char>(on_gpu), codes_.host.size()});
      hot::forward_linear(context, x, codes, bias, spec_, y_.view(on_gpu), workspace);
    } else {
      hot::forward_linear(context, x, w, bias, spec_, y_.view(on_gpu), workspace);
    }
  }
  Mirror& y() { return y_; }

 private:
  hot::LinearShape shape_;
  hot::ForwardLinearSpec spec_;
  Mirror x_, w_, bias_, y_;
  Mirrored codes_;
  std::unique_ptr<Mirrored> scratch_;
};

class ForwardLinearCuda : public CudaTest {
 protected:
  void equals_cpu(ForwardLayer& layer, bool with_bias, bool quantized, const std::string& what,
                  int arch = 0) {
    layer.queue(cpu(4), false, with_bias, quantized);
    layer.queue(hot::Context::cuda(0, stream_).with_arch(arch), true, with_bias, quantized);
    check(cudaStreamSynchronize(stream_));
    layer.y().expect_equal(what);
  }
};

}  // namespace

TEST_F(ForwardLinearCuda, equals_cpu) {
  for (int round = 0; round < 120; ++round) {
    const hot::LinearShape shape{random_int(0, 9) == 0 ? random_int(0, 2) : any_size(), any_size(),
                                 random_int(0, 9) == 0 ? random_int(0, 2) : any_size()};
    const int block = 1 << random_int(0, 8);
    ForwardLayer layer(shape, block, any_float(), any_float(), any_float(), any_float(),
                       random_int(0, 2));
    const int arch = random_int(0, 2) == 0 ? 80 : 0;
    equals_cpu(layer, random_int(0, 3) > 0, random_int(0, 1) == 0,
               "round " + std::to_string(round) + ", " + std::to_string(shape.tokens) + " x " +
                   std::to_string(shape.out_features) + " x " + std::to_string(shape.in_features) +
                   ", block " + std::to_string(block) + ", arch " + std::to_string(arch),
               arch);
  }
}

TEST_F(ForwardLinearCuda, every_plan_equals_cpu) {
  for (const ForwardPlanCase& of : forward_plan_cases()) {
    hot::LinearShape shape = of.shape;
    shape.tokens = std::min<std::int64_t>(shape.tokens, 6000);  // the CPU's share of the time
    for (const bool with_bias : {true, false}) {
      ForwardLayer layer(shape, of.hadamard_block, of.dtype, of.dtype, of.bias_dtype, of.dtype);
      equals_cpu(layer, with_bias, of.quantized_weight, of.name);
    }
  }
}

TEST_F(ForwardLinearCuda, a_captured_call_repeats_its_bits) {
  ForwardLayer layer({300, 256, 320}, 64, DType::bf16, DType::f32, DType::bf16, DType::bf16);
  const hot::Context context = hot::Context::cuda(0, stream_);
  layer.queue(cpu(4), false, true, false);
  layer.queue(context, true, true, false);  // kernels are loaded before a capture
  check(cudaStreamSynchronize(stream_));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  layer.queue(context, true, true, false);
  check(cudaStreamEndCapture(stream_, &graph));
  check(cudaGraphInstantiate(&executable, graph, 0));
  const TensorView y = layer.y().view(true);
  check(cudaMemsetAsync(y.data, 0xA5, 300 * 256 * 2, stream_));
  check(cudaGraphLaunch(executable, stream_));
  check(cudaStreamSynchronize(stream_));
  layer.y().expect_equal("captured");
  check(cudaGraphExecDestroy(executable));
  check(cudaGraphDestroy(graph));
}

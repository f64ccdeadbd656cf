// Stage: integer product by the CUTLASS instances for sm_90a (wgmma). Operands must suit the tensor
// memory accelerator. The choice between them and the mma.sync kernels is in plan_gemm.cpp.
#include <cstdint>

#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/gemm_int8_sm90.h"
#include "cuda/launch.h"
#include "cuda/launchers.h"

namespace hot::detail {
namespace {

// Repeats a single scale in a vector.
__global__ void broadcast_scale_kernel(const float* scale, std::int64_t count, float* out) {
  begin_kernel();
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) out[i] = *scale;
}

// Converts a bias to a contiguous fp32 vector, as the products require.
__global__ void widen_kernel(MatrixIn bias, float* out, std::uint32_t* counter) {
  begin_kernel();
  zero_counter(counter);
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < bias.cols) out[i] = load_element(bias, 0, i);
}

// Vectors of repeated single scales in a product's scratch, and the rest of it.
struct BroadcastScales {
  float *a, *b;
  void* rest;
  explicit BroadcastScales(const WorkProduct& product)
      : a(static_cast<float*>(product.scratch)),
        b(a + round_up(product.args.m, 64)),
        rest(b + round_up(product.args.n, 64)) {}
};

}  // namespace

const Sm90Instance& sm90_instance(Sm90Kernel kernel, DType out, Sm90Output output) {
  for (const Sm90Instance* const* list = sm90_lists; *list != nullptr; ++list) {
    for (const Sm90Instance* one = *list; one->run != nullptr; ++one) {
      if (one->kernel == kernel && one->out == out && one->output == output) return *one;
    }
  }
  throw Error(ErrorCode::unsupported, "gemm: this build has no such sm_90a kernel");
}

void launch_broadcast_scale(const Context& context, const plan::Step& step, const Work& work) {
  const auto& part = step.as<plan::OperandStep>();
  const WorkProduct& product = work.products[part.product];
  const GemmArgs& args = product.args;
  const BroadcastScales vectors(product);
  launch("gemm", context, broadcast_scale_kernel, step.shape,
         part.of_b ? args.b_scale : args.a_scale, part.of_b ? args.n : args.m,
         part.of_b ? vectors.b : vectors.a);
}

void launch_widen(const Context& context, const plan::Step& step, const Work& work) {
  launch("forward_linear", context, widen_kernel, step.shape, work.bias, work.wide_bias,
         counter_to_zero(step, work));
}

void launch_wgmma(const Context& context, const plan::Step& step, const Work& work) {
  const auto& part = step.as<plan::ProductStep>();
  const WorkProduct& product = work.products[part.product];
  GemmArgs args = product.args;
  const BroadcastScales vectors(product);
  if (args.a_scale_step == 0) args.a_scale = vectors.a;
  if (args.b_scale_step == 0) args.b_scale = vectors.b;
  const Sm90Output output = args.accumulate        ? Sm90Output::accumulate
                            : args.bias != nullptr ? Sm90Output::bias
                                                   : Sm90Output::store;
  void* const workspace = part.wgmma.kernel == Sm90Kernel::stream_k ? vectors.rest : work.counter;
  sm90_instance(part.wgmma.kernel, args.out.dtype, output)
      .run(context, args, part.wgmma, workspace);
}

}  // namespace hot::detail

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
__global__ void widen_kernel(MatrixIn bias, float* out) {
  begin_kernel();
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < bias.cols) out[i] = load_element(bias, 0, i);
}

}  // namespace

const Sm90Instance& sm90_instance(Sm90Kernel kernel, DType out, Sm90Output output) {
  for (const Sm90Instance* const* at = sm90_instances; *at != nullptr; ++at) {
    const Sm90Instance& one = **at;
    if (one.kernel == kernel && one.out == out && one.output == output) return one;
  }
  throw Error(ErrorCode::unsupported, "gemm: this build has no such sm_90a kernel");
}

void launch_broadcast_scale(const Context& context, const plan::Step& step, const float* scale,
                            std::int64_t count, float* vector) {
  launch("gemm", context, broadcast_scale_kernel, step.shape, scale, count, vector);
}

void launch_widen(const Context& context, const plan::Step& step, const MatrixIn& bias,
                  float* out) {
  launch("forward_linear", context, widen_kernel, step.shape, bias, out);
}

void launch_wgmma(const Context& context, const plan::Step& step, const GemmArgs& args,
                  void* workspace) {
  const Sm90Plan& plan = step.as<plan::ProductStep>().wgmma;
  const Sm90Output output = args.accumulate        ? Sm90Output::accumulate
                            : args.bias != nullptr ? Sm90Output::bias
                                                   : Sm90Output::store;
  sm90_instance(plan.kernel, args.out.dtype, output).run(context, args, plan, workspace);
}

}  // namespace hot::detail

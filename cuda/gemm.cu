// Stage: integer product on CUDA by the instances for sm_90a (wgmma, by CUTLASS), which take what
// the tensor memory accelerator can move. plan.cpp chooses among them and the mma.sync kernels.
#include <cstdint>

#include "cuda/device/matrix_io.cuh"
#include "cuda/gemm_int8_sm90.h"
#include "cuda/launch.h"
#include "cuda/launchers.h"

namespace hot::detail {
namespace {

// One scale for all, as a vector.
__global__ void spread_kernel(const float* scale, std::int64_t count, float* out) {
  begin_kernel();
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) out[i] = *scale;
}

// A bias as the products take it: a contiguous vector of fp32.
__global__ void widen_kernel(MatrixIn bias, float* out) {
  begin_kernel();
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < bias.cols) out[i] = load_element(bias, 0, i);
}

struct Sm90Instances {
  Sm90Pingpong *pingpong, *wide;  // wide: null: none
  Sm90StreamK* stream_k;          // null: none
};

Sm90Instances sm90_instances(DType out, bool accumulate, bool bias) {
  if (bias) {
    switch (out) {
      case DType::bf16:
        return {sm90_gemm_bf16_128x128_bias, sm90_gemm_bf16_128x192_bias, nullptr};
      case DType::f16:
        return {sm90_gemm_f16_128x128_bias, nullptr, nullptr};
      default:
        return {sm90_gemm_f32_128x128_bias, nullptr, nullptr};
    }
  }
  switch (out) {
    case DType::bf16:
      return accumulate ? Sm90Instances{sm90_gemm_bf16_128x128_accumulate, nullptr,
                                        sm90_gemm_bf16_stream_k_accumulate}
                        : Sm90Instances{sm90_gemm_bf16_128x128, sm90_gemm_bf16_128x192,
                                        sm90_gemm_bf16_stream_k};
    case DType::f16:
      return {accumulate ? sm90_gemm_f16_128x128_accumulate : sm90_gemm_f16_128x128, nullptr,
              nullptr};
    default:
      return accumulate ? Sm90Instances{sm90_gemm_f32_128x128_accumulate, nullptr,
                                        sm90_gemm_f32_stream_k_accumulate}
                        : Sm90Instances{sm90_gemm_f32_128x128, sm90_gemm_f32_128x192,
                                        sm90_gemm_f32_stream_k};
  }
}

}  // namespace

void launch_spread(const Context& context, const plan::Step& step, const float* scale,
                   std::int64_t count, float* vector) {
  launch("gemm", context, spread_kernel, step.shape, scale, count, vector);
}

void launch_widen(const Context& context, const plan::Step& step, const MatrixIn& bias,
                  float* out) {
  launch("forward_linear", context, widen_kernel, step.shape, bias, out);
}

void launch_wgmma(const Context& context, const plan::Step& step, const GemmArgs& args,
                  void* workspace) {
  const Sm90Plan& plan = step.as<plan::ProductStep>().wgmma;
  const Sm90Instances instances =
      sm90_instances(args.out.dtype, args.accumulate, args.bias != nullptr);
  if (step.kernel == plan::Kernel::wgmma_stream_k) {
    instances.stream_k(context, args, plan, workspace);
  } else if (step.kernel == plan::Kernel::wgmma_128x192) {
    instances.wide(context, args, plan);
  } else {
    instances.pingpong(context, args, plan);
  }
}

}  // namespace hot::detail

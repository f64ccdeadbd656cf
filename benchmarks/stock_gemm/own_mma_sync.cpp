// The C ABI of libhot's own mma.sync product beside the stock tiles, any tile by its number on any
// GPU: libhot exports none of it, and takes wgmma where it can.
// benchmarks/evidence/bench_mma_sync.py loads it.
#include <cuda_runtime_api.h>

#include <exception>
#include <string>

#include "cuda/gemm_sm80.h"
#include "cuda/launch.h"
#include "hot/context.h"

namespace {

using hot::detail::GemmArgs;
using hot::detail::MmaCodes;
using hot::detail::MmaPart;
using hot::detail::MmaPlan;
using hot::detail::MmaProduct;

thread_local std::string error;

hot::Context context_of(cudaStream_t stream) {
  int device = 0;
  static_cast<void>(cudaGetDevice(&device));
  return hot::Context::cuda(device, stream);
}

hot::detail::MmaDevice device_of(const hot::Context& context) {
  const auto ask = [&](cudaDeviceAttr attribute) {
    return hot::detail::device_attribute(context, attribute, "bench_mma_sync");
  };
  return {ask(cudaDevAttrMultiProcessorCount),
          10 * ask(cudaDevAttrComputeCapabilityMajor) + ask(cudaDevAttrComputeCapabilityMinor)};
}

}  // namespace

#define HOT_STOCK_API extern "C" __attribute__((visibility("default")))

HOT_STOCK_API int hot_mma_sync_count() { return hot::detail::mma_tile_count; }

HOT_STOCK_API const char* hot_mma_sync_name(int tile) {
  return hot::detail::mma_tiles[tile].name.data();
}

// Of the last call that failed in this thread.
HOT_STOCK_API const char* hot_mma_sync_error() { return error.c_str(); }

// Fills `plan` for dense operands and a dense bf16 result: the one that libhot would choose (tile:
// -1), or one by a tile of choice, with the steps of the last tiles shared out or not. Returns the
// bytes of workspace it needs; -1: the tile does not do this product.
HOT_STOCK_API long long hot_mma_sync_plan(int tile, int share, long long m, long long n,
                                          long long k, MmaPlan* plan) {
  const hot::detail::MmaDevice device = device_of(context_of(nullptr));
  const MmaProduct product{m, n, k, k % 16 == 0 && n % 8 == 0, k > hot::detail::int32_safe_k};
  if (tile >= 0 && !hot::detail::mma_can(device, product, tile)) return -1;
  *plan = tile < 0 ? hot::detail::mma_choose(device, product, share != 0)
                   : hot::detail::mma_plan_of(device, product, tile, share != 0);
  return static_cast<long long>(hot::detail::mma_workspace(*plan));
}

// out[m, n] = (sum over k of a[m, k] * b[n, k]) * b_scale[n] * a_scale[m], to bf16; 0, or 1 and an
// error.
HOT_STOCK_API int hot_mma_sync_run(const MmaPlan* plan, long long m, long long n, long long k,
                                   const std::int8_t* a, const std::int8_t* b, const float* a_scale,
                                   const float* b_scale, void* out, void* workspace,
                                   cudaStream_t stream) {
  try {
    const GemmArgs args{a,       b,       m, n, k,    k,     k,
                        a_scale, b_scale, 1, 1, 1.0F, false, {out, hot::DType::bf16, m, n, n, 1}};
    const hot::Context context = context_of(stream);
    mma_gemm(context, args, MmaCodes::int8, *plan, MmaPart::tiles, workspace);
    if (plan->shared > 0) {
      mma_gemm(context, args, MmaCodes::int8, *plan, MmaPart::fixup, workspace);
    }
    return 0;
  } catch (const std::exception& caught) {
    error = caught.what();
    return 1;
  }
}

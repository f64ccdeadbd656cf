// The C ABI of libhot_stock_gemm; benchmarks/evidence/rivals loads it.
#include <iterator>

#include "stock_gemm.h"

namespace {

struct Instance {
  const char* name;  // schedule, tile, cluster
  hot::stock::Run* run;
};

constexpr Instance instances[] = {
    {"pingpong 128x128 2x1", hot::stock::pingpong_128x128_2x1},
    {"cooperative 128x192 2x1", hot::stock::cooperative_128x192_2x1},
    {"cooperative 128x256 2x1", hot::stock::cooperative_128x256_2x1},
    {"cooperative 256x128 1x2", hot::stock::cooperative_256x128_1x2},
};

}  // namespace

#define HOT_STOCK_API extern "C" __attribute__((visibility("default")))

HOT_STOCK_API int hot_stock_gemm_count() { return static_cast<int>(std::size(instances)); }

HOT_STOCK_API const char* hot_stock_gemm_name(int instance) { return instances[instance].name; }

// 0, or the cutlass::Status that came instead. raster: 0 along N, 1 along M.
HOT_STOCK_API int hot_stock_gemm_run(int instance, int raster, int swizzle, int m, int n, int k,
                                     const std::int8_t* a, const std::int8_t* b,
                                     const float* a_scale, const float* b_scale, void* out,
                                     cudaStream_t stream) {
  return instances[instance].run({m, n, k, a, b, a_scale, b_scale, out}, {raster == 1, swizzle},
                                 stream);
}

// In place of gemm_int8_sm90_*.cu: the mma.sync kernels serve every architecture.
#include "cuda/gemm_int8_sm90.h"
#include "hot/error.h"

namespace hot::detail {
namespace {

[[noreturn]] void missing() {
  throw Error(ErrorCode::unsupported, "gemm: this build has no sm_90a kernels");
}

}  // namespace

bool sm90_built() noexcept { return false; }

void sm90_gemm_bf16_128x128(const Context&, const GemmArgs&, const Sm90Plan&) { missing(); }
void sm90_gemm_bf16_128x128_accumulate(const Context&, const GemmArgs&, const Sm90Plan&) {
  missing();
}
void sm90_gemm_f16_128x128(const Context&, const GemmArgs&, const Sm90Plan&) { missing(); }
void sm90_gemm_f16_128x128_accumulate(const Context&, const GemmArgs&, const Sm90Plan&) {
  missing();
}
void sm90_gemm_f32_128x128(const Context&, const GemmArgs&, const Sm90Plan&) { missing(); }
void sm90_gemm_f32_128x128_accumulate(const Context&, const GemmArgs&, const Sm90Plan&) {
  missing();
}
void sm90_gemm_bf16_128x192(const Context&, const GemmArgs&, const Sm90Plan&) { missing(); }
void sm90_gemm_f32_128x192(const Context&, const GemmArgs&, const Sm90Plan&) { missing(); }
void sm90_gemm_bf16_128x128_bias(const Context&, const GemmArgs&, const Sm90Plan&) { missing(); }
void sm90_gemm_f16_128x128_bias(const Context&, const GemmArgs&, const Sm90Plan&) { missing(); }
void sm90_gemm_f32_128x128_bias(const Context&, const GemmArgs&, const Sm90Plan&) { missing(); }
void sm90_gemm_bf16_128x192_bias(const Context&, const GemmArgs&, const Sm90Plan&) { missing(); }

std::size_t sm90_stream_k_workspace(const Context&, const GemmArgs&, const Sm90Plan&) { return 0; }
void sm90_gemm_bf16_stream_k(const Context&, const GemmArgs&, const Sm90Plan&, void*) { missing(); }
void sm90_gemm_bf16_stream_k_accumulate(const Context&, const GemmArgs&, const Sm90Plan&, void*) {
  missing();
}
void sm90_gemm_f32_stream_k(const Context&, const GemmArgs&, const Sm90Plan&, void*) { missing(); }
void sm90_gemm_f32_stream_k_accumulate(const Context&, const GemmArgs&, const Sm90Plan&, void*) {
  missing();
}

}  // namespace hot::detail

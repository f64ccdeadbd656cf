// Copies from global to shared memory that run beside the arithmetic (cp.async, sm_80 on).
#pragma once

#include <cstdint>

namespace hot::detail {

// Whether every row can be copied 16 bytes at a time.
inline bool aligned_rows(const void* data, std::int64_t row_bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && row_bytes % 16 == 0;
}

__device__ inline unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// `bytes` of 16 from global memory, zeros for the rest; both addresses aligned to 16.
__device__ inline void copy_async(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

__device__ inline void copy_async(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The same without a branch, where `wanted`.
__device__ inline void copy_async_if(bool wanted, unsigned to, const void* from) {
  asm volatile(
      "{\n\t.reg .pred wanted;\n\t"
      "setp.ne.s32 wanted, %2, 0;\n\t"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16;\n\t}" ::"r"(to),
      "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
}

// One 32-bit word.
__device__ inline void copy_word_async(unsigned to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last `Pending` groups of this thread's copies have arrived.
template <int Pending>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace hot::detail

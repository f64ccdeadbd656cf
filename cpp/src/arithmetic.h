// The arithmetic of docs/numerics.md, whatever the caller's is.
#pragma once

#include <cfenv>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace hot::detail {

// While it lives, this thread rounds to nearest, flushes nothing to zero and traps nothing; then as
// before. A caller may have it otherwise (torch.set_flush_denormal; any library that was linked
// with -ffast-math), and a new thread has it as the one that made it.
class StandardArithmetic {
 public:
#if defined(__SSE2__)  // what fesetenv does beside this takes 20 times as long
  StandardArithmetic() : before_(_mm_getcsr()) {
    if ((before_ & ~raised) != standard) _mm_setcsr(standard);
  }
  ~StandardArithmetic() {
    if ((before_ & ~raised) != standard) _mm_setcsr(before_);
  }
#else
  StandardArithmetic() : kept_(std::fegetenv(&before_) == 0) { std::fesetenv(FE_DFL_ENV); }
  ~StandardArithmetic() {
    if (kept_) std::fesetenv(&before_);
  }
#endif
  StandardArithmetic(const StandardArithmetic&) = delete;
  StandardArithmetic& operator=(const StandardArithmetic&) = delete;

 private:
#if defined(__SSE2__)
  static constexpr unsigned raised = 0x3F;  // flags of exceptions, which stay as they come
  static constexpr unsigned standard = 0x1F80;
  unsigned before_;
#else
  std::fenv_t before_{};
  bool kept_;
#endif
};

}  // namespace hot::detail

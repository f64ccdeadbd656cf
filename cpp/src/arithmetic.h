// Floating-point arithmetic as docs/numerics.md defines it, whatever the caller's settings are.
#pragma once

#include <cfenv>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace hot::detail {

// While an object lives, its thread rounds to nearest, keeps subnormal numbers and traps nothing;
// the destructor restores the caller's settings. Callers may have others (torch.set_flush_denormal,
// or a library linked with -ffast-math), and a new thread inherits its creator's.
class StandardArithmetic {
 public:
#if defined(__SSE2__)  // fesetenv does more and takes 20 times as long
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
  static constexpr unsigned raised = 0x3F;  // exception flags are left as they are
  static constexpr unsigned standard = 0x1F80;
  unsigned before_;
#else
  std::fenv_t before_{};
  bool kept_;
#endif
};

}  // namespace hot::detail

// Floating-point settings that docs/numerics.md requires, independent of the caller's settings.
#pragma once

#include <cfenv>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace hot::detail {

// Guard object: its thread rounds to nearest, keeps subnormal numbers and does not trap. The
// destructor restores the caller's settings. These can differ (torch.set_flush_denormal, a library
// linked with -ffast-math), and a new thread inherits its creator's.
class StandardArithmetic {
 public:
#if defined(__SSE2__)  // fesetenv takes 20 times as long
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
  static constexpr unsigned raised = 0x3F;  // exception flags, which are not changed
  static constexpr unsigned standard = 0x1F80;
  unsigned before_;
#else
  std::fenv_t before_{};
  bool kept_;
#endif
};

}  // namespace hot::detail

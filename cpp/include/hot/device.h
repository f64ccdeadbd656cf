// Verdict on a GPU: can it run a build's kernels, and at full speed?
#pragma once

#include <cstdint>
#include <string>

#include "hot/api.h"

namespace hot {

struct DeviceVerdict {
  enum class Level : std::uint8_t {
    none,  // no kernel of the build runs there
    slow,  // runs, but another build would be faster or start without a delay
    full,
  };
  Level level = Level::none;
  std::string text;  // one line: the kernels that run; for `none` and `slow` also the remedy
};

HOT_API const char* level_name(DeviceVerdict::Level level) noexcept;

/// Verdict on a GPU of compute capability major.minor.
/// @param architectures  CMake's notation, e.g. "80-real;90a-real" (cuda_architectures()). A number
///                       without a suffix stands for machine code and PTX.
/// @param wgmma          true if the wgmma kernels were built; see cuda_wgmma()
HOT_API DeviceVerdict judge_device(int major, int minor, const std::string& architectures,
                                   bool wgmma);

/// Verdict on a CUDA device of this process. Throws `unsupported` in a build without CUDA, and
/// `invalid_argument` if there is no such device.
HOT_API DeviceVerdict cuda_device_verdict(int device);

/// Whether this build has the wgmma products for sm_90a, which need the CUTLASS headers.
HOT_API bool cuda_wgmma() noexcept;

}  // namespace hot

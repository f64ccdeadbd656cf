// Whether a GPU can run a build's kernels, and whether at full speed.
#pragma once

#include <cstdint>
#include <string>

#include "hot/api.h"

namespace hot {

struct DeviceVerdict {
  enum class Level : std::uint8_t {
    none,  // no kernel of the build runs there
    slow,  // runs, but a better build would be faster, or starts without a delay
    full,
  };
  Level level = Level::none;
  std::string text;  // one line: what runs; for `none` and `slow` also how to improve it
};

HOT_API const char* level_name(DeviceVerdict::Level level) noexcept;

/// The verdict on a GPU of compute capability major.minor.
/// @param architectures  as cuda_architectures() gives them: CMake's, e.g. "80-real;90a-real";
///                       a number alone is machine code and PTX
/// @param wgmma          whether the wgmma kernels were built; see cuda_wgmma()
HOT_API DeviceVerdict judge_device(int major, int minor, const std::string& architectures,
                                   bool wgmma);

/// The verdict on a CUDA device that this process sees. Throws `unsupported` in a build without
/// CUDA, `invalid_argument` if there is no such device.
HOT_API DeviceVerdict cuda_device_verdict(int device);

/// Whether this build holds the products for sm_90a by wgmma, which need the CUTLASS headers.
HOT_API bool cuda_wgmma() noexcept;

}  // namespace hot

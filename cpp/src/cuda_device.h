// What the CUDA runtime says about a device. In cuda/launch.cu, or cpu/no_cuda.cpp in a build
// without CUDA.
#pragma once

namespace hot::detail {

struct Capability {
  int major, minor;
};

// Of a device that there is.
Capability cuda_capability(int device);

// The runtime's words for why it counts no devices (a driver that is older than the runtime, say);
// "" where it counts them.
const char* cuda_device_trouble() noexcept;

// Throws `invalid_argument` where this process does not see the device (context.cpp).
void check_cuda_device(const char* call, int device);

}  // namespace hot::detail

// What the CUDA runtime says about a device. In cuda/launch.cu, or cpu/no_cuda.cpp in a build
// without CUDA.
#pragma once

namespace hot::detail {

struct Capability {
  int major, minor;
};

// Of a device that there is.
Capability cuda_capability(int device);

// Throws `invalid_argument` where this process does not see the device (context.cpp).
void check_cuda_device(const char* call, int device);

}  // namespace hot::detail

// What the CUDA runtime says about a device. In cuda/launch.cu, or cpu/no_cuda.cpp in a build
// without CUDA.
#pragma once

#include <functional>

#include "hot/context.h"

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

namespace plan {
struct DeviceFacts;
}
// Calls `call` with what plans know of a context's device (cuda/plan.h), which is current.
void with_device_facts(const Context& context,
                       const std::function<void(const plan::DeviceFacts&)>& call);

}  // namespace hot::detail

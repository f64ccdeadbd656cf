// Queries of the CUDA runtime, defined in cuda/launch.cpp, or in cpu/no_cuda.cpp for a build
// without CUDA.
#pragma once

#include <functional>

#include "hot/context.h"

namespace hot::detail {

struct Capability {
  int major, minor;
};

// The device must exist.
Capability cuda_capability(int device);

// The runtime's error text where it counts no devices (a driver older than the runtime, for
// example);
// "" otherwise.
const char* cuda_device_trouble() noexcept;

// Throws `invalid_argument` if this process does not see the device (context.cpp).
void check_cuda_device(const char* call, int device);

namespace plan {
struct DeviceFacts;
}
// Calls `call` with the facts that plans need about the context's device (cpp/src/plan/plan.h),
// made current.
void with_device_facts(const Context& context,
                       const std::function<void(const plan::DeviceFacts&)>& call);

}  // namespace hot::detail

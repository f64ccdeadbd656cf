// Queries of the CUDA runtime. Defined in cuda/launch.cpp; without CUDA in cpu/no_cuda.cpp.
#pragma once

#include <functional>

#include "hot/context.h"

namespace hot::detail {

struct Capability {
  int major, minor;
};

// Compute capability of an existing device.
Capability cuda_capability(int device);

// Error text of the runtime if it cannot count devices (driver too old, for example), else "".
const char* cuda_device_trouble() noexcept;

// Throws `invalid_argument` for a device that this process does not see (context.cpp).
void check_cuda_device(const char* call, int device);

namespace plan {
struct DeviceFacts;
}
// Makes the context's device current and calls `call` with its facts for plans (plan/plan.h).
void with_device_facts(const Context& context,
                       const std::function<void(const plan::DeviceFacts&)>& call);

}  // namespace hot::detail

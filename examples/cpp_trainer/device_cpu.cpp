#include <cstring>

#include "device_of.h"

namespace trainer {
namespace {

struct Loop {
  template <class Function>
  void operator()(std::int64_t count, const Function& function) const {
    for (std::int64_t i = 0; i < count; ++i) function(i);
  }
};

class Cpu : public DeviceOf<Loop> {
 public:
  Cpu() : DeviceOf(hot::Context::cpu(), hot::host_allocator(), Loop{}) {}
  void copy(void* to, const void* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
};

}  // namespace

std::unique_ptr<Device> make_cpu() { return std::make_unique<Cpu>(); }

}  // namespace trainer

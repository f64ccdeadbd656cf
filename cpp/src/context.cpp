#include "hot/context.h"

#include <string>

#if HOT_X86
#include <cpuid.h>
#endif
#if HOT_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "checks.h"
#include "cpu/thread_pool.h"
#include "cuda_device.h"
#include "hot/device.h"
#include "kernels.h"

namespace hot {

const char* isa_name(Isa isa) noexcept {
  constexpr const char* names[] = {"plain", "avx2", "avx512", "amx"};
  return detail::name_in(names, isa);
}

#if HOT_X86
namespace {

// Needed because clang's __builtin_cpu_supports knows "f16c" only since version 16.
bool has_f16c() noexcept {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

#if HOT_AMX
// Whether the processor has AMX with INT8 products and Linux lets this process use it.
bool may_use_amx() noexcept {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned tile_and_int8 = 3U << 24;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & tile_and_int8) != tile_and_int8) {
    return false;
  }
  constexpr unsigned tile_state = 3U << 17;  // bits of XCR0: Linux saves the tile registers
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & tile_state) != tile_state) return false;
  constexpr long request_permission = 0x1023,
                 tile_data = 18;  // ARCH_REQ_XCOMP_PERM of <asm/prctl.h>
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

}  // namespace
#endif

Isa best_isa() noexcept {
#if HOT_X86
  static const Isa best = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni")) {
#if HOT_AMX
      if (may_use_amx()) return Isa::amx;
#endif
      return Isa::avx512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
      return Isa::avx2;
    }
    return Isa::plain;
  }();
  return best;
#else
  return Isa::plain;
#endif
}

namespace {

int thread_count(int threads) {
  if (threads < 0 || threads > 1024) {
    detail::invalid("Context::cpu", "threads is ", threads, "; expected 0 to 1024");
  }
  return threads == 0 ? default_thread_count() : threads;
}

}  // namespace

Context Context::cpu(int threads) {
  Context context;
  context.isa_ = best_isa();
  context.pool_ = std::make_shared<ThreadPool>(thread_count(threads));
  return context;
}

Context Context::cpu(const Executor& executor, int threads) {
  if (executor.run == nullptr) detail::invalid("Context::cpu", "executor.run is null");
  Context context;
  context.isa_ = best_isa();
  context.pool_ = std::make_shared<ThreadPool>(thread_count(threads), executor);
  return context;
}

Context Context::cuda(int device, Stream stream) {
  detail::check_cuda_device("Context::cuda", device);
  // Otherwise the first launch would fail with "no kernel image is available".
  const DeviceVerdict verdict = cuda_device_verdict(device);
  if (verdict.level == DeviceVerdict::Level::none) {
    detail::unsupported("Context::cuda", "device ", device, " has ", verdict.text);
  }
  Context context;
  context.device_ = Device{Device::Type::cuda, device};
  context.stream_ = stream;
  return context;
}

void detail::check_cuda_device(const char* call, int device) {
  cuda_backend();  // throws in a build without CUDA
  const int count = cuda_device_count();
  if (device >= 0 && device < count) return;
  const std::string trouble = count == 0 ? cuda_device_trouble() : "";
  detail::invalid(call, "device is ", device, "; this process sees ", count, " CUDA device(s)",
                  trouble.empty() ? "" : ": ", trouble);
}

void detail::check_key(const char* call, const char* name, const Key& key) {
  if (key.stream >= 8192) invalid(call, name, ".stream is ", key.stream, "; expected 0 to 8191");
  const auto address = reinterpret_cast<std::uintptr_t>(key.counter);
  if (address % alignof(std::uint64_t) != 0) {
    invalid(call, name, ".counter is at address ", address, "; expected a multiple of 8");
  }
}

Context Context::with_key(Key key) const {
  detail::check_key("Context::with_key", "key", key);
  Context context = *this;
  context.key_ = key;
  return context;
}

Context Context::with_isa(Isa isa) const {
  if (static_cast<int>(isa) > static_cast<int>(best_isa())) {
    detail::unsupported("Context::with_isa", "isa is ", isa_name(isa),
                        "; this machine and build support at most ", isa_name(best_isa()));
  }
  Context context = *this;
  context.isa_ = isa;
  return context;
}

Context Context::with_sm_margin(int sms) const {
  if (sms < 0) detail::invalid("Context::with_sm_margin", "sms is ", sms, "; expected 0 or more");
  Context context = *this;
  context.sm_margin_ = sms;
  return context;
}

Context Context::with_arch(int arch) const {
  if (arch != 0 && arch != 80) {
    detail::invalid("Context::with_arch", "arch is ", arch, "; expected 0 or 80");
  }
  Context context = *this;
  context.arch_ = arch;
  return context;
}

int Context::threads() const noexcept { return pool_ ? pool_->size() : 0; }

bool built_with_cuda() noexcept { return cuda_architectures()[0] != '\0'; }
const char* cuda_architectures() noexcept { return detail::cuda_archs(); }

}  // namespace hot

// Context of a call: device, stream or threads, random key. It is cheap to copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "hot/api.h"
#include "hot/tensor.h"

struct CUstream_st;

namespace hot {

/// Same type as cudaStream_t, declared without a CUDA header.
using Stream = struct CUstream_st*;

/// Key of the counter-based random numbers (docs/numerics.md, "Random bits"). Equal keys and inputs
/// give equal bits on every backend. `stream` distinguishes layers, 0 <= stream < 8192.
///
/// `counter` is for CUDA graphs, which replay the keys of their capture. Kernels add its value to
/// `offset` (mod 2^64) when they run, so every replay uses the current value. It points to memory
/// of the context's device, aligned to 8 bytes, or is null. The caller owns that memory. It must
/// stay valid while work or a graph that uses it can run, and may change only in stream order. It
/// must not change between the compression of x and its backward: `sketch` needs the same numbers
/// in both. The CPU backend reads it during the call.
struct Key {
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  std::uint32_t stream = 0;
  const std::uint64_t* counter = nullptr;
};

/// Instruction sets of the CPU backend, in ascending order. All give the same bits. `amx` is
/// AVX-512 with integer products by AMX. The first call of best_isa() asks Linux for permission to
/// use AMX (arch_prctl), for the whole process.
enum class Isa : std::uint8_t { plain, avx2, avx512, amx };

HOT_API const char* isa_name(Isa isa) noexcept;
/// Best instruction set that this machine and the build support.
HOT_API Isa best_isa() noexcept;

/// Scratch memory on the context's device, any alignment. Its size comes from the call's
/// `*_workspace` function, with the same context. A call that needs none takes `{}`.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// Threads of the program, which the CPU backend uses instead of its own pool. OpenMP's threads,
/// for example, spin after their last task and would occupy the cores. `run` calls work(data) on up
/// to `threads` threads at the same time and returns when all calls have returned. Fewer calls are
/// slower but correct, even none. work neither throws nor waits. Several threads may be in `run` at
/// once. Each needs a stack of 1 MB. After a fork, the child process does not use the executor.
struct Executor {
  using Work = void (*)(void* data);
  void (*run)(void* state, int threads, Work work, void* data) = nullptr;
  void* state = nullptr;
};

class ThreadPool;

class HOT_API Context {
 public:
  /// CPU backend with its own pool of `threads` threads (0: one per core that this process may
  /// use). Results do not depend on the number of threads.
  static Context cpu(int threads = 0);
  /// CPU backend on up to `threads` threads of the program, without its own pool. `executor.state`
  /// must outlive the context and its copies. Throws `invalid_argument` if `run` is null.
  static Context cpu(const Executor& executor, int threads = 0);
  /// CUDA backend: queues work on `stream` of CUDA device `device` (nullptr: the legacy default
  /// stream). Throws `unsupported` in a build without CUDA.
  static Context cuda(int device, Stream stream);

  /// Copy with another key. Throws `invalid_argument` for an invalid `stream` or `counter`.
  Context with_key(Key key) const;
  /// Copy restricted to a CPU instruction set. Throws `unsupported` if the machine lacks it.
  Context with_isa(Isa isa) const;

  /// Copy restricted to an architecture's CUDA kernels, for tests and comparisons. `arch` 80
  /// selects mma.sync kernels on any GPU. The default, 0, selects the best kernels for the device.
  Context with_arch(int arch) const;
  /// Copy whose persistent CUDA kernels (products, one quantiser) leave `sms` multiprocessors to
  /// other work; at least two stay in use. Results have the same bits, but a workspace's size may
  /// differ. Products find free multiprocessors while they run, so this is rarely needed. Throws
  /// `invalid_argument` if `sms` is negative.
  Context with_sm_margin(int sms) const;

  Device device() const noexcept { return device_; }
  Stream stream() const noexcept { return stream_; }
  const Key& key() const noexcept { return key_; }
  Isa isa() const noexcept { return isa_; }
  int arch() const noexcept { return arch_; }
  int sm_margin() const noexcept { return sm_margin_; }
  int threads() const noexcept;
  ThreadPool* pool() const noexcept { return pool_.get(); }

 private:
  Context() = default;
  Device device_{};
  Stream stream_ = nullptr;
  Key key_{};
  Isa isa_ = Isa::plain;
  int arch_ = 0;
  int sm_margin_ = 0;
  std::shared_ptr<ThreadPool> pool_;
};

/// CUDA support of this build, and its architectures, e.g. "80-real;90a-real" ("" without CUDA).
HOT_API bool built_with_cuda() noexcept;
HOT_API const char* cuda_architectures() noexcept;

}  // namespace hot

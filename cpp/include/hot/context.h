// Where and how a call runs: device, stream or threads, random key. A cheap value; copy it freely.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "hot/api.h"
#include "hot/tensor.h"

struct CUstream_st;

namespace hot {

/// The same type as cudaStream_t, without a CUDA header.
using Stream = struct CUstream_st*;

/// Key of the counter-based random numbers (docs/numerics.md, "Random bits"). The same key and
/// inputs give the same bits on every backend. `stream` tells layers apart, 0 <= stream < 8192.
///
/// `counter` is for CUDA graphs, which replay the keys of their capture: kernels add its value to
/// `offset` (mod 2^64) when they run, so every replay reads the current value. It points to memory
/// of the context's device, aligned to 8 bytes, or is null. The caller owns it, keeps it alive as
/// long as the work or a graph that holds it can run, and changes it only in stream order. It must
/// not change between the compression of x and its backward: `sketch` needs the same numbers in
/// both. The CPU backend reads it during the call.
struct Key {
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  std::uint32_t stream = 0;
  const std::uint64_t* counter = nullptr;
};

/// Instruction sets of the CPU backend, in ascending order. All give the same bits. `amx` is
/// AVX-512 with integer products by AMX; the first question for the best set asks Linux for the
/// permission to use it (arch_prctl), for the whole process.
enum class Isa : std::uint8_t { plain, avx2, avx512, amx };

HOT_API const char* isa_name(Isa isa) noexcept;
/// The best instruction set of this machine that the library was built with.
HOT_API Isa best_isa() noexcept;

/// Scratch memory on the context's device, any alignment. Its size comes from the `*_workspace`
/// function beside each call (asked with the same context); a call that needs none takes `{}`.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// Threads of the program, for the CPU backend in place of its own: OpenMP's, say, which wait
/// actively after their last work and would else hold the cores. `run` calls work(data) on as many
/// as `threads` threads at the same time, and returns when all calls have returned; fewer calls, or
/// none, are slower, not wrong. work neither throws nor waits. Several threads may be in `run` at
/// once. A forked child does without.
struct Executor {
  using Work = void (*)(void* data);
  void (*run)(void* state, int threads, Work work, void* data) = nullptr;
  void* state = nullptr;
};

class ThreadPool;

class HOT_API Context {
 public:
  /// CPU backend with its own pool of `threads` threads (0: one for each core this process may
  /// use). The result does not depend on the number.
  static Context cpu(int threads = 0);
  /// The same with as many threads of the program, and none of its own. `executor.state` outlives
  /// the context and its copies. Throws `invalid_argument` if there is no `run`.
  static Context cpu(const Executor& executor, int threads = 0);
  /// CUDA backend: work is queued on `stream` of CUDA device `device` (nullptr: the legacy default
  /// stream). Throws `unsupported` in a build without CUDA.
  static Context cuda(int device, Stream stream);

  /// Throws `invalid_argument` for a stream or a counter that a Key cannot have.
  Context with_key(Key key) const;
  /// Restrict the CPU backend to an instruction set; throws `unsupported` if the machine lacks it.
  Context with_isa(Isa isa) const;

  /// Restrict the CUDA backend to the kernels of an architecture, for tests and comparisons: 80
  /// uses mma.sync on any GPU; 0, the default, chooses the best for the device.
  Context with_arch(int arch) const;

  Device device() const noexcept { return device_; }
  Stream stream() const noexcept { return stream_; }
  const Key& key() const noexcept { return key_; }
  Isa isa() const noexcept { return isa_; }
  int arch() const noexcept { return arch_; }
  int threads() const noexcept;
  ThreadPool* pool() const noexcept { return pool_.get(); }

 private:
  Context() = default;
  Device device_{};
  Stream stream_ = nullptr;
  Key key_{};
  Isa isa_ = Isa::plain;
  int arch_ = 0;
  std::shared_ptr<ThreadPool> pool_;
};

/// What this build holds: "cpu" always; "cuda" with the architectures its kernels were compiled
/// for, e.g. "80-real;90a-real", empty without CUDA.
HOT_API bool built_with_cuda() noexcept;
HOT_API const char* cuda_architectures() noexcept;

}  // namespace hot

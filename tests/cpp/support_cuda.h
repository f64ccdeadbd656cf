// Helpers of the CUDA tests: checked calls, device memory, and a fixture with its own stream. The
// fixture skips if there is no device.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "support.h"

namespace hot_test {

inline constexpr hot::Device gpu{hot::Device::Type::cuda, 0};
inline constexpr DType float_types[] = {DType::f32, DType::f16, DType::bf16};

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// Owner of a handle of CUDA.
template <class Handle, cudaError_t (*release)(Handle)>
class Owned {
 public:
  template <class Make>
  explicit Owned(const Make& make) {
    check(make(&handle_));
  }
  ~Owned() { static_cast<void>(release(handle_)); }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Handle get() const { return handle_; }

 private:
  Handle handle_ = nullptr;
};

struct DeviceMemory : Owned<void*, cudaFree> {
  explicit DeviceMemory(std::size_t bytes)
      : Owned([&](void** at) { return cudaMalloc(at, std::max<std::size_t>(bytes, 1)); }) {}
  char* data() const { return static_cast<char*>(get()); }
};

// CUDA graph of the work that `call` queues on a stream.
class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& call) : stream_(stream) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    call();
    check(cudaStreamEndCapture(stream, &graph_));
    check(cudaGraphInstantiate(&executable_, graph_, 0));
  }
  ~Graph() {
    static_cast<void>(cudaGraphExecDestroy(executable_));
    static_cast<void>(cudaGraphDestroy(graph_));
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void replay() const { check(cudaGraphLaunch(executable_, stream_)); }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

// Equal bytes on host and device.
class Mirrored {
 public:
  explicit Mirrored(std::size_t bytes, char fill = 0) : host(bytes, fill), device_(bytes) {}

  // Synchronises, because a copy from pageable memory may return early, and the tests' stream does
  // not wait for the default stream.
  void push() {
    check(cudaMemcpy(device_.data(), host.data(), host.size(), cudaMemcpyHostToDevice));
    check(cudaDeviceSynchronize());
  }
  std::vector<char> pulled() const {
    std::vector<char> out(host.size());
    check(cudaMemcpy(out.data(), device_.data(), out.size(), cudaMemcpyDeviceToHost));
    return out;
  }
  template <class T>
  T* on(bool on_gpu) {
    return reinterpret_cast<T*>(on_gpu ? device_.data() : host.data());
  }

  // Random codes in all bytes.
  void fill_codes() {
    const auto values = codes(static_cast<std::int64_t>(host.size()), 127);
    std::memcpy(host.data(), values.data(), values.size());
    push();
  }

  std::vector<char> host;

 private:
  DeviceMemory device_;
};

inline bool is_nan(DType dtype, const char* at) {
  if (dtype == DType::f32) {
    float value;
    std::memcpy(&value, at, 4);
    return std::isnan(value);
  }
  std::uint16_t bits;
  std::memcpy(&bits, at, 2);
  if (dtype == DType::f16) return (bits & 0x7fffU) > 0x7c00U;
  return dtype == DType::bf16 && (bits & 0x7fffU) > 0x7f80U;
}

// Equal arrays on both sides in poisoned memory, compared byte by byte with their margins.
struct Mirror : Mirrored {
  Mirror(std::int64_t rows, std::int64_t cols, DType dtype, std::int64_t gap = 0,
         std::int64_t offset = 0)
      : Mirrored(
            (static_cast<std::size_t>(rows * (cols + gap) + offset) + 32) * hot::dtype_size(dtype),
            static_cast<char>(0xA5)),
        rows_(rows),
        cols_(cols),
        ld_(cols + gap),
        offset_(offset),
        dtype_(dtype) {
    push();
  }

  TensorView view(bool on_gpu) {
    char* base = on<char>(on_gpu);
    return hot::matrix(base + offset_ * static_cast<std::int64_t>(hot::dtype_size(dtype_)), dtype_,
                       rows_, cols_, ld_, on_gpu ? gpu : hot::Device{});
  }
  TensorView flat(bool on_gpu) {
    TensorView v = view(on_gpu);
    v.ndim = 1;
    v.shape[0] = cols_;
    v.stride[0] = 1;
    return v;
  }
  void fill(const std::vector<float>& values) {
    Floats source = floats(rows_, cols_, values);
    hot::fwht(cpu(), source.view(), 1, 1, view(false));  // block 1 converts
    push();
  }
  // Compares bytes. All NaNs count as equal.
  void expect_equal(const std::string& what) const {
    const std::vector<char> got = pulled();
    if (got == host) return;
    std::size_t different = 0, first = 0;
    const std::size_t size = hot::dtype_size(dtype_);
    for (std::size_t i = 0; i + size <= got.size(); i += size) {
      if (std::memcmp(&got[i], &host[i], size) == 0 ||
          (is_nan(dtype_, &got[i]) && is_nan(dtype_, &host[i]))) {
        continue;
      }
      if (different++ == 0) first = i / size;
    }
    EXPECT_EQ(different, 0U) << what << ": first at element " << first << " of "
                             << host.size() / size;
  }

 private:
  std::int64_t rows_, cols_, ld_, offset_;
  DType dtype_;
};

// Whether unit number `unit` of a long test belongs to the part that HOT_TEST_PART names: "1/4" is
// the second of four. Parts run in parallel under sanitizers (scripts/gpu_trust.py).
inline bool in_part(std::int64_t unit) {
  const char* const text = std::getenv("HOT_TEST_PART");
  if (text == nullptr) return true;
  char* end = nullptr;
  const std::int64_t part = std::strtoll(text, &end, 10);
  const std::int64_t parts = *end == '/' ? std::strtoll(end + 1, &end, 10) : 0;
  if (*end != '\0' || part < 0 || part >= parts) {
    throw std::runtime_error(std::string("HOT_TEST_PART is ") + text + ", expected such as 1/4");
  }
  return unit % parts == part;
}

// Scratch of at least so many bytes on a side.
inline hot::Workspace grown(std::unique_ptr<Mirrored>& scratch, std::size_t bytes, bool on_gpu) {
  if (scratch == nullptr || scratch->host.size() < bytes) {
    scratch = std::make_unique<Mirrored>(bytes, static_cast<char>(0xA5));
  }
  return {scratch->on<char>(on_gpu), bytes};
}

inline DType any_float() { return float_types[random_int(0, 2)]; }

// Random size among those where kernels change: 1, primes, multiples of 16 and their neighbours.
inline std::int64_t any_size(std::int64_t limit = 400) {
  const std::int64_t sizes[] = {1,  2,  15,  16,  17,  31,  33,  49,  64,
                                65, 97, 127, 128, 129, 197, 256, 300, 391};
  const std::int64_t size = sizes[random_int(0, 17)];
  return size <= limit ? size : random_int(1, limit);
}

inline std::vector<float> awkward(std::int64_t count) {
  std::vector<float> values = normal(count, std::ldexp(1.0F, static_cast<int>(random_int(-3, 3))));
  if (count > 20 && random_int(0, 3) == 0)
    values[static_cast<std::size_t>(random_int(0, count - 1))] = 60.0F;
  if (count > 20 && random_int(0, 5) == 0) {
    values[static_cast<std::size_t>(random_int(0, count - 1))] =
        random_int(0, 1) == 0 ? std::numeric_limits<float>::quiet_NaN()
                              : std::numeric_limits<float>::infinity();
  }
  return values;
}

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
      GTEST_SKIP() << "no CUDA device on this machine";
    }
    // Neither this stream nor the default stream waits for the other.
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  void TearDown() override {
    if (stream_ != nullptr) check(cudaStreamDestroy(stream_));
  }
  hot::Context cuda(int arch = 0) const { return hot::Context::cuda(0, stream_).with_arch(arch); }
  void synchronize() const { check(cudaStreamSynchronize(stream_)); }
  // Replays a CUDA graph of `queue` after a call that loads its kernels and after `poison`.
  template <class Queue, class Poison>
  void replay(const Queue& queue, const Poison& poison) const {
    queue();
    synchronize();
    const Graph graph(stream_, queue);
    poison();
    graph.replay();
    synchronize();
  }

  cudaStream_t stream_ = nullptr;
};

}  // namespace hot_test

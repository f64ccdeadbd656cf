// Owning tensors and buffers, for programs without their own. Header only and optional: all other
// calls take views and allocate no device memory. These classes allocate with functions that the
// program passes (default: host_allocator()).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "hot/backward_linear.h"
#include "hot/context.h"
#include "hot/error.h"
#include "hot/tensor.h"

namespace hot {

/// Alignment of every Buffer, equal to that of CUDA allocators.
inline constexpr std::size_t buffer_alignment = 256;

/// Allocates and frees memory of one device. `allocate` gets a size above 0. It returns memory
/// aligned to 256 bytes, returns null, or throws. `release` must not throw. With CUDA use, for
/// example, cudaMalloc and cudaFree, or a pool's functions on the stream of the calls.
struct Allocator {
  Device device{};
  std::function<void*(std::size_t bytes)> allocate;
  std::function<void(void* data)> release;
};

/// Allocator of zeroed host memory. It uses operator new: Microsoft lacks std::aligned_alloc.
inline Allocator host_allocator() {
  return {Device{},
          [](std::size_t bytes) {
            void* const data =
                ::operator new(bytes, std::align_val_t{buffer_alignment}, std::nothrow);
            if (data != nullptr) std::memset(data, 0, bytes);
            return data;
          },
          [](void* data) { ::operator delete(data, std::align_val_t{buffer_alignment}); }};
}

/// Memory of one device, freed by the destructor. Movable, not copyable.
class Buffer {
 public:
  Buffer() = default;
  /// Throws std::bad_alloc if the allocator returns null.
  explicit Buffer(std::size_t bytes, Allocator allocator = host_allocator())
      : bytes_(bytes), allocator_(std::move(allocator)) {
    if (bytes_ == 0) return;
    data_ = allocator_.allocate(bytes_);
    if (data_ == nullptr) throw std::bad_alloc();
  }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer(std::move(other)).swap(*this);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (data_ != nullptr) allocator_.release(data_);
  }

  void* data() noexcept { return data_; }
  const void* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  Device device() const noexcept { return allocator_.device; }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(allocator_, other.allocator_);
  }

  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  Allocator allocator_{};
};

/// A contiguous row-major array of 1 to 4 dimensions, zeroed if the allocator zeroes memory.
class Tensor {
 public:
  Tensor() = default;
  /// Throws `invalid_argument` unless there are 1 to 4 dimensions, no negative size, and at most
  /// PTRDIFF_MAX / 8 elements (a size of 0 counts as 1).
  Tensor(DType dtype, std::initializer_list<std::int64_t> shape,
         Allocator allocator = host_allocator()) {
    if (shape.size() < 1 || shape.size() > static_cast<std::size_t>(max_dims)) {
      throw Error(ErrorCode::invalid_argument, "Tensor: shape has " + std::to_string(shape.size()) +
                                                   " dimensions; expected 1 to " +
                                                   std::to_string(max_dims));
    }
    view_.dtype = dtype;
    view_.device = allocator.device;
    size_ = 1;
    std::int64_t limit = PTRDIFF_MAX / 8;  // elements left; an element has up to 4 bytes
    for (const std::int64_t size : shape) {
      if (size < 0) {
        throw Error(ErrorCode::invalid_argument, "Tensor: shape[" + std::to_string(view_.ndim) +
                                                     "] is " + std::to_string(size) +
                                                     "; expected no negative size");
      }
      if (size > limit) {
        throw Error(ErrorCode::invalid_argument, "Tensor: shape[" + std::to_string(view_.ndim) +
                                                     "] is " + std::to_string(size) +
                                                     "; expected fewer elements");
      }
      if (size > 0) limit /= size;
      view_.shape[view_.ndim++] = size;
      size_ *= size;
    }
    std::int64_t stride = 1;
    for (int d = view_.ndim - 1; d >= 0; --d) {
      view_.stride[d] = stride;
      stride *= view_.shape[d];
    }
    buffer_ = Buffer(static_cast<std::size_t>(size_) * dtype_size(dtype), std::move(allocator));
    view_.data = buffer_.data();
  }
  Tensor(Tensor&& other) noexcept { swap(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    Tensor(std::move(other)).swap(*this);
    return *this;
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() = default;

  /// View for calls of the library, valid until the tensor is moved or destroyed.
  const TensorView& view() noexcept { return view_; }
  ConstTensorView view() const noexcept { return view_; }

  /// Pointer to the elements. T must match the dtype.
  template <class T>
  T* data() noexcept {
    return static_cast<T*>(buffer_.data());
  }
  template <class T>
  const T* data() const noexcept {
    return static_cast<const T*>(buffer_.data());
  }
  std::int64_t size() const noexcept { return size_; }
  std::size_t bytes() const noexcept { return buffer_.bytes(); }

 private:
  void swap(Tensor& other) noexcept {
    std::swap(buffer_, other.buffer_);
    std::swap(view_, other.view_);
    std::swap(size_, other.size_);
  }

  Buffer buffer_;
  TensorView view_{};
  std::int64_t size_ = 0;
};

/// Scratch that grows to the size of the largest call. One object serves calls that run in order:
/// on one stream, or in one CPU thread. Growing frees the smaller buffer. On CUDA the allocator
/// must defer this until queued work is done; cudaFree, and cudaFreeAsync on that stream, do so.
class ScratchBuffer {
 public:
  explicit ScratchBuffer(Allocator allocator = host_allocator())
      : allocator_(std::move(allocator)) {}

  /// Returns at least `bytes` bytes, valid until the next call that asks for more.
  Workspace at_least(std::size_t bytes) {
    if (bytes > buffer_.bytes()) {
      buffer_ = Buffer();
      buffer_ = Buffer(bytes, allocator_);
    }
    return {buffer_.data(), buffer_.bytes()};
  }

 private:
  Allocator allocator_;
  Buffer buffer_;
};

/// Saved activation of one layer between forward and backward: the bytes and their description.
/// Steps of the same size reuse the memory.
class SavedBuffer {
 public:
  explicit SavedBuffer(Allocator allocator = host_allocator()) : allocator_(std::move(allocator)) {}
  /// Afterwards `other` is empty and can only be assigned to or destroyed.
  SavedBuffer(SavedBuffer&& other) noexcept
      : allocator_(std::move(other.allocator_)),
        buffer_(std::move(other.buffer_)),
        saved_(std::exchange(other.saved_, {})) {}
  SavedBuffer& operator=(SavedBuffer&& other) noexcept {
    allocator_ = std::move(other.allocator_);
    buffer_ = std::move(other.buffer_);
    saved_ = std::exchange(other.saved_, {});
    return *this;
  }

  /// Runs compress_activation for x [.., I] with the context's key.
  void compress(const Context& context, const ConstTensorView& x, const BackwardLinearSpec& spec,
                ScratchBuffer& scratch) {
    const int dims = std::clamp(x.ndim, 0, max_dims);  // compress_activation refuses others
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();  // is refused
    std::int64_t tokens = 1;
    for (int d = 0; d + 1 < dims; ++d) {
      const std::int64_t size = std::max<std::int64_t>(x.shape[d], 0);
      tokens = size > 0 && tokens > most / size ? most : tokens * size;
    }
    const std::int64_t in_features = dims > 0 ? x.shape[dims - 1] : 0;
    const SavedLayout layout = saved_layout(tokens, in_features, spec);
    saved_ = {};
    if (layout.bytes > buffer_.bytes()) {
      buffer_ = Buffer();
      buffer_ = Buffer(layout.bytes, allocator_);
    }
    saved_ = compress_activation(
        context, x, spec, {buffer_.data(), layout.bytes},
        scratch.at_least(compress_activation_workspace(context, tokens, in_features, spec)));
  }

  /// Argument `saved` of backward_linear, which refuses it before the first compress().
  operator const ConstSavedActivation&() const noexcept { return saved_; }
  std::size_t bytes() const noexcept { return saved_.bytes; }

 private:
  Allocator allocator_;
  Buffer buffer_;
  ConstSavedActivation saved_{};
};

}  // namespace hot

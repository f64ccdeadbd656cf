// Views of the caller's memory. The library never owns tensor memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hot/api.h"

namespace hot {

enum class DType : std::uint8_t {
  f32,
  f16,
  bf16,
  i8,
  i32,
  i4x2,  // two INT4 per byte, low nibble first; shapes and strides of its views count bytes
};

/// Bytes of one element of a view (i4x2: 1 byte, which holds two values).
HOT_API std::size_t dtype_size(DType dtype) noexcept;
HOT_API const char* dtype_name(DType dtype) noexcept;

struct Device {
  enum class Type : std::uint8_t { cpu, cuda };
  Type type = Type::cpu;
  int index = 0;
};

inline bool operator==(Device a, Device b) noexcept {
  return a.type == b.type && (a.type == Device::Type::cpu || a.index == b.index);
}
inline bool operator!=(Device a, Device b) noexcept { return !(a == b); }

inline constexpr int max_dims = 4;

/// A read-only strided array. Strides count elements; those of inputs may be zero or negative.
/// `data` needs element alignment only.
struct ConstTensorView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  Device device{};
  int ndim = 0;
  std::int64_t shape[max_dims] = {};
  std::int64_t stride[max_dims] = {};
};

/// A writable strided array. Distinct elements must not share memory.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device{};
  int ndim = 0;
  std::int64_t shape[max_dims] = {};
  std::int64_t stride[max_dims] = {};

  operator ConstTensorView() const noexcept;
};

/// View of a contiguous vector, or of a row-major matrix with row stride `ld` (0: `cols`).
HOT_API ConstTensorView vector(const void* data, DType dtype, std::int64_t size,
                               Device device = {}) noexcept;
HOT_API TensorView vector(void* data, DType dtype, std::int64_t size, Device device = {}) noexcept;
HOT_API ConstTensorView matrix(const void* data, DType dtype, std::int64_t rows, std::int64_t cols,
                               std::int64_t ld = 0, Device device = {}) noexcept;
HOT_API TensorView matrix(void* data, DType dtype, std::int64_t rows, std::int64_t cols,
                          std::int64_t ld = 0, Device device = {}) noexcept;

inline TensorView::operator ConstTensorView() const noexcept {
  ConstTensorView view{data, dtype, device, ndim, {}, {}};
  for (int i = 0; i < max_dims; ++i) {
    view.shape[i] = shape[i];
    view.stride[i] = stride[i];
  }
  return view;
}

}  // namespace hot

#include "hot/tensor.h"

#include "hot/api.h"

#ifndef HOT_VERSION
#error "HOT_VERSION comes from the build (project version)"
#endif

namespace hot {

const char* version() noexcept { return HOT_VERSION; }

std::size_t dtype_size(DType dtype) noexcept {
  switch (dtype) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::i8:
    case DType::i4x2:
      return 1;
  }
  return 0;
}

const char* dtype_name(DType dtype) noexcept {
  switch (dtype) {
    case DType::f32:
      return "float32";
    case DType::f16:
      return "float16";
    case DType::bf16:
      return "bfloat16";
    case DType::i8:
      return "int8";
    case DType::i32:
      return "int32";
    case DType::i4x2:
      return "int4 pairs (uint8)";
  }
  return "unknown";
}

namespace {

template <class View, class Pointer>
View make_vector(Pointer data, DType dtype, std::int64_t size, Device device) noexcept {
  View view;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  view.ndim = 1;
  view.shape[0] = size;
  view.stride[0] = 1;
  return view;
}

template <class View, class Pointer>
View make_matrix(Pointer data, DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t ld,
                 Device device) noexcept {
  View view;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  view.ndim = 2;
  view.shape[0] = rows;
  view.shape[1] = cols;
  view.stride[0] = ld == 0 ? cols : ld;
  view.stride[1] = 1;
  return view;
}

}  // namespace

ConstTensorView vector(const void* data, DType dtype, std::int64_t size, Device device) noexcept {
  return make_vector<ConstTensorView>(data, dtype, size, device);
}
TensorView vector(void* data, DType dtype, std::int64_t size, Device device) noexcept {
  return make_vector<TensorView>(data, dtype, size, device);
}
ConstTensorView matrix(const void* data, DType dtype, std::int64_t rows, std::int64_t cols,
                       std::int64_t ld, Device device) noexcept {
  return make_matrix<ConstTensorView>(data, dtype, rows, cols, ld, device);
}
TensorView matrix(void* data, DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t ld,
                  Device device) noexcept {
  return make_matrix<TensorView>(data, dtype, rows, cols, ld, device);
}

}  // namespace hot

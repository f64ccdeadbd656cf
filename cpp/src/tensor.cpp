#include "hot/tensor.h"

#include <iterator>

#include "checks.h"
#include "hot/api.h"

#ifndef HOT_VERSION
#error "HOT_VERSION comes from the build (project version)"
#endif

namespace hot {

const char* version() noexcept { return HOT_VERSION; }

std::size_t dtype_size(DType dtype) noexcept {
  constexpr std::size_t sizes[] = {4, 2, 2, 1, 4, 1};  // in the order of DType
  const auto number = static_cast<std::size_t>(dtype);
  return number < std::size(sizes) ? sizes[number] : 0;
}

const char* dtype_name(DType dtype) noexcept {
  constexpr const char* names[] = {"float32", "float16", "bfloat16",
                                   "int8",    "int32",   "int4 pairs (uint8)"};
  return detail::name_in(names, dtype);
}

ConstTensorView vector(const void* data, DType dtype, std::int64_t size, Device device) noexcept {
  return {data, dtype, device, 1, {size}, {1}};
}
TensorView vector(void* data, DType dtype, std::int64_t size, Device device) noexcept {
  return {data, dtype, device, 1, {size}, {1}};
}
ConstTensorView matrix(const void* data, DType dtype, std::int64_t rows, std::int64_t cols,
                       std::int64_t ld, Device device) noexcept {
  return {data, dtype, device, 2, {rows, cols}, {ld == 0 ? cols : ld, 1}};
}
TensorView matrix(void* data, DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t ld,
                  Device device) noexcept {
  return {data, dtype, device, 2, {rows, cols}, {ld == 0 ? cols : ld, 1}};
}

}  // namespace hot

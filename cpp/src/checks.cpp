#include "checks.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <new>
#include <utility>

namespace hot {

Error::Error(ErrorCode code, const std::string& message)
    : std::runtime_error(message), code_(code) {}

namespace detail {
namespace {

[[noreturn]] void invalid_sizes(const char* call, Names names, Sizes sizes, const char* expected) {
  std::string text;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    text +=
        joined_text(i == 0 ? "" : ", ", names.begin()[i], i == 0 ? " is " : " ", sizes.begin()[i]);
  }
  invalid(call, text, "; expected ", expected);
}

template <class Get>
std::string list_text(int count, const Get& get) {
  std::string text = "(";
  for (int i = 0; i < count; ++i) {
    if (i > 0) text += ", ";
    text += get(i);
  }
  if (count == 1) text += ",";
  return text + ")";
}

std::string stride_text(const ConstTensorView& view) {
  return list_text(view.ndim, [&](int i) { return std::to_string(view.stride[i]); });
}

std::string device_text(Device device) {
  return device.type == Device::Type::cpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

bool is_empty(const ConstTensorView& view) {
  for (int d = 0; d < view.ndim; ++d) {
    if (view.shape[d] == 0) return true;
  }
  return false;
}

// Largest stride in elements. Multiplied by an element's size it is exact in 64 bits.
constexpr std::int64_t largest_reach = std::int64_t{1} << 58;

// Whether memory can have these sizes and strides. If not, their products may overflow 64 bits and
// later checks would be wrong.
bool addressable(const ConstTensorView& view) {
  std::int64_t count = 1;
  for (int d = 0; d < view.ndim; ++d) {
    const std::int64_t size = std::max<std::int64_t>(view.shape[d], 1);
    if (size > max_size || size > max_product / count) return false;
    count *= size;
  }
  if (is_empty(view)) return true;
  std::int64_t left = largest_reach;
  for (int d = 0; d < view.ndim; ++d) {
    if (view.shape[d] < 2) continue;
    const std::int64_t limit = left / (view.shape[d] - 1);
    if (view.stride[d] > limit || view.stride[d] < -limit) return false;
    left -= (view.shape[d] - 1) * std::abs(view.stride[d]);
  }
  return true;
}

// Address range [first, last) of a view.
std::pair<std::uintptr_t, std::uintptr_t> extent(const ConstTensorView& view) {
  auto first = reinterpret_cast<std::uintptr_t>(view.data);
  auto last = first;
  const std::int64_t size = element_bytes(view.dtype);
  for (int d = 0; d < view.ndim; ++d) {
    const std::int64_t reach = (view.shape[d] - 1) * view.stride[d] * size;
    (reach < 0 ? first : last) += static_cast<std::uintptr_t>(reach);
  }
  return {first, last + static_cast<std::uintptr_t>(size)};
}

// Whether two views lie side by side in a larger matrix: their ranges overlap, their elements not.
bool interleaved(const ConstTensorView& a, const ConstTensorView& b) {
  if (a.ndim != 2 || b.ndim != 2 || a.stride[1] != 1 || b.stride[1] != 1) return false;
  const std::int64_t size_a = element_bytes(a.dtype), size_b = element_bytes(b.dtype);
  // The row stride of a one-row view is arbitrary.
  if (std::min(a.stride[0], b.stride[0]) <= 0) return false;
  if (std::max(a.stride[0], b.stride[0]) > largest_reach) return false;
  const std::int64_t pitch = a.stride[0] * size_a;
  if (pitch != b.stride[0] * size_b) return false;
  const std::int64_t width_a = a.shape[1] * size_a, width_b = b.shape[1] * size_b;
  const auto difference = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(b.data) -
                                                    reinterpret_cast<std::uintptr_t>(a.data));
  const std::int64_t offset = (difference % pitch + pitch) % pitch;
  return offset >= width_a && offset + width_b <= pitch;
}

}  // namespace

void check_sizes(const char* call, Names names, Sizes sizes) {
  for (const std::int64_t size : sizes) {
    if (size < 0) invalid_sizes(call, names, sizes, "no negative size");
    if (size > max_size) invalid_sizes(call, names, sizes, "sizes of at most 2^48");
  }
  for (auto a = sizes.begin(); a != sizes.end(); ++a) {
    for (auto b = sizes.begin(); b != a; ++b) {
      if (*b > 0 && *a > max_product / *b) {
        invalid_sizes(call, names, sizes, "matrices of at most 2^52 elements");
      }
    }
  }
}

void check_shape(const char* call, const LinearShape& shape) {
  check_sizes(call, {"tokens", "out_features", "in_features"},
              {shape.tokens, shape.out_features, shape.in_features});
}

void check_counted_sizes(const char* call, Names names, Sizes sizes) {
  check_sizes(call, names, sizes);
  std::int64_t limit = max_operations;
  for (const std::int64_t size : sizes) {
    if (size > limit) invalid_sizes(call, names, sizes, "a product of at most 2^58");
    limit /= std::max<std::int64_t>(size, 1);
  }
}

void check_rounding(const char* call, const char* name, Rounding rounding) {
  if (rounding != Rounding::nearest && rounding != Rounding::stochastic &&
      rounding != Rounding::pseudo_stochastic) {
    invalid(call, name, " is unknown; expected nearest, stochastic or pseudo_stochastic");
  }
}

void check_granularity(const char* call, const char* name, Granularity granularity) {
  if (granularity != Granularity::tensor && granularity != Granularity::token &&
      granularity != Granularity::channel) {
    invalid(call, name, " is unknown; expected tensor, token or channel");
  }
}

void check_format(const char* call, const char* name, const char* made_by, std::uint64_t format,
                  std::uint64_t expected) {
  if (format == expected) return;
  if (format == 0) invalid(call, name, ".format is 0; expected the value from ", made_by, "()");
  invalid(call, name, " was made by ", made_by,
          " with another spec; pass the same spec to both calls");
}

Support refusal() noexcept {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return {false, "out of memory"};  // short enough to need no allocation
  } catch (const std::exception& error) {
    try {
      return {false, error.what()};
    } catch (const std::bad_alloc&) {
      return {false, "not supported"};
    }
  }
}

std::string shape_text(const ConstTensorView& view) {
  return list_text(view.ndim, [&](int i) { return std::to_string(view.shape[i]); });
}

std::string shape_text(std::initializer_list<std::int64_t> shape) {
  return list_text(static_cast<int>(shape.size()), [&](int i) {
    const std::int64_t size = shape.begin()[i];
    return size < 0 ? std::string("*") : std::to_string(size);
  });
}

void Checker::input(const char* name, const ConstTensorView& view,
                    std::initializer_list<DType> dtypes, int min_ndim, int max_ndim) const {
  const auto fail = [&](const auto&... what) { invalid(call_, name, what...); };
  if (std::find(dtypes.begin(), dtypes.end(), view.dtype) == dtypes.end()) {
    std::string expected;
    for (const DType dtype : dtypes) {
      if (!expected.empty()) expected += " or ";
      expected += dtype_name(dtype);
    }
    fail(" is ", dtype_name(view.dtype), "; expected ", expected);
  }
  if (view.ndim < min_ndim || view.ndim > max_ndim) {
    if (min_ndim == max_ndim) fail(" has ", view.ndim, " dimensions; expected ", min_ndim);
    fail(" has ", view.ndim, " dimensions; expected ", min_ndim, " to ", max_ndim);
  }
  for (int d = 0; d < view.ndim; ++d) {
    if (view.shape[d] < 0) fail(" has shape ", shape_text(view), "; expected no negative size");
  }
  if (!addressable(view)) {
    fail(" has shape ", shape_text(view), " and strides ", stride_text(view),
         "; expected at most 2^52 elements, within 2^58 elements of memory");
  }
  if (view.device != context_.device()) {
    fail(" is on ", device_text(view.device), "; expected ", device_text(context_.device()),
         ", the context's device");
  }
  if (is_empty(view)) return;
  if (view.data == nullptr) fail(" has no data (null pointer)");
  const std::size_t size = dtype_size(view.dtype);
  if (reinterpret_cast<std::uintptr_t>(view.data) % size != 0) {
    fail(" is not aligned to its element size, ", size, " bytes");
  }
  uses(name, view);
}

void Checker::output(const char* name, const TensorView& view, std::initializer_list<DType> dtypes,
                     int min_ndim, int max_ndim) const {
  input(name, view, dtypes, min_ndim, max_ndim);
  std::pair<std::int64_t, std::int64_t> dims[max_dims];  // stride and size, ascending
  auto* end = dims;
  for (int d = 0; d < view.ndim; ++d) {
    if (view.shape[d] == 0) return;
    if (view.shape[d] == 1) continue;
    const std::pair<std::int64_t, std::int64_t> dim(std::abs(view.stride[d]), view.shape[d]);
    auto* const at = std::upper_bound(dims, end, dim);
    std::move_backward(at, end, end + 1);
    *at = dim;
    ++end;
  }
  std::int64_t reach = 0;
  for (const auto* dim = dims; dim != end; ++dim) {
    if (dim->first <= reach) {
      invalid(call_, name,
              " has strides by which elements share memory; "
              "expected separate elements");
    }
    reach += dim->first * (dim->second - 1);
  }
}

void Checker::shape(const char* name, const ConstTensorView& view,
                    std::initializer_list<std::int64_t> expected) const {
  bool same = view.ndim == static_cast<int>(expected.size());
  for (int d = 0; same && d < view.ndim; ++d) {
    const std::int64_t size = expected.begin()[d];
    same = size < 0 || size == view.shape[d];
  }
  if (!same) {
    invalid(call_, name, " has shape ", shape_text(view), "; expected ", shape_text(expected));
  }
}

ConstTensorView Checker::buffer(const char* name, const void* data, std::size_t bytes,
                                std::size_t expected, BufferSize size) const {
  const bool fits = size == BufferSize::exact ? bytes == expected : bytes >= expected;
  if (!fits || (data == nullptr && expected > 0)) {
    invalid(call_, name, " has ", data == nullptr ? 0 : bytes, " bytes; expected ", expected,
            (size == BufferSize::exact ? " for this spec" : ""));
  }
  if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0) {
    invalid(call_, name, " is not aligned to 16 bytes");
  }
  const auto view = vector(data, DType::i8, static_cast<std::int64_t>(expected), context_.device());
  uses(name, view);
  return view;
}

void Checker::rows_contiguous(const char* name, const ConstTensorView& view) const {
  if (is_empty(view)) return;
  const int last = view.ndim - 1;
  if (view.shape[last] > 1 && view.stride[last] != 1) {
    invalid(call_, name, " has stride ", view.stride[last],
            " along its last dimension; expected contiguous rows (stride 1)");
  }
}

void Checker::disjoint(const char* name, const ConstTensorView& out, const char* other_name,
                       const ConstTensorView& other) const {
  if (is_empty(out) || is_empty(other) || other.data == nullptr) return;
  const auto a = extent(out), b = extent(other);
  if (a.first < b.second && b.first < a.second && !interleaved(out, other)) {
    invalid(call_, name, " overlaps ", other_name, " in memory");
  }
}

void Checker::uses(const char* name, const ConstTensorView& view) const {
  if (is_empty(view) || view.data == nullptr) return;
  const auto [first, last] = extent(view);
  used_.at(used_count_++) = {name, first, last};
}

void Checker::workspace(const Workspace& workspace, std::size_t needed) const {
  if (needed > 0 && (workspace.data == nullptr || workspace.bytes < needed)) {
    throw Error(
        ErrorCode::workspace_too_small,
        joined_text(call_, ": workspace has ", workspace.data == nullptr ? 0 : workspace.bytes,
                    " bytes; expected ", needed));
  }
  const auto first = reinterpret_cast<std::uintptr_t>(workspace.data);
  for (std::size_t i = 0; i < used_count_; ++i) {
    if (first < used_[i].last && used_[i].first < first + needed) {
      invalid(call_, "workspace overlaps ", used_[i].name, " in memory");
    }
  }
}

MatrixIn Checker::collapsed(const char* name, const ConstTensorView& view) const {
  // Strides of a view without elements are ignored: their products may overflow 64 bits.
  const bool empty = is_empty(view);
  const int last = view.ndim - 1;
  std::int64_t rows = 1, row_stride = 0;
  for (int d = last - 1; d >= 0; rows *= view.shape[d--]) {
    if (empty || view.shape[d] == 1) continue;
    if (rows == 1) row_stride = view.stride[d];
    if (view.stride[d] != row_stride * rows) {
      invalid(call_, name, " of shape ", shape_text(view),
              " has leading dimensions that do not lie one after the other in memory; "
              "expected strides that collapse to a matrix");
    }
  }
  return {view.data, view.dtype, rows, view.shape[last], row_stride, view.stride[last]};
}

MatrixOut Checker::collapsed_out(const char* name, const TensorView& view, std::int64_t rows,
                                 std::int64_t cols) const {
  const MatrixIn m = collapsed(name, view);
  if (m.rows != rows || m.cols != cols) {
    invalid(call_, name, " has shape ", shape_text(view), "; expected ", shape_text({rows, cols}),
            ", leading dimensions flattened");
  }
  return {view.data, view.dtype, m.rows, m.cols, m.row_stride, m.col_stride};
}

ResolvedWeight resolve_weight(const Checker& check, const WeightArgument& w,
                              const ExpectedWeight& expected) {
  ResolvedWeight resolved;
  const bool outs = expected.contracts_out_features;
  if (w.quantized == nullptr) {
    check.input("w", *w.view, float_dtypes, 2, 2);
    check.shape("w", *w.view, {outs ? expected.contraction : -1, outs ? -1 : expected.contraction});
    resolved.matrix = matrix_of(*w.view);
    resolved.other_size = outs ? resolved.matrix.cols : resolved.matrix.rows;
    resolved.memory = *w.view;
    return resolved;
  }
  const ConstQuantizedWeight& quantized = *w.quantized;
  const std::int64_t contraction = outs ? quantized.out_features : quantized.in_features;
  if (contraction != expected.contraction) {
    invalid(expected.call, "w has ", contraction, (outs ? " out_features" : " in_features"),
            "; expected ", expected.operand, "'s, ", expected.contraction);
  }
  resolved.other_size = outs ? quantized.in_features : quantized.out_features;
  check_sizes(expected.call, {"out_features", "in_features"},
              {quantized.out_features, quantized.in_features});
  check_format(expected.call, "w", expected.made_by, quantized.format, expected.format);
  resolved.memory = check.buffer("w", quantized.data, quantized.bytes,
                                 weight_bytes(resolved.other_size, expected.k_padded));
  resolved.quantized = weight_codes(quantized.data, resolved.other_size, expected.k_padded);
  return resolved;
}

MatrixIn matrix_of(const ConstTensorView& view) {
  return {view.data, view.dtype, view.shape[0], view.shape[1], view.stride[0], view.stride[1]};
}
MatrixOut matrix_out_of(const TensorView& view) {
  return {view.data, view.dtype, view.shape[0], view.shape[1], view.stride[0], view.stride[1]};
}

}  // namespace detail
}  // namespace hot

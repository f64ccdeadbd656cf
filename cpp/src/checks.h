// Argument checks. Messages have the form "call: argument is ...; expected ...".
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <type_traits>

#include "hot/backward_linear.h"
#include "hot/context.h"
#include "hot/error.h"
#include "hot/quantize.h"
#include "hot/tensor.h"
#include "kernels.h"

namespace hot::detail {

// Name of an enumerator, from a list in the order of the enumeration.
template <class E, std::size_t n>
const char* name_in(const char* const (&names)[n], E value) noexcept {
  const auto number = static_cast<std::size_t>(value);
  return number < n ? names[number] : "unknown";
}

// Joins words and numbers.
template <class... Parts>
std::string joined_text(const Parts&... parts) {
  std::string all;
  const auto add = [&](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) {
      all += std::to_string(part);
    } else {
      all += part;
    }
  };
  (add(parts), ...);
  return all;
}

// Throw an Error of the call and these words and numbers.
template <class... Parts>
[[noreturn]] void invalid(const char* call, const Parts&... what) {
  throw Error(ErrorCode::invalid_argument, joined_text(call, ": ", what...));
}
template <class... Parts>
[[noreturn]] void unsupported(const char* call, const Parts&... what) {
  throw Error(ErrorCode::unsupported, joined_text(call, ": ", what...));
}

// Refuses negative sizes, sizes above max_size, and products of two sizes above max_product.
// `names` are the arguments' names, in order.
using Names = std::initializer_list<const char*>;
using Sizes = std::initializer_list<std::int64_t>;
void check_sizes(const char* call, Names names, Sizes sizes);
void check_shape(const char* call, const LinearShape& shape);
// check_sizes, and refuses a product of all sizes above max_operations.
void check_counted_sizes(const char* call, Names names, Sizes sizes);
// Refuse values outside the enumeration, which C++ allows by a cast.
void check_rounding(const char* call, const char* name, Rounding rounding);
void check_granularity(const char* call, const char* name, Granularity granularity);

// Refuses a buffer made with another spec. `made_by` is the function that makes such buffers.
void check_format(const char* call, const char* name, const char* made_by, std::uint64_t format,
                  std::uint64_t expected);

// Required length of a buffer of codes and scales.
enum class BufferSize { exact, at_least };

// Converts the exception being handled to a Support.
Support refusal() noexcept;
// Runs checks and converts an exception to a Support.
template <class Check>
Support answer_supported(const Check& check) noexcept {
  try {
    check();
    return {true, ""};
  } catch (...) {
    return refusal();
  }
}

std::string shape_text(const ConstTensorView& view);
std::string shape_text(std::initializer_list<std::int64_t> shape);  // -1 prints as *

inline constexpr std::initializer_list<DType> float_dtypes = {DType::f32, DType::f16, DType::bf16};

// Whether an optional array was passed (an empty view means none).
inline bool is_given(const ConstTensorView& view) { return view.ndim != 0 || view.data != nullptr; }

// Checks of one call. `call` is the name of the public function.
class Checker {
 public:
  Checker(const char* call, const Context& context) : call_(call), context_(context) {}

  // Checks dtype, number of dimensions, device, data and alignment.
  void input(const char* name, const ConstTensorView& view, std::initializer_list<DType> dtypes,
             int min_ndim, int max_ndim) const;
  // Checks like `input`, and that no two elements share memory.
  void output(const char* name, const TensorView& view, std::initializer_list<DType> dtypes,
              int min_ndim, int max_ndim) const;
  void shape(const char* name, const ConstTensorView& view,
             std::initializer_list<std::int64_t> expected) const;
  // Checks a buffer of codes and scales on the context's device, registers its `expected` bytes as
  // `uses` does, and returns their view.
  ConstTensorView buffer(const char* name, const void* data, std::size_t bytes,
                         std::size_t expected, BufferSize size = BufferSize::exact) const;
  void rows_contiguous(const char* name, const ConstTensorView& view) const;
  void disjoint(const char* name, const ConstTensorView& out, const char* other_name,
                const ConstTensorView& other) const;
  // Registers memory that the workspace must not overlap. `input` and `output` register theirs.
  void uses(const char* name, const ConstTensorView& view) const;
  void workspace(const Workspace& workspace, std::size_t needed) const;

  // View as a matrix: all dimensions but the last collapse into rows.
  MatrixIn collapsed(const char* name, const ConstTensorView& view) const;
  MatrixOut collapsed_out(const char* name, const TensorView& view, std::int64_t rows,
                          std::int64_t cols) const;

 private:
  struct Used {
    const char* name;
    std::uintptr_t first, last;
  };

  const char* call_;
  const Context& context_;
  mutable std::array<Used, 8> used_{};
  mutable std::size_t used_count_ = 0;
};

// Argument w: floats (`view`) or quantised (`quantized`).
struct WeightArgument {
  const ConstTensorView* view;
  const ConstQuantizedWeight* quantized;
};
// Requirements of a call on w. Its contraction must match another operand.
struct ExpectedWeight {
  const char* call;
  const char* made_by;  // function that quantises w
  std::uint64_t format;
  bool contracts_out_features;  // contraction over O; otherwise over I
  std::int64_t contraction;     // size of the contraction
  const char* operand;          // name of the operand with the same contraction
  std::int64_t k_padded;        // padded contraction of a quantised w
};
struct ResolvedWeight {
  MatrixIn matrix{};                 // w as floats; no rows if w is quantised
  std::optional<Codes> quantized{};  // w, if it is quantised
  std::int64_t other_size = 0;       // size of w that is not contracted
  ConstTensorView memory{};          // memory that outputs must not overlap
};
ResolvedWeight resolve_weight(const Checker&, const WeightArgument&, const ExpectedWeight&);

MatrixIn matrix_of(const ConstTensorView& view);  // view of 2 dimensions
MatrixOut matrix_out_of(const TensorView& view);

// Carves a workspace into arrays. Without memory it only counts bytes. The size of a workspace and
// its layout therefore come from the same code.
class WorkspaceCursor {
 public:
  WorkspaceCursor() = default;
  explicit WorkspaceCursor(void* data) : base_(static_cast<char*>(data)) {
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    base_ += (alignment - address % alignment) % alignment;
  }

  template <class T>
  T* take(std::int64_t count) {
    T* at = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    used_ += (bytes + alignment - 1) / alignment * alignment;
    return at;
  }

  // Includes space to align the start.
  std::size_t bytes() const { return used_ == 0 ? 0 : used_ + alignment; }

 private:
  static constexpr std::size_t alignment = 256;
  char* base_ = nullptr;
  std::size_t used_ = 0;
};

}  // namespace hot::detail

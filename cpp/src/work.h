// The work of a call as a value: a table of operands, at most two products of them, and g_b. It is
// made by operands_of from checked arguments. The plan, the workspace, both backends and explain
// read it. Without memory (null pointers) it describes a call for workspace sizes and explain.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <variant>

#include "checks.h"
#include "hot/backward_linear.h"
#include "hot/forward_linear.h"
#include "kernels.h"

namespace hot::detail {

// ---- operands ----------------------------------------------------------------------------------

enum class Source : std::uint8_t { gy, w, x };
// Direction of an operand's scales in its source. The contraction runs in the same direction: the
// features of a row, or the rows of a column.
enum class Along : std::uint8_t { row, column };
// Form of an operand at the start of a call. `codes`: nothing is to be done.
enum class From : std::uint8_t { matrix, groups, codes };

// An operand of a product, or x to be saved.
struct Operand {
  Source source;
  Along along;
  From from = From::matrix;
  Storage code = Storage::int8;          // int4: a matrix becomes `groups`
  bool scratch = false;                  // `out` is in the workspace
  bool sum = false, accumulate = false;  // g_b is the sum of this operand's columns
  Projection transform;                  // along the contraction
  OperandQuant quant;
  Key sketch_key{};                   // key of a sketch's projection
  MatrixIn x{};                       // the source; its exponents are applied
  ColumnPowers powers{};              // of the source's columns, applied before the transform
  std::uint8_t* exponents = nullptr;  // the exponents, if this call computes them
  Codes out{};
  Groups groups{};
};

// Operands of a call, in the order of their memory.
class Operands {
 public:
  const Operand* begin() const { return rows_; }
  const Operand* end() const { return rows_ + count_; }
  Operand* begin() { return rows_; }
  Operand* end() { return rows_ + count_; }
  // Adds an operand whose codes are INT8, with a scale per row or column of x.
  Operand& add(Source, Along, const Projection&, const OperandQuant&, const MatrixIn& x);
  // Returns the operand of a form, or null.
  const Operand* find(Source, Along, From from = From::matrix) const;
  const Operand& at(Source source, Along along) const { return rows_[index(source, along)]; }
  int index(Source, Along) const;

 private:
  Operand rows_[4];
  int count_ = 0;
};

// ---- products and sums -------------------------------------------------------------------------

enum class Result : std::uint8_t { gx, gw, y };

// Product of two operands. Without operands `args` alone describes it (gemm_int8, gemm_int4).
struct WorkProduct {
  GemmArgs args{};  // m = 0: no product
  Result result{};
  int a = -1, b = -1;  // indices of the operands
  bool clear = false;  // the contraction is empty: write zeros
  bool by_k = false;   // gw_scale token: a scale per k
  void* scratch = nullptr;
  MatrixIn packed[2]{};  // INT4 operands that a kernel unpacks
  MatrixOut unpacked[2]{};
  bool exists() const { return args.m > 0 && args.n > 0; }
  bool multiplies() const { return exists() && !clear && !by_k; }
};

// Column sums of a matrix (g_b).
struct ColumnSum {
  MatrixIn x{};
  MatrixOut out{};  // a single row; no columns: no sum
  bool accumulate = false;
  float* workspace = nullptr;  // partial sums (CUDA)
};

struct Work {
  const char* call = "gemm";  // public function, for messages
  Operands operands{};
  WorkProduct products[2]{};
  ColumnSum sum{};
  float* all_scratch = nullptr;  // partial sums of g_b alone (CUDA)
  MatrixIn bias{};               // a single row, or none
  float* wide_bias = nullptr;
  std::uint32_t* zeroed = nullptr;   // all largest values, zeroed before kernels update them (CUDA)
  std::uint32_t* counter = nullptr;  // word behind them that products draw tiles from (CUDA)

  // A product reads a bias as contiguous fp32.
  bool widens() const {
    return bias.rows > 0 && (bias.dtype != DType::f32 || (bias.col_stride != 1 && bias.cols > 1));
  }
};

// ---- calls -------------------------------------------------------------------------------------

// A matrix without memory, rows contiguous.
inline MatrixIn shape_in(DType dtype, std::int64_t rows, std::int64_t cols) {
  return {nullptr, dtype, rows, cols, cols, 1};
}
inline MatrixOut shape_out(DType dtype, std::int64_t rows, std::int64_t cols) {
  return {nullptr, dtype, rows, cols, cols, 1};
}

// Transform of g_y and x along the tokens, for g_w.
Projection token_projection(std::int64_t tokens, const BackwardLinearSpec& spec,
                            Side side = Side::activation);
// Transform along features: a projection that keeps all rows of its blocks.
Projection hadamard_projection(std::int64_t features, int block);

// A saved x: the form that exists, and the exponents of its tokens (null if not equalised).
struct SavedX {
  std::variant<Codes, Groups> codes;
  std::uint8_t* exponents = nullptr;
};
SavedX saved_x(const void* data, const SavedLayout&, std::int64_t tokens,
               const BackwardLinearSpec&);
SavedLayout layout_of(std::int64_t tokens, std::int64_t in_features, const BackwardLinearSpec&);

// Checked arguments of backward_linear. A gradient without elements is not computed.
struct BackwardCall {
  const BackwardLinearSpec& spec;
  LinearShape shape;
  MatrixIn gy{}, w{};
  std::optional<Codes> quantized{};  // w, if the caller quantised it
  SavedX saved{};
  Key sketch_key{};  // key of the projection of x
  MatrixOut gx{}, gw{}, gb{};
  bool accumulate = false;
};

// A call without memory, for workspace sizes and explain.
BackwardCall backward_shape(const BackwardLinearSpec&, const LinearShape&, DType dtype,
                            DType gw_dtype, bool gx, bool gw, bool gb);

// Checked arguments of forward_linear.
struct ForwardCall {
  const ForwardLinearSpec& spec;
  LinearShape shape;
  MatrixIn x{}, w{};
  std::optional<Codes> quantized_x{}, quantized_w{};
  MatrixIn bias{};
  MatrixOut y{};
};

ForwardCall forward_shape(const ForwardLinearSpec&, const LinearShape&, DType dtype,
                          bool quantized_x, bool quantized_w);

// Checks SavedActivation, an argument of a call, and adds x to be saved (backward_linear.cpp).
ConstSavedActivation check_saved_x(const Checker&, const Context&, const ConstTensorView& x,
                                   const MatrixIn& rows, const BackwardLinearSpec&,
                                   const SavedActivation&, Work&);

Work operands_of(const BackwardCall&);
Work operands_of(const ForwardCall&);
// Add an operand that a call quantises into `out`: w for g_x, x or w for y.
void add_weight(Work&, const MatrixIn& w, const BackwardLinearSpec&, void* out);
void add_forward_operand(Work&, Source, const MatrixIn&, const ForwardLinearSpec&, void* out,
                         const ColumnPowers& powers = {});
// Adds x to be saved for backward.
void add_saved_x(Work&, const Key&, const MatrixIn& x, const SavedX&, const BackwardLinearSpec&);

void check_forward_spec(const char* call, const ForwardLinearSpec& spec);  // forward_linear.cpp
// Checks `exponents` of `features` features, which may be an empty view.
ColumnPowers column_powers(const Checker&, const char* call, const ConstTensorView& exponents,
                           std::int64_t features, bool divide);

// Length of a row of forward codes: in_features padded to whole blocks of the transform and to 16.
inline std::int64_t forward_k(std::int64_t in_features, const ForwardLinearSpec& spec) {
  return round_up(round_up(in_features, spec.hadamard_block), k_alignment);
}

// ---- workspaces --------------------------------------------------------------------------------

// Sizes of a call's scratch that its backend decides.
struct ScratchSizes {
  std::size_t product[2] = {};
  bool repeat_scales = false;             // a single scale is stored once per row (CUDA)
  std::int64_t amax[4] = {};              // words for largest values, by operand (CUDA)
  bool counter = false;                   // a word for a counter of tiles (CUDA)
  std::int64_t sums = 0, sums_alone = 0;  // floats for g_b: with other gradients, and alone (CUDA)
};

// Carves a workspace, writes its addresses into `work`, and returns its size. A null workspace only
// counts bytes.
std::size_t take_scratch(Work& work, void* workspace, const ScratchSizes&);

}  // namespace hot::detail

// A forward product with checked, resolved arguments (forward_linear.cpp), input of the backends.
#pragma once

#include <cstdint>

#include "checks.h"
#include "hot/forward_linear.h"
#include "kernels.h"

namespace hot::detail {

// Description of a forward product: everything that its kernels and scratch depend on.
struct ForwardWork {
  const ForwardLinearSpec& spec;
  LinearShape shape;
  bool input;         // x must be quantised
  bool weight;        // w must be quantised
  bool bias = false;  // the call has a bias
  bool wide = false;  // the bias must be widened to fp32
  bool empty() const { return shape.tokens == 0 || shape.out_features == 0; }
};

// A forward product and its memory.
struct ForwardCall {
  ForwardWork work;
  MatrixIn x{}, w{};
  Operand quantized_x{}, quantized{};  // x and w, if the caller quantised them
  MatrixIn bias{};                     // a single row
  MatrixOut y{};
};

// Quantisation of both operands, rounded to nearest: the forward pass is deterministic.
inline constexpr OperandQuant forward_quant{8, false, false, Rounding::nearest, Purpose::quantize};

void check_forward_spec(const char* call, const ForwardLinearSpec& spec);  // forward_linear.cpp
// Checks `exponents` of `features` features, which may be an empty view.
ColumnPowers column_powers(const Checker&, const char* call, const ConstTensorView& exponents,
                           std::int64_t features, bool divide);

// Length of a row of codes: in_features padded to whole blocks of the transform and to 16.
inline std::int64_t forward_k(std::int64_t in_features, const ForwardLinearSpec& spec) {
  return round_up(round_up(in_features, spec.hadamard_block), k_alignment);
}

// Arrays of a forward product in its workspace.
struct ForwardScratch {
  Operand x{}, weight{};
  float* bias = nullptr;
  char* gemm = nullptr;
  std::size_t bytes = 0;  // size of the workspace
};
// Carves the workspace; a null workspace only counts bytes. gemm_workspace(m, n, k) returns the
// scratch of the backend's product.
template <class GemmWorkspace>
ForwardScratch take_forward_scratch(void* workspace, const ForwardWork& work,
                                    const GemmWorkspace& gemm_workspace) {
  const LinearShape& shape = work.shape;
  const std::int64_t k = forward_k(shape.in_features, work.spec);
  WorkspaceCursor cursor(workspace);
  ForwardScratch s;
  if (work.input) s.x = take_operand(cursor, shape.tokens, k, shape.tokens);
  if (work.weight) s.weight = take_operand(cursor, shape.out_features, k, shape.out_features);
  if (work.wide) s.bias = cursor.take<float>(shape.out_features);
  s.gemm = cursor.take<char>(
      static_cast<std::int64_t>(gemm_workspace(shape.tokens, shape.out_features, k)));
  s.bytes = cursor.bytes();
  return s;
}

}  // namespace hot::detail

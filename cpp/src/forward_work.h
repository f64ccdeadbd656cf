// A forward product and its parts as backends take them: arguments checked and resolved
// (forward_linear.cpp).
#pragma once

#include <cstdint>

#include "hot/forward_linear.h"
#include "kernels.h"

namespace hot::detail {

// What a forward product computes, as far as its kernels and its scratch depend on it.
struct ForwardWork {
  const ForwardLinearSpec& spec;
  LinearShape shape;
  bool weight;        // whether w is to be quantised
  bool bias = false;  // and whether there is one,
  bool wide = false;  // which is to be widened to a vector of fp32
};

// A call, with its memory. y is not empty.
struct ForwardCall {
  ForwardWork work;
  MatrixIn x{}, w{};
  Operand quantized{};  // w, where it comes quantised
  MatrixIn bias{};      // one row
  MatrixOut y{};
};

// Both operands are rounded to nearest: the forward pass is deterministic.
inline constexpr OperandQuant forward_quant{8, false, false, Rounding::nearest, Purpose::quantize};

// Length of a row of codes: in_features, padded to whole blocks of the transform.
inline std::int64_t forward_k(std::int64_t in_features, const ForwardLinearSpec& spec) {
  return round_up(round_up(in_features, spec.hadamard_block), k_alignment);
}

}  // namespace hot::detail

// A backward pass as backends take it: arguments checked and resolved (backward_linear.cpp).
#pragma once

#include <cstdint>
#include <optional>

#include "checks.h"
#include "hot/backward_linear.h"
#include "kernels.h"

namespace hot::detail {

// What a backward pass computes: everything that its kernels and scratch depend on.
struct BackwardWork {
  const BackwardLinearSpec& spec;
  LinearShape shape;
  const Projection& tokens;        // of g_y and x for g_w
  const Projection& out_features;  // of g_y and w for g_x
  bool gx, gw;                     // the products
  bool weight;                     // whether w is to be quantised for g_x
  bool gb = false, accumulate = false;
  bool clear_gx = false, clear_gw = false;  // empty sums: only zeros
};

// A call, with its memory.
struct BackwardCall {
  BackwardWork work;
  MatrixIn gy{}, w{};
  Operand quantized{};  // w, if it comes quantised
  Operand saved{};      // x, INT8
  GroupsJob groups{};   // x, packed; `out` and `offsets` are the backend's
  std::optional<TokenCodesIn> tokens = std::nullopt;  // x of the token storages
  Key sketch_key{};  // x was projected, rotated or dithered with it
  MatrixOut gx{}, gw{}, gb{};
  const std::uint8_t* exponents = nullptr;  // of x's tokens, where they were equalised
};

// How each operand is quantised. Weights are rounded to nearest: all tokens share them, so rounding
// noise would not average out.
inline OperandQuant gradient_rows_quant(const BackwardLinearSpec& spec) {
  return {spec.gx_bits, spec.gx_scale == Granularity::tensor, false, spec.gx_rounding,
          Purpose::gradient_rows};
}
inline OperandQuant weight_quant(const BackwardLinearSpec& spec) {
  return {spec.gx_bits, spec.weight_scale == Granularity::tensor, false, Rounding::nearest,
          Purpose::weight};
}
inline OperandQuant gradient_columns_quant(const BackwardLinearSpec& spec) {
  return {8, spec.gw_scale == Granularity::tensor, spec.gw_scale == Granularity::token,
          spec.gw_rounding, Purpose::gradient_columns};
}
inline OperandQuant activation_quant(const BackwardLinearSpec& spec) {
  return {8, spec.x_scale == Granularity::tensor, false, spec.x_rounding, Purpose::activation};
}
// Rounding of x from INT4 to INT8. Pseudo-stochastic rounding needs low bits, which codes on a grid
// do not have: everything but stochastic rounds to nearest.
inline Rounding requantize_rounding(const BackwardLinearSpec& spec) {
  return spec.x_rounding == Rounding::stochastic ? Rounding::stochastic : Rounding::nearest;
}

// w [O, I] transformed along O: a projection that keeps all rows of its blocks.
inline Projection hadamard_projection(std::int64_t out_features, int block) {
  Projection p;
  p.tokens = p.body_tokens = out_features;
  p.block = p.rank = p.divisor = block;
  p.basis = block == 1 ? Basis::full : Basis::sequency;
  p.blocks = ceil_div(out_features, block);
  p.k = p.blocks * block;
  p.k_padded = round_up(p.k, k_alignment);
  return p;
}

// The same for the token storages or not: those have the block that fits the width, and signs.
inline Projection out_feature_projection(std::int64_t out_features,
                                         const BackwardLinearSpec& spec) {
  const bool token = is_token_storage(spec.storage);
  Projection p = hadamard_projection(
      out_features, token ? feature_block(out_features, spec.hadamard_block) : spec.hadamard_block);
  p.signs = token;
  return p;
}

// What the sizes of features are found in, and the factors that come of them.
struct FeatureScratch {
  std::int64_t* sums;               // [features]
  std::uint8_t* sampled_exponents;  // [size_sample], of tokens
  std::uint32_t* ticket;            // of the CUDA backend: which CTA ends last
  float* factors;                   // [padded]
};
inline FeatureScratch take_features(WorkspaceCursor& cursor, std::int64_t features,
                                    std::int64_t padded) {
  return {cursor.take<std::int64_t>(features), cursor.take<std::uint8_t>(size_sample),
          cursor.take<std::uint32_t>(1), cursor.take<float>(padded)};
}

// Whether g_w takes a share of the tokens of a token storage.
inline bool draws_tokens(const BackwardLinearSpec& spec) {
  return is_token_storage(spec.storage) && spec.low_rank.basis == Basis::sketch;
}

// What is done to g_y and x along the tokens for g_w.
inline Projection token_projection(std::int64_t tokens, const BackwardLinearSpec& spec) {
  const bool rotated = spec.storage == Storage::rht2;
  Projection p =
      rotated ? hadamard_projection(tokens, rotated_block) : make_projection(tokens, spec.low_rank);
  p.signs = rotated;
  p.equalized = spec.equalize_tokens;
  return p;
}

// A call that keeps x: its arguments checked (backward_linear.cpp), nothing written. It stays where
// it is, for its job points at its projection.
struct CompressCall {
  // `rows`: x as a matrix. The messages name the arguments x and saved.
  CompressCall(const char* call, const Context&, const ConstTensorView& x, const MatrixIn& rows,
               const BackwardLinearSpec&, const SavedActivation& saved, const Workspace&);
  CompressCall(const CompressCall&) = delete;
  CompressCall& operator=(const CompressCall&) = delete;

  Projection projection;
  ConstSavedActivation kept{};
  std::optional<CompressJob> job{};  // none: there is nothing to keep
};

// x as the columns that storage int8 keeps.
inline ColumnsJob activation_columns(const Context& context, const CompressJob& job) {
  return {
      job.equalized(), job.projection, Side::activation, context.key(), activation_quant(job.spec),
      job.out};
}

// The fields that both kinds of product share.
template <class Args>
Args product_of(const Operand& a, const Operand& b, int divisor, bool accumulate,
                const MatrixOut& out) {
  Args args{};
  args.a = a.codes;
  args.b = b.codes;
  args.m = a.rows;
  args.n = b.rows;
  args.k = args.lda = args.ldb = a.k_padded;
  args.b_scale = b.scale;
  args.b_scale_step = b.scales == 1 ? 0 : 1;
  args.inv_divisor = 1.0F / static_cast<float>(divisor);
  args.accumulate = accumulate;
  args.out = out;
  return args;
}
inline GemmArgs product(const Operand& a, const Operand& b, int divisor, bool accumulate,
                        const MatrixOut& out) {
  auto args = product_of<GemmArgs>(a, b, divisor, accumulate, out);
  args.a_scale = a.scale;
  args.a_scale_step = a.scales == 1 ? 0 : 1;
  return args;
}
// The scales of a run along the contraction.
inline GemmTokenArgs token_product(const Operand& a, const Operand& b, int divisor, bool accumulate,
                                   const MatrixOut& out) {
  auto args = product_of<GemmTokenArgs>(a, b, divisor, accumulate, out);
  args.k_scale = a.scale;
  return args;
}

}  // namespace hot::detail

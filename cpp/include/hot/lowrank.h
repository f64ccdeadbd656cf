// Stage: Hadamard low-rank approximation (HLA) along the tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "hot/api.h"
#include "hot/context.h"
#include "hot/tensor.h"

namespace hot {

enum class Basis : std::uint8_t {
  full,      // no transform, every token kept
  lowpass,   // the paper's: the lowest rows of the two-dimensional Walsh order, or any row list
  sequency,  // the lowest rows of the one-dimensional sequency order
  sketch,    // unbiased: a random subspace for each block
};

HOT_API const char* basis_name(Basis basis) noexcept;

/// Layout of the L tokens: samples of `prefix_tokens` class tokens and a grid of `grid_h` x
/// `grid_w` patches. All zero: one flat sequence.
struct TokenLayout {
  int grid_h = 0;
  int grid_w = 0;
  int prefix_tokens = 0;
};

struct LowRank {
  Basis basis = Basis::full;
  int block = 16;
  int rank = 16;          // kept rows of a block; ignored by `full` and where `rows` is given
  std::vector<int> rows;  // `lowpass` only: the natural-order rows to keep, distinct, any order
  TokenLayout layout{};
};

/// The operand of the product that is projected. `gradient` carries the weights of `sketch` and the
/// larger part of the prefix factor.
enum class Side : std::uint8_t { activation, gradient };

/// Row order of a basis for blocks of `block`: the first r entries are the rows kept at rank r.
/// `lowpass` and `sequency` only.
HOT_API std::vector<int> basis_order(Basis basis, int block);

/// Rows of the projection of L tokens (K in docs/numerics.md, without padding).
HOT_API std::int64_t hla_rows(std::int64_t tokens, const LowRank& spec);

/// out[K, C] = P x for x [L, C]: blocks of tokens transformed, `rank` rows of each kept.
///
/// @param x     f32, f16 or bf16, any strides.
/// @param out   [hla_rows(L), C], f32, f16 or bf16; no overlap with x.
/// `sketch` draws its subspaces from the context's key. docs/numerics.md, "Low rank".
HOT_API void hla(const Context& context, const ConstTensorView& x, const LowRank& spec, Side side,
                 const TensorView& out);

}  // namespace hot

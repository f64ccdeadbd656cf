// Stage: Hadamard low-rank approximation (HLA) along the tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "hot/api.h"
#include "hot/context.h"
#include "hot/tensor.h"

namespace hot {

enum class Basis : std::uint8_t {
  full,      // no transform, all tokens kept
  lowpass,   // the paper's basis: lowest rows of the two-dimensional Walsh order, or any row list
  sequency,  // lowest rows of the one-dimensional sequency order
  sketch,    // unbiased: a random subspace per block
};

HOT_API const char* basis_name(Basis basis) noexcept;

/// Layout of the L tokens. A sample has `prefix_tokens` class tokens, then a grid of `grid_h` x
/// `grid_w` patches. All zero: one flat sequence.
struct TokenLayout {
  int grid_h = 0;
  int grid_w = 0;
  int prefix_tokens = 0;
};

struct LowRank {
  Basis basis = Basis::full;
  int block = 16;
  int rank = 16;          // kept rows of a block; ignored by `full` and if `rows` is not empty
  std::vector<int> rows;  // `lowpass` only: natural-order rows to keep, distinct, in any order
  TokenLayout layout{};
};

/// Operand of g_w that is projected. The side `gradient` applies the weights of `sketch`. Each side
/// applies its part of the prefix factor (docs/numerics.md, "Low rank").
enum class Side : std::uint8_t { activation, gradient };

/// Row order of `lowpass` or `sequency` for a block size: rank r keeps the first r entries.
HOT_API std::vector<int> basis_order(Basis basis, int block);

/// Number of rows of the projection of L tokens (K in docs/numerics.md, without padding).
HOT_API std::int64_t hla_rows(std::int64_t tokens, const LowRank& spec);

/// Computes out [K, C] = P x for x [L, C]: transforms blocks of tokens and keeps `rank` rows each.
///
/// @param x     f32, f16 or bf16, any strides.
/// @param out   [hla_rows(L), C], f32, f16 or bf16; no overlap with x.
/// `sketch` draws its subspaces from the context's key. docs/numerics.md, "Low rank".
HOT_API void hla(const Context& context, const ConstTensorView& x, const LowRank& spec, Side side,
                 const TensorView& out);

}  // namespace hot

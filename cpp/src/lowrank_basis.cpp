// Rows that a basis keeps, and the order of the tokens, for all backends.
#include <algorithm>
#include <tuple>
#include <vector>

#include "checks.h"
#include "hot/lowrank.h"
#include "kernels.h"

namespace hot {

namespace {

constexpr int max_sketch_folds = 4;  // one Philox call yields the random numbers of four folds

using detail::is_power_of_two;
using detail::log2_ceil;
using detail::max_low_rank_block;

// Sign changes in row k of the Sylvester matrix of order 2^bits: Gray decoding of the reversed k.
int sequency_of(int k, int bits) {
  int s = 0;
  for (int i = 0; i < bits; ++i) s |= ((k >> i) & 1) << (bits - 1 - i);
  for (int shift = 1; shift < bits; shift <<= 1) s ^= s >> shift;
  return s;
}

template <class... Parts>
[[noreturn]] void refuse(const Parts&... what) {
  detail::invalid("low_rank", what...);
}

void check_block(int block) {
  if (!is_power_of_two(block) || block < 2 || block > max_low_rank_block) {
    refuse("block is ", block, "; expected a power of two from 2 to ", max_low_rank_block);
  }
}

std::vector<int> make_order(Basis basis, int bits) {
  const int low_bits = (bits + 1) / 2;
  const int high_bits = bits - low_bits;
  std::vector<std::tuple<int, int, int, int>> ranked;
  for (int k = 0; k < 1 << bits; ++k) {
    const int s = sequency_of(k, bits);
    if (basis == Basis::sequency) {
      ranked.emplace_back(s, 0, 0, k);
    } else {
      const int i = sequency_of(k >> low_bits, high_bits);
      const int j = sequency_of(k & ((1 << low_bits) - 1), low_bits);
      ranked.emplace_back(i + j, -std::max(i, j), s, k);  // ties: frequencies along one edge first
    }
  }
  std::sort(ranked.begin(), ranked.end());
  std::vector<int> order;
  for (const auto& entry : ranked) order.push_back(std::get<3>(entry));
  return order;
}

// basis_order for checked arguments. Computed once, because every call of every layer needs it.
const std::vector<int>& known_order(Basis basis, int block) {
  using Orders = std::vector<std::vector<int>>;  // by log2(block)
  const auto all = [](Basis kind) {
    Orders orders;
    for (int bits = 0; 1 << bits <= max_low_rank_block; ++bits) {
      orders.push_back(make_order(kind, bits));
    }
    return orders;
  };
  static const Orders lowpass = all(Basis::lowpass), sequency = all(Basis::sequency);
  return (basis == Basis::lowpass ? lowpass : sequency)[static_cast<std::size_t>(log2_ceil(block))];
}

}  // namespace

std::vector<int> basis_order(Basis basis, int block) {
  check_block(block);
  if (basis != Basis::lowpass && basis != Basis::sequency) {
    refuse("basis_order: basis is ", basis_name(basis), "; expected lowpass or sequency");
  }
  return known_order(basis, block);
}

std::int64_t hla_rows(std::int64_t tokens, const LowRank& spec) {
  return detail::make_projection(tokens, spec, Side::activation).k;
}

namespace detail {

void check_low_rank(const LowRank& spec) {
  if (spec.basis != Basis::full && spec.basis != Basis::lowpass && spec.basis != Basis::sequency &&
      spec.basis != Basis::sketch) {
    refuse("basis is unknown; expected full, lowpass, sequency or sketch");
  }
  if (!spec.rows.empty() && spec.basis != Basis::lowpass) {
    refuse("rows was given with basis ", basis_name(spec.basis), "; only lowpass takes a row list");
  }
  if (spec.basis == Basis::full) return;
  check_block(spec.block);
  if (spec.rows.empty() && (spec.rank < 1 || spec.rank > spec.block)) {
    refuse("rank is ", spec.rank, "; expected 1 to block = ", spec.block);
  }
  for (auto row = spec.rows.begin(); row != spec.rows.end(); ++row) {
    if (*row < 0 || *row >= spec.block) {
      refuse("rows[", row - spec.rows.begin(), "] is ", *row,
             "; expected 0 to block - 1 = ", spec.block - 1);
    }
    if (std::find(spec.rows.begin(), row, *row) != row) {
      refuse("rows contains ", *row, " twice; expected distinct rows");
    }
  }
  if (spec.basis == Basis::sketch &&
      (!is_power_of_two(spec.rank) || spec.rank < 2 ||
       log2_ceil(spec.block) - log2_ceil(spec.rank) > max_sketch_folds)) {
    refuse("rank is ", spec.rank,
           "; sketch expects a power of two from 2 to block, at least block / 16");
  }
  const TokenLayout& layout = spec.layout;
  if (layout.grid_h < 0 || layout.grid_w < 0 || (layout.grid_h == 0) != (layout.grid_w == 0)) {
    refuse("token_grid is (", layout.grid_h, ", ", layout.grid_w,
           "); expected two positive numbers, or neither");
  }
  if (layout.prefix_tokens < 0 || (layout.prefix_tokens > 0 && layout.grid_h == 0)) {
    refuse("prefix_tokens is ", layout.prefix_tokens, "; expected 0 or more, with a token_grid");
  }
}

namespace {

KeptRows kept_rows(const LowRank& spec) {
  KeptRows rows;
  if (spec.rows.empty()) {
    const std::vector<int>& order = known_order(spec.basis, spec.block);
    for (int i = 0; i < spec.rank; ++i) rows.add(order[static_cast<std::size_t>(i)]);
  } else {
    for (const int row : spec.rows) rows.add(row);
  }
  std::sort(rows.begin(), rows.end());
  return rows;
}

// Token order of a grid. Throws unless the tokens are a whole number of samples.
TokenOrder token_order(std::int64_t tokens, const LowRank& spec) {
  TokenOrder order;
  const TokenLayout& layout = spec.layout;
  if (layout.grid_h == 0) return order;
  const std::int64_t per_sample =
      std::int64_t{layout.grid_h} * layout.grid_w + layout.prefix_tokens;
  if (tokens % per_sample != 0) {
    refuse("x has ", tokens,
           " tokens; expected a multiple of prefix_tokens + h * w = ", per_sample);
  }
  const int bits = log2_ceil(spec.block);
  order.samples = tokens / per_sample;
  order.grid_h = layout.grid_h;
  order.grid_w = layout.grid_w;
  order.prefix = layout.prefix_tokens;
  order.tile_h = 1 << (bits / 2);
  order.tile_w = 1 << ((bits + 1) / 2);
  return order;
}

}  // namespace

Projection make_projection(std::int64_t tokens, const LowRank& spec, Side side) {
  if (tokens < 0 || tokens > max_size) refuse("tokens is ", tokens, "; expected 0 to 2^48");
  check_low_rank(spec);
  Projection p;
  p.basis = spec.basis;
  p.tokens = p.body_tokens = tokens;
  if (spec.basis == Basis::full) {
    p.blocks = p.k = tokens;
    p.k_padded = round_up(p.k, k_alignment);
    return p;
  }
  p.block = p.divisor = spec.block;
  p.rank = spec.rows.empty() ? spec.rank : static_cast<int>(spec.rows.size());
  if (spec.basis == Basis::sketch) {
    p.folds = log2_ceil(spec.block) - log2_ceil(spec.rank);
    if (side == Side::gradient) {
      p.sketch_weight = static_cast<float>(spec.block - 1) / static_cast<float>(spec.rank - 1);
    }
  } else {
    p.rows = kept_rows(spec);
  }
  if (spec.layout.grid_h > 0) {
    p.order = token_order(tokens, spec);
    p.prefix_factor = static_cast<float>(side == Side::gradient ? p.order.tile_w : p.order.tile_h);
    p.body_tokens = tokens - p.order.prefix_rows();
  }
  p.blocks = ceil_div(p.body_tokens, p.block);
  p.k = p.blocks * p.rank + p.order.prefix_rows();
  p.k_padded = round_up(p.k, k_alignment);
  return p;
}

}  // namespace detail
}  // namespace hot

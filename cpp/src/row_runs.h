// Division of the rows of P x among the threads of generic_columns_kernel and hla_kernel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "operands.h"

namespace hot::detail {

// A run of the rows of P x: blocks [begin, end), then prefix rows [prefix, prefix_end).
struct RowRun {
  std::int64_t begin, end, prefix, prefix_end;
};

// The rows of P x in runs for separate threads: `blocks` blocks each (a multiple of
// blocks_per_cut), then 16 prefix rows each. Every run begins at a multiple of 16 rows.
struct RowRuns {
  std::int64_t all_blocks, blocks, prefix_rows;
  std::int64_t completing;  // prefix rows in the last run of blocks, whose rows they complete to 16

  RowRuns(const Projection& p, std::int64_t blocks_a_run)
      : all_blocks(p.blocks),
        blocks(blocks_a_run),
        prefix_rows(p.order.prefix_rows()),
        completing(std::min(prefix_rows, round_up(p.blocks * p.rank, 16) - p.blocks * p.rank)) {}

  constexpr std::int64_t of_blocks() const {
    return all_blocks > blocks ? (all_blocks + blocks - 1) / blocks : 1;
  }
  constexpr std::int64_t count() const {
    return of_blocks() + (prefix_rows - completing + 15) / 16;
  }
  constexpr RowRun operator[](std::int64_t i) const {
    if (i < of_blocks()) {
      const bool last = i + 1 == of_blocks();
      return {i * blocks, last ? all_blocks : (i + 1) * blocks, 0, last ? completing : 0};
    }
    const std::int64_t prefix = completing + (i - of_blocks()) * 16;
    return {all_blocks, all_blocks, prefix, std::min(prefix_rows, prefix + 16)};
  }
};

}  // namespace hot::detail

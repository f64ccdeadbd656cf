// Reader of a matrix row for the row quantisers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/backend.h"
#include "cpu/scalar.h"

namespace hot::detail {

// Quantises values with one scale, from random block `blk` on.
inline void write_codes(const SimdKernels& simd, const float* v, std::int64_t count,
                        const Scale& scale, const Rounder& rounder, std::uint64_t blk,
                        std::int8_t* out) {
  if (scale.keep == 0) {
    std::memset(out, 0, static_cast<std::size_t>(count));
  } else {
    simd.quantize_row(v, count, &scale.inv, false, rounder, blk, out);
  }
}

// Multiplies or divides values of the columns from `start` on by their powers, if there are any.
inline void apply_powers(const ColumnPowers& powers, std::int64_t start, std::int64_t count,
                         float* values) {
  if (powers.exponents == nullptr) return;
  for (std::int64_t i = 0; i < count; ++i) {
    values[i] *= float_from_bits(powers.factor(powers.exponents[start + i]));
  }
}

// fp32 values of a row, `chunk` at a time: transformed, and padded with zeros to `padded` values.
class Row {
 public:
  static constexpr std::int64_t chunk = 4096;  // floats on the stack, a multiple of every block

  // `columns` (may be null) collects bit patterns of the columns' largest untransformed values.
  Row(const SimdKernels& simd, const MatrixIn& x, int block, std::int64_t padded,
      std::uint32_t* columns = nullptr, const ColumnPowers& powers = {})
      : simd_(simd), x_(x), block_(block), padded_(padded), columns_(columns), powers_(powers) {}

  // Returns values [start, start + count) of a row. `start` is a multiple of chunk.
  const float* values(std::int64_t row, std::int64_t start, std::int64_t count) {
    if (row == row_ && start == start_) return values_;  // computes short rows only once
    const std::int64_t real =
        std::max<std::int64_t>(0, std::min<std::int64_t>(count, x_.cols - start));
    load_row(simd_, x_, row, start, real, values_);
    if (columns_ != nullptr) simd_.amax_columns(values_, real, columns_ + start);
    apply_powers(powers_, start, real, values_);
    std::fill(values_ + real, values_ + count, 0.0F);
    if (block_ > 1) simd_.fwht_row(values_, transformed(start, count), block_);
    row_ = row;
    start_ = start;
    return values_;
  }

  template <class Visit>
  void chunks(std::int64_t row, const Visit& visit) {
    for (std::int64_t start = 0; start < padded_; start += chunk) {
      const std::int64_t count = std::min(chunk, padded_ - start);
      visit(start, count, values(row, start, count));
    }
  }

  std::uint32_t amax(std::int64_t row, std::uint32_t best) {
    chunks(row, [&](std::int64_t, std::int64_t count, const float* v) {
      best = simd_.amax(v, count, best);
    });
    return best;
  }

 private:
  // Length of the blocks that contain a value. The padding behind them may end inside a block.
  std::int64_t transformed(std::int64_t start, std::int64_t count) const {
    return std::min(count, round_up(x_.cols, block_) - start);
  }

  const SimdKernels& simd_;
  const MatrixIn& x_;
  int block_;
  std::int64_t padded_;
  std::uint32_t* columns_;
  ColumnPowers powers_;
  std::int64_t row_ = -1, start_ = -1;
  alignas(64) float values_[chunk];
};

}  // namespace hot::detail

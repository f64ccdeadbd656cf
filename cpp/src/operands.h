// Types of the stages' arguments, for host and kernels: matrices, operands, projections, keys.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hot/context.h"
#include "hot/lowrank.h"
#include "hot/quantize.h"
#include "hot/tensor.h"
#include "random_key.h"
#include "token_order.h"

namespace hot::detail {

// Purpose of random numbers. It lets one key serve a whole layer (docs/numerics.md, "Random bits").
enum class Purpose : std::uint32_t {
  quantize = 0,
  gradient_rows = 1,
  weight = 2,
  activation = 3,
  gradient_columns = 4,
  sketch = 5,
  requantize = 6,
};

// Difference of RandomKey::stream_purpose between neighbouring streams of a key.
inline constexpr std::uint32_t stream_step = 8U << 16;

// Random key of a purpose. Reads the key's counter, if any, from CPU memory; CUDA kernels read
// theirs in cuda/device/rounding.cuh.
inline RandomKey random_key(const Key& key, Purpose purpose) {
  const std::uint64_t offset = key.offset + (key.counter == nullptr ? 0 : *key.counter);
  RandomKey random;
  random.seed_low = static_cast<std::uint32_t>(key.seed);
  random.seed_high = static_cast<std::uint32_t>(key.seed >> 32);
  random.offset_low = static_cast<std::uint32_t>(offset);
  random.offset_high = static_cast<std::uint32_t>(offset >> 32);
  random.stream_purpose = (key.stream * 8 + static_cast<std::uint32_t>(purpose)) << 16;
  return random;
}

inline constexpr int max_low_rank_block = 64;

// A strided input or output matrix; strides count elements.
struct MatrixIn {
  const void* data;
  DType dtype;
  std::int64_t rows, cols, row_stride, col_stride;
  // If not null, row r is multiplied (or, with `divide`, divided) by 2^(exponents[r] - 127).
  const std::uint8_t* exponents = nullptr;
  bool divide = false;
};
// Powers of 2^(1/4) by which the columns of a matrix are multiplied or divided, if not null.
struct ColumnPowers {
  const std::int8_t* exponents = nullptr;
  bool divide = false;
  // Bits of the fp32 number nearest to 2^(e / 4), for e from -128 to 128. The cubic is the
  // difference from a straight line for e mod 4; it needs no predicates.
  static constexpr std::uint32_t bits(int e) {
    const int q = e & 3;
    return 0x3f800000U + (static_cast<std::uint32_t>(e) << 21) +
           static_cast<std::uint32_t>(q * (-1282363 + q * (243487 + q * 18940)) >> 1);
  }
  constexpr std::uint32_t factor(int exponent) const { return bits(divide ? -exponent : exponent); }
};
struct MatrixOut {
  void* data;
  DType dtype;
  std::int64_t rows, cols, row_stride, col_stride;
  // View of this memory as an input.
  constexpr MatrixIn contents() const { return {data, dtype, rows, cols, row_stride, col_stride}; }
};

// Kept rows of a block, ascending.
class KeptRows {
 public:
  void add(int row) { row_[count_++] = static_cast<std::uint8_t>(row); }
  std::size_t size() const { return count_; }
  constexpr int operator[](std::size_t i) const { return row_[i]; }
  std::uint8_t* begin() { return row_; }
  std::uint8_t* end() { return row_ + count_; }

 private:
  std::uint8_t row_[max_low_rank_block] = {};
  std::size_t count_ = 0;
};

// LowRank resolved for a number of tokens and a side. K = blocks * rank + prefix rows.
struct Projection {
  Basis basis = Basis::full;
  int block = 1;
  int rank = 1;
  KeptRows rows;                 // lowpass, sequency
  int folds = 0;                 // sketch: log2(block / rank)
  float sketch_weight = 1.0F;    // sketch: factor of every row but the first; activations: 1
  std::int64_t tokens = 0;       // L, prefix tokens included
  std::int64_t body_tokens = 0;  // tokens that are transformed
  std::int64_t blocks = 0;
  std::int64_t k = 0;
  std::int64_t k_padded = 0;
  int divisor = 1;
  TokenOrder order{};
  float prefix_factor = 1.0F;  // factor of prefix rows
  bool equalized = false;      // tokens have exponents (MatrixIn::exponents)
};

// Largest size and largest product of two sizes. Within these limits padded sizes, buffers and
// scratch are exact in 64 bits. No memory holds more.
inline constexpr std::int64_t max_size = std::int64_t{1} << 48;
inline constexpr std::int64_t max_product = std::int64_t{1} << 52;
inline constexpr std::int64_t max_operations = std::int64_t{1} << 58;  // room for padded sizes

inline std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
inline std::int64_t ceil_div(std::int64_t value, std::int64_t divisor) {
  return (value + divisor - 1) / divisor;
}
inline bool is_power_of_two(int value) { return value > 0 && (value & (value - 1)) == 0; }
inline int log2_ceil(std::int64_t value) {
  int log = 0;
  while ((std::int64_t{1} << log) < value) ++log;
  return log;
}

inline std::int64_t element_bytes(DType dtype) {
  return static_cast<std::int64_t>(dtype_size(dtype));
}

// Index of an element's scale.
constexpr std::int64_t scale_at(Granularity scale, std::int64_t row, std::int64_t col) {
  return scale == Granularity::token ? row : scale == Granularity::channel ? col : 0;
}

// Blocks of `rank` rows that fill whole groups of 16 rows. Tasks split K at multiples of it.
inline std::int64_t blocks_per_cut(int rank) {
  std::int64_t blocks = 1;
  while (blocks * rank % 16 != 0) ++blocks;
  return blocks;
}

inline constexpr std::int64_t k_alignment = 16;       // bytes: alignment of each stored row
inline constexpr std::int64_t int4_group = 64;        // tokens per scale of an INT4 x
inline constexpr std::int64_t int4_k_alignment = 32;  // values, 16 bytes of packed codes
inline constexpr std::int64_t int32_safe_k = 131071;  // 128^2 * K <= 2^31 - 1

// INT8 codes [rows, k_padded], contraction contiguous, and their scales.
struct Codes {
  std::int8_t* codes = nullptr;
  float* scale = nullptr;
  std::int64_t rows = 0, k_padded = 0;
  // 1, rows, or k_padded (gw_scale token). A single scale may be repeated in all places.
  std::int64_t scales = 0;
  std::uint32_t* amax = nullptr;  // scratch of the CUDA backend for largest values
};

// INT4 codes [channels, row_bytes], packed, and a bf16 scale per channel and int4_group tokens.
struct Groups {
  std::uint8_t* packed = nullptr;
  std::int64_t row_bytes = 0;
  std::uint16_t* scale = nullptr;
  std::int64_t tokens = 0, channels = 0;
};

// Bytes of a quantised weight: codes [rows, k_padded], then a scale per row.
inline std::size_t weight_bytes(std::int64_t rows, std::int64_t k_padded) {
  return static_cast<std::size_t>(rows) * (static_cast<std::size_t>(k_padded) + sizeof(float));
}
// Codes are writable, also those of a caller's buffer that is only read.
inline Codes weight_codes(const void* data, std::int64_t rows, std::int64_t k_padded) {
  if (data == nullptr) return {nullptr, nullptr, rows, k_padded, rows};
  auto* bytes = static_cast<std::int8_t*>(const_cast<void*>(data));
  return {bytes, reinterpret_cast<float*>(bytes + rows * k_padded), rows, k_padded, rows};
}

struct OperandQuant {
  int bits;
  bool per_tensor;
  bool per_contraction;  // a scale per k (gw_scale token)
  Rounding rounding;
  Purpose purpose;
};

}  // namespace hot::detail

// The interface of a backend. dispatch.cpp has checked and resolved the arguments; nothing here
// validates.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hot/backward_linear.h"
#include "hot/context.h"
#include "hot/gemm.h"
#include "hot/hadamard.h"
#include "hot/lowrank.h"
#include "hot/quantize.h"
#include "hot/tensor.h"
#include "random_key.h"
#include "token_order.h"

namespace hot::detail {

// Purposes of random numbers: one key serves a whole layer (docs/numerics.md, "Random bits").
enum class Purpose : std::uint32_t {
  quantize = 0,
  gradient_rows = 1,
  weight = 2,
  activation = 3,
  gradient_columns = 4,
  sketch = 5,
  requantize = 6,
  signs = 7,
};

// Reads the key's counter from CPU memory, if it has one (CUDA kernels read theirs in
// cuda/device/rounding.cuh).
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

// Throws for a stream or a counter that no Key may have (context.cpp).
void check_key(const char* call, const char* name, const Key& key);

inline constexpr int max_low_rank_block = 64;

// A strided input or output matrix; strides count elements.
struct MatrixIn {
  const void* data;
  DType dtype;
  std::int64_t rows, cols, row_stride, col_stride;
  // Where given: row r is taken times 2^(exponents[r] - 127), or divided by it.
  const std::uint8_t* exponents = nullptr;
  bool divide = false;
};
struct MatrixOut {
  void* data;
  DType dtype;
  std::int64_t rows, cols, row_stride, col_stride;
};

// The kept rows of a block, ascending.
class KeptRows {
 public:
  void add(int row) { row_[count_++] = static_cast<std::uint8_t>(row); }
  std::size_t size() const { return count_; }
  int operator[](std::size_t i) const { return row_[i]; }
  std::uint8_t* begin() { return row_; }
  std::uint8_t* end() { return row_ + count_; }

 private:
  std::uint8_t row_[max_low_rank_block] = {};
  std::size_t count_ = 0;
};

// A LowRank resolved for a number of tokens. K = blocks * rank + prefix rows.
struct Projection {
  Basis basis = Basis::full;
  int block = 1;
  int rank = 1;
  KeptRows rows;                 // lowpass, sequency
  int folds = 0;                 // sketch: log2(block / rank)
  float sketch_weight = 1.0F;    // sketch, gradient side: factor of every row but the first
  std::int64_t tokens = 0;       // L, prefix tokens included
  std::int64_t body_tokens = 0;  // tokens that are transformed
  std::int64_t blocks = 0;
  std::int64_t k = 0;
  std::int64_t k_padded = 0;
  int divisor = 1;
  TokenOrder order{};
  float prefix_factor_x = 1.0F, prefix_factor_g = 1.0F;
  bool signs = false;      // each token times a random sign before the transform (rht4, rht2)
  bool equalized = false;  // each token times a power of two (MatrixIn::exponents)
};

// Both throw for a bad spec, make_projection also for one that does not fit the tokens.
void check_low_rank(const LowRank& spec);
Projection make_projection(std::int64_t tokens, const LowRank& spec);

// Largest size and largest product of two sizes. No memory holds more; within these limits padded
// sizes, buffers and scratch are exact in 64 bits.
inline constexpr std::int64_t max_size = std::int64_t{1} << 48;
inline constexpr std::int64_t max_product = std::int64_t{1} << 52;

inline std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
inline std::int64_t ceil_div(std::int64_t value, std::int64_t divisor) {
  return (value + divisor - 1) / divisor;
}
inline bool is_power_of_two(int value) { return value > 0 && (value & (value - 1)) == 0; }

// Number of blocks of `rank` rows that make whole groups of 16 rows: tasks split K at multiples of
// it.
inline std::int64_t blocks_per_cut(int rank) {
  std::int64_t blocks = 1;
  while (blocks * rank % 16 != 0) ++blocks;
  return blocks;
}

inline constexpr std::int64_t k_alignment = 16;       // bytes; every stored row starts aligned
inline constexpr std::int64_t int4_group = 64;        // tokens that share a scale of an INT4 x
inline constexpr std::int64_t rotated_block = 64;     // the same of rht4 and rht2
inline constexpr std::int64_t int4_k_alignment = 32;  // values: 16 bytes of packed codes
inline constexpr std::int64_t int32_safe_k = 133143;  // 127^2 * K <= 2^31 - 1

// Codes of one quantised operand, contraction contiguous: [rows, k_padded] and its scales.
struct Operand {
  std::int8_t* codes;
  float* scale;
  std::int64_t rows, k_padded;
  // 1, rows, or k_padded (token). A single scale still has room for that many: CUDA writes it to
  // every element, which its products read faster; the CPU writes the first one.
  std::int64_t scales;
  std::uint32_t* amax = nullptr;  // scratch of the CUDA backend: maxima
};

// A quantised weight's buffer: codes [rows, k_padded], then room for a scale of each row.
inline std::size_t weight_bytes(std::int64_t rows, std::int64_t k_padded) {
  return static_cast<std::size_t>(rows) * (static_cast<std::size_t>(k_padded) + sizeof(float));
}
inline Operand weight_operand(void* data, std::int64_t rows, std::int64_t k_padded) {
  auto* bytes = static_cast<std::int8_t*>(data);
  return {bytes, reinterpret_cast<float*>(bytes + rows * k_padded), rows, k_padded, rows};
}

struct OperandQuant {
  int bits;
  bool per_tensor;
  bool per_k;  // one scale for each column of the K-contiguous matrix ("token")
  Rounding rounding;
  Purpose purpose;
};

// The column sums of a matrix, g_b.
struct ColumnSum {
  MatrixOut out;  // one row
  bool accumulate;
  void* workspace;  // column_sum_workspace bytes
};

// Rows of x [L, O] transformed along O and quantised: [L, roundup(O, block) -> Kp].
struct RowsJob {
  MatrixIn x;
  int hadamard_block;
  OperandQuant quant;
  Operand out;
};
// P x for x [L, C], transposed and quantised: [C, Kp].
struct ColumnsJob {
  MatrixIn x;
  const Projection* projection;
  Side side;
  Key sketch_key;
  OperandQuant quant;
  Operand out;
};
// x as packed codes, groups of 64 tokens per channel, to INT8 with one scale per channel.
struct GroupsJob {
  const std::uint8_t* packed;
  std::int64_t row_bytes;
  const std::uint16_t* scale;
  std::int64_t tokens;
  Rounding rounding;
  Operand out;
  int rotated_bits = 0;            // 4 or 2: codes of rht4 or rht2; 0: INT4
  const float* offsets = nullptr;  // of those: what is added to a code's value, [k_padded] (CPU),
  Key key{};                       // or the key of the dither that it comes from (CUDA)
};

// x [L, C] to the codes of rht4 and rht2, one bf16 scale per block and channel.
struct RotateJob {
  MatrixIn x;
  const Projection* projection;  // all rows of blocks of 64, with signs
  Key key;                       // of the signs and of the dither
  int bits;
  std::uint8_t* packed;
  std::int64_t row_bytes;
  std::uint16_t* scale;
};

// Decodes tokens [first, first + out.rows) of a saved x of basis full.
struct DecompressJob {
  const void* codes;  // [channels, row_bytes], INT8 or packed INT4
  std::int64_t row_bytes;
  const void* scale;  // INT4: bf16, `groups` for a channel; INT8: f32
  bool int4;
  std::int64_t scale_step;  // scales from a channel to the next; 0: one for all
  std::int64_t first;
  MatrixOut out;                            // [tokens, channels], not empty
  const std::uint8_t* exponents = nullptr;  // of all tokens, where they were equalised
  int rotated_bits = 0;                     // 4 or 2: rht4 or rht2, not what `int4` says
  Key key{};                                // of their signs and dither
};

struct FwhtArgs {
  const void* x;
  DType x_dtype;
  void* out;
  DType out_dtype;
  std::int64_t axis_length, axis_stride_x, axis_stride_out;
  int block;
  // Up to three other axes.
  int outer_dims;
  std::int64_t outer_shape[3], outer_stride_x[3], outer_stride_out[3];
};

struct GemmArgs {
  const std::int8_t *a, *b;  // K contiguous
  std::int64_t m, n, k, lda, ldb;
  const float *a_scale, *b_scale;           // null: bare int32 sums
  std::int64_t a_scale_step, b_scale_step;  // 0: one scale for all
  float inv_divisor;
  bool accumulate;
  MatrixOut out;
  const float* bias = nullptr;  // [n], added to the scaled sums; never together with `accumulate`
};

// A product whose a has scales along the contraction: fp32, k ascending (docs/numerics.md,
// "token").
struct GemmTokenArgs {
  const std::int8_t *a, *b;
  std::int64_t m, n, k, lda, ldb;
  const float *k_scale, *b_scale;
  std::int64_t b_scale_step;
  float inv_divisor;
  bool accumulate;
  MatrixOut out;
};

struct BackwardWork;  // backward_work.h
struct BackwardCall;
struct ForwardWork;  // forward_work.h
struct ForwardCall;

class Backend {
 public:
  virtual ~Backend() = default;

  virtual void fwht(const Context&, const FwhtArgs&) const = 0;
  virtual void hla(const Context&, const MatrixIn& x, const Projection&, Side,
                   const Key& sketch_key, const MatrixOut& out) const = 0;
  virtual void quantize(const Context&, const MatrixIn& x, const QuantSpec&, const MatrixOut& q,
                        float* scale) const = 0;
  virtual void dequantize(const Context&, const MatrixIn& q, const float* scale, Granularity,
                          const MatrixOut& out) const = 0;
  virtual void pack_int4(const Context&, const MatrixIn& q, const MatrixOut& out) const = 0;
  virtual void unpack_int4(const Context&, const MatrixIn& packed, const MatrixOut& out) const = 0;

  virtual std::size_t gemm_workspace(const Context&, std::int64_t m, std::int64_t n,
                                     std::int64_t k) const = 0;
  virtual void gemm(const Context&, const GemmArgs&, void* workspace) const = 0;
  // The same on packed INT4: lda and ldb count bytes, k counts values. `a` and `b` have room for
  // the operands as INT8 [m, k] and [n, k], if the backend unpacks them.
  virtual void gemm_int4(const Context&, const GemmArgs&, std::int8_t* a, std::int8_t* b,
                         void* workspace) const = 0;

  // Scratch of compress_columns and of quantize_weight.
  virtual std::size_t columns_workspace(const Context&, std::int64_t cols, const Projection&,
                                        const OperandQuant&) const = 0;
  // x [L, C] as INT8 and as packed INT4.
  virtual void compress_columns(const Context&, const ColumnsJob&, void* workspace) const = 0;
  virtual void compress_groups(const Context&, const MatrixIn& x, Rounding, std::uint8_t* packed,
                               std::int64_t row_bytes, std::uint16_t* scale) const = 0;
  virtual void decompress(const Context&, const DecompressJob&) const = 0;
  // What equalises the tokens of x, and x as rht4 and rht2.
  virtual void token_exponents(const Context&, const MatrixIn& x,
                               std::uint8_t* exponents) const = 0;
  virtual void compress_rotated(const Context&, const RotateJob&) const = 0;
  virtual void quantize_weight(const Context&, const ColumnsJob&, void* workspace) const = 0;

  virtual std::size_t backward_workspace(const Context&, const BackwardWork&) const = 0;
  virtual void backward(const Context&, const BackwardCall&, void* workspace) const = 0;

  // Rows with a scale each, nothing random: w for the forward product.
  virtual void quantize_forward_weight(const Context&, const RowsJob&) const = 0;
  virtual std::size_t forward_workspace(const Context&, const ForwardWork&) const = 0;
  virtual void forward(const Context&, const ForwardCall&, void* workspace) const = 0;
};

const Backend& backend_of(const Context&);  // dispatch.cpp

const Backend& cpu_backend();
// Defined in cuda/backend.cu, or in cpu/no_cuda.cpp for a build without CUDA: there the backend
// throws, the architectures are "" and the device count is 0.
const Backend& cuda_backend();
const char* cuda_archs() noexcept;
int cuda_device_count() noexcept;

}  // namespace hot::detail

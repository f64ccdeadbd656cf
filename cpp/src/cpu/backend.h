// The CPU backend, the executable definition of docs/numerics.md. One file for each stage; the
// inner loops are in simd_*.cpp.
#pragma once

#include "backward_work.h"
#include "cpu/phase.h"
#include "cpu/simd.h"
#include "cpu/thread_pool.h"
#include "kernels.h"

namespace hot::detail {

class CpuBackend final : public Backend {
 public:
  // hadamard.cpp
  void fwht(const Context&, const FwhtArgs&) const override;
  // lowrank.cpp
  void hla(const Context&, const MatrixIn& x, const Projection&, Side, const Key& sketch_key,
           const MatrixOut& out) const override;
  void quantize_weight(const Context&, const ColumnsJob&, void* workspace) const override;
  // quantize.cpp
  void quantize(const Context&, const MatrixIn& x, const QuantSpec&, const MatrixOut& q,
                float* scale) const override;
  void dequantize(const Context&, const MatrixIn& q, const float* scale, Granularity,
                  const MatrixOut& out) const override;
  void decompress(const Context&, const DecompressJob&) const override;
  // pack.cpp
  void pack_int4(const Context&, const MatrixIn& q, const MatrixOut& out) const override;
  void unpack_int4(const Context&, const MatrixIn& packed, const MatrixOut& out) const override;
  // gemm.cpp
  std::size_t gemm_workspace(const Context&, std::int64_t m, std::int64_t n,
                             std::int64_t k) const override;
  void gemm(const Context&, const GemmArgs&, void* workspace) const override;
  void gemm_int4(const Context&, const GemmArgs&, std::int8_t* a, std::int8_t* b,
                 void* workspace) const override;
  // backward_linear.cpp
  std::size_t columns_workspace(const Context&, std::int64_t, const Projection&,
                                const OperandQuant&) const override {
    return 0;
  }
  void compress(const Context&, const CompressJob&, void* workspace) const override;
  std::size_t backward_workspace(const Context&, const BackwardWork&) const override;
  void backward(const Context&, const BackwardCall&, const Checker&,
                const Workspace&) const override;
  // forward_linear.cpp
  void quantize_forward_weight(const Context&, const RowsJob&) const override;
  void quantize_forward_input(const Context&, const RowsJob&, const CompressJob* kept,
                              void* workspace) const override;
  std::size_t forward_workspace(const Context&, const ForwardWork&) const override;
  void forward(const Context&, const ForwardCall&, const Checker&, const Workspace&) const override;
};

// The stages of compress_activation; `x` is equalised where that is wanted.
void token_exponents(const Context&, const MatrixIn& x, std::uint8_t* exponents);  // quantize.cpp
void compress_groups(const Context&, const MatrixIn& x, const CompressJob&);       // quantize.cpp
void compress_rotated(const Context&, const MatrixIn& x, const CompressJob&);      // lowrank.cpp

// Stages whose parts join the phases of a backward pass. Each adds its tasks to a phase; what a
// part needs has to have been run in a phase before. The single scale of a whole operand is its
// scales' first element.

// Rows of g_y, x or w. quantize.cpp
class QuantizeRows {
 public:
  QuantizeRows(const Context&, const RowsJob&);
  // The codes' pass also finds the columns' largest values, as bit patterns: one read of x less.
  // For x of at most most_found columns and a scale for each row.
  void find_columns(std::uint32_t* amax);
  static constexpr std::int64_t most_found = 4096;

  void add_largest(Phase&) const;  // nothing, unless one scale is for all
  void add_codes(Phase&) const;
  void finish() const;

 private:
  void largest(std::int64_t task) const;
  void codes(std::int64_t task) const;

  const SimdKernels& simd_;
  RowsJob job_;
  Rounder rounder_;
  std::int64_t per_task_, tasks_;
  std::uint32_t* columns_ = nullptr;
};

// Of a token whose largest value has the biased exponent `largest`, 27 to 254: that of the power of
// two at or below its mean magnitude. quantize.cpp
class Row;
std::uint8_t token_exponent(const SimdKernels&, Row&, std::int64_t token, int largest,
                            std::int64_t cols);

// x as packed codes to INT8. quantize.cpp
class RequantizeGroups {
 public:
  RequantizeGroups(const Context&, const GroupsJob&);
  void add_codes(Phase&) const;

 private:
  void codes(std::int64_t task) const;

  const SimdKernels& simd_;
  GroupsJob job_;
  Rounder rounder_;
  std::int64_t per_task_;
};

// A stage that needs a strip's largest values before it rounds keeps up to this many rows on the
// stack (384 KB) if there are enough strips for all threads.
inline constexpr std::int64_t most_kept_rows = 1536;
inline bool keeps_strips(const Context& context, std::int64_t strips, std::int64_t rows) {
  return rows <= most_kept_rows && strips >= std::int64_t{4} * context.threads();
}

// The tasks of a pass over P x: strips of columns times ranges of blocks, enough for all threads;
// whole strips where the stage can keep them. lowrank.cpp
class StripTasks {
 public:
  struct Task {
    std::int64_t col, begin, end;  // the first column, a range of blocks
  };
  StripTasks(const Context&, const MatrixIn& x, const Projection&, bool may_be_whole = false);
  bool whole() const { return whole_; }
  std::int64_t count() const { return strips_ * ranges_; }
  Task operator[](std::int64_t task) const;

 private:
  std::int64_t strips_, ranges_ = 0, range_blocks_ = 0, blocks_;
  bool whole_ = false;
};

// Rows of P x, transposed. Until `finish`, the scales' memory holds the largest values' bit
// patterns. lowrank.cpp
class QuantizeColumns {
 public:
  QuantizeColumns(const Context&, const ColumnsJob&);
  std::uint32_t* amax() const;
  void add_largest(Phase&) const;                    // of whole strips the codes, too
  void add_codes(Phase&, bool found = false) const;  // found: the largest values, elsewhere
  void add_finish(Phase&) const;

 private:
  class Writer;
  void largest(std::int64_t task) const;
  void codes(std::int64_t task) const;
  void whole(std::int64_t task) const;
  void finish(std::int64_t) const;

  const SimdKernels& simd_;
  ColumnsJob job_;
  RandomKey random_;  // of the sketch, or of the signs
  Rounder rounder_;
  StripTasks tasks_;
  std::int64_t scales_;
};

// g_b. lowrank.cpp
class SumColumns {
 public:
  SumColumns(const Context& context, const MatrixIn& x, const MatrixOut& out, bool accumulate)
      : simd_(simd_kernels(context.isa())), x_(x), out_(out), accumulate_(accumulate) {}
  void add_sums(Phase&) const;

 private:
  void sum(std::int64_t strip) const;

  const SimdKernels& simd_;
  MatrixIn x_;
  MatrixOut out_;
  bool accumulate_;
};

// An integer product: b as panels, the starts of a's sums, then the tiles. gemm.cpp
class Product {
 public:
  Product(const Context&, const GemmArgs&, void* workspace);
  void add_panels(Phase&) const;
  void add_bias(Phase&) const;
  void add_tiles(Phase&) const;
  // In place of the tiles: a block, which begins at a whole panel, for whoever needs it. fp32.
  void block(std::int64_t row, std::int64_t col, const MatrixOut& out) const;
  std::int64_t rows() const { return args_.m; }
  std::int64_t cols() const { return args_.n; }

 private:
  struct Place {
    std::int64_t row, col;
  };
  struct Range {
    std::int64_t begin, end;
  };
  void pack(std::int64_t task) const;
  void find_bias(std::int64_t task) const;
  void multiply(std::int64_t task) const;
  void tiles(const GemmArgs& to, Place origin, Range rows, Range panels) const;
  char* panel_at(std::int64_t panel, std::int64_t chunk) const;
  std::int64_t chunk_length(std::int64_t chunk) const;

  const SimdKernels& simd_;
  GemmArgs args_;
  std::int64_t chunks_ = 0, panels_ = 0, row_tasks_ = 0, slices_ = 0;
  std::size_t panel_bytes_ = 0;
  char* packed_ = nullptr;
  std::int32_t* bias_ = nullptr;
};

// The sizes of features, from a sample of tokens. token_codes.cpp
class FeatureSizes {
 public:
  FeatureSizes(const Context&, const MatrixIn& x, const FeatureScratch&, std::uint8_t* exponents);
  void add_tokens(Phase&) const;
  void add_sums(Phase&) const;
  void finish() const;  // writes the exponents

 private:
  static constexpr std::int64_t tokens_at_once = 16;
  void tokens(std::int64_t task) const;
  void sums(std::int64_t task) const;

  const SimdKernels& simd_;
  MatrixIn x_;
  FeatureScratch scratch_;
  std::uint8_t* exponents_;
  std::int64_t count_;
};

// sign * 2^exponent (divide: 2^-exponent) * scale of features [first, first + count).
// token_codes.cpp
void feature_factors(const Key& key, const std::uint8_t* exponents, bool divide, float scale,
                     std::int64_t first, std::int64_t count, float* factors);

// The tokens that g_w takes, by slots: all, or a share drawn by size.
struct DrawnTokens {
  const std::int64_t* token;  // null: slot and token are the same; -1: an empty slot
  const float* factor;        // what a slot's contribution is multiplied by
  std::int64_t slots;
};
// Draws as many as there are slots; `gradient_scale`: of g_y's tokens. token_codes.cpp
void draw_tokens(const Context&, const TokenCodesIn& x, const float* gradient_scale,
                 std::int64_t slots, std::int64_t* token, float* factor);

// Codes of g_y's rows as g_w takes them, zeros behind the last token. Rows of `from` are whole
// multiples of 16 bytes, those of `to` too. token_codes.cpp
class TransposeCodes {
 public:
  TransposeCodes(const Operand& from, const DrawnTokens& drawn, const Operand& to)
      : from_(from), drawn_(drawn), to_(to) {}
  void add_codes(Phase&) const;

 private:
  static constexpr std::int64_t block = 64;
  void codes(std::int64_t task) const;

  Operand from_;
  DrawnTokens drawn_;
  Operand to_;
};

// x of the token storages times the scales of g_y's tokens, transposed, with a scale for each
// channel. `key`: that x was kept with. token_codes.cpp
class Contributions {
 public:
  Contributions(const Context&, const TokenCodesIn&, const Key& key, const float* gradient_scale,
                const DrawnTokens&, Rounding, const Operand& out);
  void add_largest(Phase&) const;  // of whole strips the codes, too
  void add_codes(Phase&) const;
  void finish() const;

 private:
  class Writer;
  void largest(std::int64_t task) const;
  void codes(std::int64_t task) const;
  void whole(std::int64_t task) const;
  std::int64_t first_column(std::int64_t task) const;
  int columns(std::int64_t task) const;
  template <class Visit>
  void tiles(std::int64_t task, const Visit& visit) const;
  std::uint32_t* amax() const;

  const SimdKernels& simd_;
  TokenCodesIn codes_;
  Key key_;
  const float* gradient_scale_;
  DrawnTokens drawn_;
  bool stochastic_;
  RandomKey random_;
  Operand out_;
  std::int64_t strips_, tiles_per_task_, ranges_;
  bool whole_;
};

// g_w from the product of transformed operands [O', I'], a block at a time: the product is nowhere
// as a whole. token_codes.cpp
class UndoTransforms {
 public:
  UndoTransforms(const Context&, const Product&, int out_block, int in_block, const Key& out_key,
                 const std::uint8_t* out_exponents, const Key& in_key,
                 const std::uint8_t* in_exponents, bool accumulate, const MatrixOut& out);
  void add_tiles(Phase&) const;

 private:
  void tiles(std::int64_t task) const;
  void tile_of(std::int64_t row, std::int64_t col) const;

  const SimdKernels& simd_;
  const Product& product_;
  int out_block_, in_block_;
  Key out_key_, in_key_;
  const std::uint8_t *out_exponents_, *in_exponents_;
  bool accumulate_;
  MatrixOut out_;
  std::int64_t strips_, slices_;
};

void compress_tokens(const Context&, const CompressJob&, void* workspace);  // token_codes.cpp
void decompress_tokens(const Context&, const DecompressJob&);               // token_codes.cpp

// Stages by themselves.
void quantize_rows(const Context&, const RowsJob&);
void quantize_columns(const Context&, const ColumnsJob&);
// Offsets added to decoded rht2 values, per block. quantize.cpp
void dither_offsets(const Context&, const Key&, std::int64_t blocks, float* offsets);
void gemm_token(const Context&, const GemmTokenArgs&, void* workspace);  // gemm.cpp
void fill_zero(const Context&, const MatrixOut& out);                    // backend.cpp
// Codes as nibbles, the lower first; the last upper one is 0 where the count is odd. pack.cpp
void pack_row(const std::int8_t* codes, std::int64_t count, std::uint8_t* out);

// Load and store elements [col, col + count) of a row as fp32, with any stride.
void load_row(const SimdKernels&, const MatrixIn&, std::int64_t row, std::int64_t col,
              std::int64_t count, float* dst);
void store_row(const SimdKernels&, const float* src, std::int64_t row, std::int64_t col,
               std::int64_t count, const MatrixOut&);
// Columns [col, col + count) of a matrix, whose rows are loaded one by one.
class ColumnStrip {
 public:
  ColumnStrip(const SimdKernels&, const MatrixIn&, std::int64_t col, std::int64_t count);
  std::int64_t count() const { return count_; }
  // dst: strip_columns floats; those past the count keep what they have, times a row's factor.
  void load(std::int64_t row, float* dst) const {
    if (!plain_) return load_row(simd_, x_, row, col_, count_, dst);
    simd_.load(at(row), x_.dtype, count_, dst);
    if (x_.exponents != nullptr) resize(row, dst);
  }
  // Asks the caches for a row, where its elements lie together: strips of rows are not foreseen.
  void prefetch(std::int64_t row) const {
    const char* const from = at(row);
    for (std::int64_t i = 0; i < bytes_together_; i += 64) __builtin_prefetch(from + i);
  }

 private:
  // Of rows that exist alone: the stride of a single row may be any number, and an array without
  // rows may have no memory.
  const char* at(std::int64_t row) const {
    return static_cast<const char*>(x_.data) + (row * x_.row_stride + col_ * x_.col_stride) * size_;
  }

  void resize(std::int64_t row, float* dst) const;

  const SimdKernels& simd_;
  const MatrixIn& x_;
  std::int64_t col_, count_, size_, bytes_together_;
  bool plain_;
};
// Loads and stores of any strided run of elements.
void load_run(const SimdKernels&, const void* data, DType, std::int64_t first, std::int64_t stride,
              std::int64_t count, float* dst);
void store_run(const SimdKernels&, const float* src, std::int64_t count, void* data, DType,
               std::int64_t first, std::int64_t stride);

// The scales of codes of `bits` bits, in place of the bit patterns of their largest values.
// quantize.cpp
void patterns_to_scales(float* scale, std::int64_t count, int bits);

// *pattern = max(*pattern, value), atomically.
void atomic_max(std::uint32_t* pattern, std::uint32_t value);

// Elements of a task, of `total`: few enough to balance the threads, enough to pay for the
// hand-over.
std::int64_t task_elements(const Context&, std::int64_t total);

}  // namespace hot::detail

// The CPU backend, the executable definition of docs/numerics.md. Inner loops are in simd_*.cpp.
#pragma once

#include <algorithm>

#include "cpu/phase.h"
#include "cpu/simd.h"
#include "cpu/thread_pool.h"
#include "kernels.h"
#include "work.h"

namespace hot::detail {

class CpuBackend final : public Backend {
 public:
  // hadamard.cpp
  void fwht(const Context&, const FwhtArgs&) const override;
  // lowrank.cpp
  void hla(const Context&, const MatrixIn& x, const Projection&, const Key& sketch_key,
           const MatrixOut& out) const override;
  // quantize.cpp
  void quantize(const Context&, const MatrixIn& x, const QuantSpec&, const MatrixOut& q,
                float* scale) const override;
  void dequantize(const Context&, const MatrixIn& q, const float* scale, Granularity,
                  const MatrixOut& out) const override;
  void decompress(const Context&, const DecompressJob&) const override;
  // pack.cpp
  void pack_int4(const Context&, const MatrixIn& q, const MatrixOut& out) const override;
  void unpack_int4(const Context&, const MatrixIn& packed, const MatrixOut& out) const override;
  // blocks.cpp
  void encode_blocks(const Context&, const EncodeBlocksJob&) const override;
  void sum_blocks(const Context&, const SumBlocksJob&) const override;
  // gemm.cpp
  std::size_t gemm_workspace(const Context&, std::int64_t m, std::int64_t n,
                             std::int64_t k) const override;
  void gemm(const Context&, const GemmArgs&, void* workspace) const override;
  void gemm_int4(const Context&, const GemmArgs&, std::int8_t* a, std::int8_t* b,
                 void* workspace) const override;
  // weight_int4.cpp
  void quantize_weight_int4(const Context&, const Int4WeightJob&) const override;
  void expand_weight_int4(const Context&, const Int4Weight&, const Codes& out) const override;
  void dequantize_weight(const Context&, const DequantizeWeightJob&) const override;
  // run.cpp
  std::size_t workspace(const Context&, Work&) const override;
  void run(const Context&, Work&, const Checker&, const Workspace&) const override;
};

// Stages of compress_activation. quantize.cpp
void token_exponents(const Context&, const Operand&);
void compress_groups(const Context&, const Operand&);

// Elements per task: few enough to balance the threads, enough to outweigh the cost of a task.
std::int64_t task_elements(const Context&, std::int64_t total);

// Items (rows, blocks) of `size` elements each, divided into tasks.
class ItemTasks {
 public:
  ItemTasks(const Context& context, std::int64_t items, std::int64_t size)
      : items_(items),
        per_task_(std::max<std::int64_t>(
            1, task_elements(context, items * size) / std::max<std::int64_t>(1, size))) {}
  std::int64_t count() const { return ceil_div(items_, per_task_); }
  // Calls visit(item) for the items of a task.
  template <class Visit>
  void each(std::int64_t task, const Visit& visit) const {
    const std::int64_t end = std::min(items_, (task + 1) * per_task_);
    for (std::int64_t item = task * per_task_; item < end; ++item) visit(item);
  }

 private:
  std::int64_t items_, per_task_;
};
// Calls visit(item) for all items, on the threads of the context.
template <class Visit>
void for_each_item(const Context& context, std::int64_t items, std::int64_t size,
                   const Visit& visit) {
  const ItemTasks tasks(context, items, size);
  context.pool()->run(tasks.count(), [&](std::int64_t task) { tasks.each(task, visit); });
}

// The following stages consist of parts. A part adds its tasks to a phase of the backward pass and
// may read only results of earlier phases. A single scale is the first element of `scale`.

// Quantises rows of g_y, x or w. quantize.cpp
class QuantizeRows {
 public:
  QuantizeRows(const Context&, const Operand&);
  // Makes `codes` also find the largest values of x's columns (bit patterns), which saves a read of
  // x. Requires at most most_found columns and a scale per row.
  void find_columns(std::uint32_t* amax) { columns_ = amax; }
  static constexpr std::int64_t most_found = 4096;

  bool one_scale() const { return job_.quant.per_tensor; }  // the codes need `largest` first
  void add_largest(Phase& phase) const { phase.add<&QuantizeRows::largest>(tasks_.count(), *this); }
  void add_codes(Phase& phase) const { phase.add<&QuantizeRows::codes>(tasks_.count(), *this); }
  void finish() const;

 private:
  void largest(std::int64_t task) const;
  void codes(std::int64_t task) const;

  const SimdKernels& simd_;
  const Operand& job_;
  Rounder rounder_;
  ItemTasks tasks_;
  std::uint32_t* columns_ = nullptr;
};

// Requantises x from packed codes to INT8. quantize.cpp
class RequantizeGroups {
 public:
  RequantizeGroups(const Context&, const Operand&);
  void add_codes(Phase& phase) const { phase.add<&RequantizeGroups::codes>(tasks_.count(), *this); }

 private:
  void codes(std::int64_t task) const;

  const SimdKernels& simd_;
  const Operand& job_;
  Rounder rounder_;
  ItemTasks tasks_;
};

// Rows of a strip that QuantizeColumns keeps on the stack (384 KB) between largest values and
// rounding, if there are enough strips for all threads.
inline constexpr std::int64_t most_kept_rows = 1536;
inline bool keeps_strips(const Context& context, std::int64_t strips, std::int64_t rows) {
  return rows <= most_kept_rows && strips >= std::int64_t{4} * context.threads();
}

// Tasks of a pass over P x: strips of columns times ranges of blocks, enough for all threads.
// Strips stay whole if the stage can keep their rows. lowrank.cpp
class StripTasks {
 public:
  struct Task {
    std::int64_t col, begin, end;  // first column, range of blocks
  };
  StripTasks(const Context&, const MatrixIn& x, const Projection&, bool may_be_whole = false);
  bool whole() const { return whole_; }
  std::int64_t count() const { return strips_ * ranges_; }
  Task operator[](std::int64_t task) const;

 private:
  std::int64_t strips_, ranges_ = 0, range_blocks_ = 0, blocks_;
  bool whole_ = false;
};

// Quantises P x, transposed. Until `finish`, `scale` holds bit patterns of the largest values.
// lowrank.cpp
class QuantizeColumns {
 public:
  QuantizeColumns(const Context&, const Operand&);
  std::uint32_t* amax() const { return reinterpret_cast<std::uint32_t*>(job_.out.scale); }
  void add_largest(Phase&) const;                         // also writes the codes of whole strips
  void add_codes(Phase&, bool amax_known = false) const;  // amax_known: amax() is filled
  void add_finish(Phase& phase) const { phase.add<&QuantizeColumns::finish>(1, *this); }

 private:
  class Writer;
  void largest(std::int64_t task) const;
  void codes(std::int64_t task) const;
  void whole(std::int64_t task) const;
  void finish(std::int64_t) const;

  const SimdKernels& simd_;
  const Operand& job_;
  RandomKey random_;  // key of the sketch
  Rounder rounder_;
  StripTasks tasks_;
  std::int64_t scales_;
};

// Computes g_b. lowrank.cpp
class SumColumns {
 public:
  SumColumns(const Context& context, const ColumnSum& sum)
      : simd_(simd_kernels(context.isa())), x_(sum.x), out_(sum.out), accumulate_(sum.accumulate) {}
  void add_sums(Phase& phase) const {
    phase.add<&SumColumns::sum>(ceil_div(x_.cols, strip_columns), *this);
  }

 private:
  void sum(std::int64_t strip) const;

  const SimdKernels& simd_;
  MatrixIn x_;
  MatrixOut out_;
  bool accumulate_;
};

// Integer product: panels of b, initial sums of a's rows, tiles. gemm.cpp
class Product {
 public:
  Product(const Context&, const GemmArgs&, void* workspace);
  void add_panels(Phase& phase) const { phase.add<&Product::pack>(panels_ * chunks_, *this); }
  void add_bias(Phase&) const;
  void add_tiles(Phase& phase) const { phase.add<&Product::multiply>(row_tasks_ * slices_, *this); }

 private:
  struct Range {
    std::int64_t begin, end;
  };
  void pack(std::int64_t task) const;
  void find_bias(std::int64_t task) const;
  void multiply(std::int64_t task) const;
  void tiles(Range rows, Range panels) const;
  char* panel_at(std::int64_t panel, std::int64_t chunk) const;
  std::int64_t chunk_length(std::int64_t chunk) const;

  const SimdKernels& simd_;
  GemmArgs args_;
  std::int64_t chunks_ = 0, panels_ = 0, row_tasks_ = 0, slices_ = 0;
  std::size_t panel_bytes_ = 0;
  char* packed_ = nullptr;
  std::int32_t* bias_ = nullptr;
};

// Stages that run on their own.
void gemm_token(const Context&, const GemmArgs&, void* workspace);  // gemm.cpp
void fill_zero(const Context&, const MatrixOut& out);               // backend.cpp
// Packs codes as nibbles, low nibble first. An odd count leaves the last high nibble 0. pack.cpp
void pack_row(const std::int8_t* codes, std::int64_t count, std::uint8_t* out);

// Load and store elements [col, col + count) of a row as fp32, any stride.
void load_row(const SimdKernels&, const MatrixIn&, std::int64_t row, std::int64_t col,
              std::int64_t count, float* dst);
void store_row(const SimdKernels&, const float* src, std::int64_t row, std::int64_t col,
               std::int64_t count, const MatrixOut&);
// Columns [col, col + count) of a matrix, loaded row by row.
class ColumnStrip {
 public:
  ColumnStrip(const SimdKernels&, const MatrixIn&, std::int64_t col, std::int64_t count);
  std::int64_t count() const { return count_; }
  // Loads a row into dst, which has strip_columns floats. Floats beyond the count are not loaded,
  // but multiplied by the row's factor.
  void load(std::int64_t row, float* dst) const {
    if (!plain_) return load_row(simd_, x_, row, col_, count_, dst);
    simd_.load(at(row), x_.dtype, count_, dst);
    if (x_.exponents != nullptr) resize(row, dst);
  }
  // Prefetches a row if its elements are contiguous: hardware does not predict strips of rows.
  void prefetch(std::int64_t row) const {
    const char* const from = at(row);
    for (std::int64_t i = 0; i < bytes_together_; i += 64) __builtin_prefetch(from + i);
  }

 private:
  // Address of an existing row. (A single row may have any stride, an empty array a null pointer.)
  const char* at(std::int64_t row) const {
    return static_cast<const char*>(x_.data) + (row * x_.row_stride + col_ * x_.col_stride) * size_;
  }

  void resize(std::int64_t row, float* dst) const;

  const SimdKernels& simd_;
  const MatrixIn& x_;
  std::int64_t col_, count_, size_, bytes_together_;
  bool plain_;
};
// Load and store a strided run of elements.
void load_run(const SimdKernels&, const void* data, DType, std::int64_t first, std::int64_t stride,
              std::int64_t count, float* dst);
void store_run(const SimdKernels&, const float* src, std::int64_t count, void* data, DType,
               std::int64_t first, std::int64_t stride);

// Replaces bit patterns of largest values by the scales of `bits`-bit codes. quantize.cpp
void patterns_to_scales(float* scale, std::int64_t count, int bits);

// Atomic *pattern = max(*pattern, value).
void atomic_max(std::uint32_t* pattern, std::uint32_t value);

}  // namespace hot::detail

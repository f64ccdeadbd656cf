// The CPU backend, the executable definition of docs/numerics.md. One file for each stage; the
// inner loops are in simd_*.cpp.
#pragma once

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
  void backward(const Context&, const BackwardCall&, void* workspace) const override;
  // forward_linear.cpp
  void quantize_forward_weight(const Context&, const RowsJob&) const override;
  void quantize_forward_input(const Context&, const RowsJob&, const CompressJob* kept,
                              void* workspace) const override;
  std::size_t forward_workspace(const Context&, const ForwardWork&) const override;
  void forward(const Context&, const ForwardCall&, void* workspace) const override;
};

// The stages of compress_activation; `x` is equalised where that is wanted.
void token_exponents(const Context&, const MatrixIn& x, std::uint8_t* exponents);  // quantize.cpp
void compress_groups(const Context&, const MatrixIn& x, const CompressJob&);       // quantize.cpp
void compress_rotated(const Context&, const MatrixIn& x, const CompressJob&);      // lowrank.cpp

// The stages of a backward pass. The single scale of a whole operand is its scales' first element.
void quantize_rows(const Context&, const RowsJob&);        // quantize.cpp
void requantize_groups(const Context&, const GroupsJob&);  // quantize.cpp
// What is added to the codes' values of so many blocks of rht4 or rht2. quantize.cpp
void dither_offsets(const Context&, const Key&, std::int64_t blocks, float* offsets);
void quantize_columns(const Context&, const ColumnsJob&);  // lowrank.cpp
void column_sum(const Context&, const MatrixIn& x, const MatrixOut& out,
                bool accumulate);                                        // lowrank.cpp
void gemm_token(const Context&, const GemmTokenArgs&, void* workspace);  // gemm.cpp
void fill_zero(const Context&, const MatrixOut& out);                    // backend.cpp

// Load and store elements [col, col + count) of a row as fp32, with any stride.
void load_row(const SimdKernels&, const MatrixIn&, std::int64_t row, std::int64_t col,
              std::int64_t count, float* dst);
void store_row(const SimdKernels&, const float* src, std::int64_t row, std::int64_t col,
               std::int64_t count, const MatrixOut&);
// Asks the caches for elements [col, col + count) of a row, where they lie together: strips of rows
// are not foreseen.
void prefetch_row(const MatrixIn&, std::int64_t row, std::int64_t col, std::int64_t count);
// Loads and stores of any strided run of elements.
void load_run(const SimdKernels&, const void* data, DType, std::int64_t first, std::int64_t stride,
              std::int64_t count, float* dst);
void store_run(const SimdKernels&, const float* src, std::int64_t count, void* data, DType,
               std::int64_t first, std::int64_t stride);

// *pattern = max(*pattern, value), atomically.
void atomic_max(std::uint32_t* pattern, std::uint32_t value);

// Elements of a task, of `total`: few enough to balance the threads, enough to pay for the
// hand-over.
std::int64_t task_elements(const Context&, std::int64_t total);

}  // namespace hot::detail

// The CUDA backend. One .cu file for each stage, as in cpp/src/cpu.
#pragma once

#include "cuda/quantize_small.h"
#include "kernels.h"

namespace hot::detail {

class CudaBackend final : public Backend {
 public:
  // hadamard.cu
  void fwht(const Context&, const FwhtArgs&) const override;
  // lowrank.cu
  void hla(const Context&, const MatrixIn& x, const Projection&, Side, const Key& sketch_key,
           const MatrixOut& out) const override;
  bool quantize_columns(const Context&, const MatrixIn& x, const Projection&, Side,
                        const Key& sketch_key, const OperandQuant&, const Operand& out,
                        const ColumnSum* sum) const override;
  std::size_t column_sum_workspace(const Context&, std::int64_t rows,
                                   std::int64_t cols) const override;
  void column_sum(const Context&, const MatrixIn& x, const ColumnSum&) const override;
  void fill_zero(const Context&, const MatrixOut& out) const override;
  std::int64_t columns_amax_words(const Context&, std::int64_t cols, const Projection&,
                                  const OperandQuant&) const override;
  // quantize.cu
  std::int64_t rows_amax_words(const Context&, const OperandQuant& quant) const override {
    return quant.per_tensor ? small_slots : 0;
  }
  // quantize_gradient.cu
  bool quantize_gradient(const Context&, const RowsJob&, const ColumnsJob&) const override;
  // quantize_small.cu, or one after the other
  bool quantize_operands(const Context&, const BackwardOperands&) const override;
  void zero(const Context&, void* data, std::size_t bytes) const override;
  bool spreads_scales() const override { return true; }
  void quantize(const Context&, const MatrixIn& x, const QuantSpec&, const MatrixOut& q,
                float* scale) const override;
  void dequantize(const Context&, const MatrixIn& q, const float* scale, Granularity,
                  const MatrixOut& out) const override;
  void quantize_rows(const Context&, const MatrixIn& x, int hadamard_block, const OperandQuant&,
                     const Operand& out) const override;
  void quantize_groups(const Context&, const MatrixIn& x, Rounding, std::uint8_t* packed,
                       std::int64_t row_bytes, std::uint16_t* scale) const override;
  void requantize_groups(const Context&, const std::uint8_t* packed, std::int64_t row_bytes,
                         const std::uint16_t* scale, std::int64_t tokens, Rounding,
                         bool independent, const Operand& out) const override;
  // pack.cu
  void pack_int4(const Context&, const MatrixIn& q, const MatrixOut& out) const override;
  void unpack_int4(const Context&, const MatrixIn& packed, const MatrixOut& out) const override;
  // gemm_int4_sm80.cu
  bool gemm_int4(const Context&, const GemmArgs&) const override;
  // gemm.cu
  std::size_t gemm_workspace(const Context&, std::int64_t m, std::int64_t n,
                             std::int64_t k) const override;
  void gemm(const Context&, const GemmArgs&, void* workspace) const override;
  void gemms(const Context&, const GemmArgs* products, void* const* workspaces,
             int count) const override;
  void gemm_token(const Context&, const GemmTokenArgs&, void* workspace) const override;
};

// Adds up `runs` partial sums of every column in sum.workspace (lowrank.cu). `independent` as in
// OperandQuant: the kernel before is not the one that left them.
void finish_sums(const Context&, std::int64_t runs, const ColumnSum& sum, bool independent);

// The most partial sums that CudaBackend::quantize_gradient leaves for that.
std::int64_t gradient_sums(const Context&, std::int64_t rows);

// scale[i] from the bit pattern amax[i * step] of the largest value; amax may be scale
// (quantize.cu).
void finish_scales(const Context&, const std::uint32_t* amax, int step, float* scale,
                   std::int64_t count, int bits);

}  // namespace hot::detail

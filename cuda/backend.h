// The CUDA backend. backend.cpp makes and executes the plans (plan.h) of its calls.
#pragma once

#include "kernels.h"
#include "plan/plan.h"

namespace hot::detail {

class CudaBackend final : public Backend {
 public:
  // hadamard.cu
  void fwht(const Context&, const FwhtArgs&) const override;
  // lowrank.cu
  void hla(const Context&, const MatrixIn& x, const Projection&, const Key& sketch_key,
           const MatrixOut& out) const override;
  // quantize.cu
  void quantize(const Context&, const MatrixIn& x, const QuantSpec&, const MatrixOut& q,
                float* scale) const override;
  void dequantize(const Context&, const MatrixIn& q, const float* scale, Granularity,
                  const MatrixOut& out) const override;
  // decompress.cu
  void decompress(const Context&, const DecompressJob&) const override;
  // pack.cu
  void pack_int4(const Context&, const MatrixIn& q, const MatrixOut& out) const override;
  void unpack_int4(const Context&, const MatrixIn& packed, const MatrixOut& out) const override;
  // blocks.cu
  void encode_blocks(const Context&, const EncodeBlocksJob&) const override;
  void sum_blocks(const Context&, const SumBlocksJob&) const override;
  // weight_int4.cu
  void quantize_weight_int4(const Context&, const Int4WeightJob&) const override;
  void expand_weight_int4(const Context&, const Int4Weight&, const Codes& out) const override;
  void dequantize_weight(const Context&, const DequantizeWeightJob&) const override;
  // backend.cpp
  std::size_t gemm_workspace(const Context&, std::int64_t m, std::int64_t n,
                             std::int64_t k) const override;
  void gemm(const Context&, const GemmArgs&, void* workspace) const override;
  void gemm_int4(const Context&, const GemmArgs&, std::int8_t* a, std::int8_t* b,
                 void* workspace) const override;
  std::size_t workspace(const Context&, Work&) const override;
  void run(const Context&, Work&, const Checker&, const Workspace&) const override;
};

// Facts about a context's device for plans. It answers queries while it lives.
class CudaDevice final : public plan::DeviceQueries {
 public:
  explicit CudaDevice(const Context&);
  const plan::DeviceFacts& facts() const { return facts_; }
  std::size_t stream_k_workspace(std::int64_t m, std::int64_t n, std::int64_t k,
                                 const Sm90Plan&) const override;

  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

 private:
  const Context& context_;
  plan::DeviceFacts facts_;
};

}  // namespace hot::detail

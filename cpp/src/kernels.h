// Interface of a backend. Its arguments are already checked and resolved. Only `run` checks
// something: the size of its workspace, before it writes anything.
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
#include "operands.h"
#include "weight_int4.h"

namespace hot::detail {

// Throws for an invalid stream or counter of a key (context.cpp).
void check_key(const char* call, const char* name, const Key& key);

// Both throw for an invalid spec. make_projection also throws if the spec does not fit the tokens.
void check_low_rank(const LowRank& spec);
Projection make_projection(std::int64_t tokens, const LowRank& spec, Side side);

// Quantises w [O, I] to INT4 after a transform along I.
struct Int4WeightJob {
  MatrixIn w;
  int hadamard_block;
  ColumnPowers powers;
  Int4Weight out;
};

// Makes floats of the INT8 codes of a weight [O, I].
struct DequantizeWeightJob {
  Codes w;
  int hadamard_block;
  ColumnPowers powers;
  MatrixOut out;  // not empty
};

// Decodes tokens [first, first + out.rows) of a saved x with basis full.
struct DecompressJob {
  const void* codes;  // [channels, row_bytes], INT8 or packed
  std::int64_t row_bytes;
  const void* scale;  // packed: bf16, one per group and channel; INT8: f32
  Storage storage;
  std::int64_t scale_step;  // distance between the scales of neighbouring channels; 0: one scale
  std::int64_t first;
  MatrixOut out;                            // [tokens, channels], not empty
  const std::uint8_t* exponents = nullptr;  // exponents of all tokens if equalised
};

// Vector in parts of equal size, each of whole blocks (encode_blocks). The last part may have fewer
// values, or none.
struct BlockParts {
  static constexpr int block = 64;
  std::int64_t values;               // of the vector
  std::int64_t count, size, blocks;  // parts; values and blocks of a part
  // Bytes of a part: codes, then a scale per block.
  constexpr std::int64_t bytes() const { return blocks * (block + 4); }
};
struct EncodeBlocksJob {
  const void* x;
  DType dtype;
  BlockParts parts;  // not empty
  Rounding rounding;
  std::int8_t* wire;  // aligned to 4 bytes
};
struct SumBlocksJob {
  const std::int8_t* wire;  // [ranks, parts, bytes], aligned to 4 bytes
  std::int64_t ranks;
  BlockParts parts;  // not empty
  float factor;
  void* out;
  DType dtype;
};

struct FwhtArgs {
  const void* x;
  DType x_dtype;
  void* out;
  DType out_dtype;
  std::int64_t axis_length, axis_stride_x, axis_stride_out;
  int block;
  // Up to three axes that are not transformed.
  int outer_dims;
  std::int64_t outer_shape[3], outer_stride_x[3], outer_stride_out[3];
};

// Arguments of a product. With gw_scale `token` (docs/numerics.md), `a_scale` holds one scale per k
// and the product adds in fp32, k ascending.
struct GemmArgs {
  const std::int8_t *a, *b;  // K contiguous
  std::int64_t m, n, k, lda, ldb;
  const float *a_scale, *b_scale;           // null: unscaled int32 sums
  std::int64_t a_scale_step, b_scale_step;  // 0: one scale for all
  float inv_divisor;
  bool accumulate;
  MatrixOut out;
  const float* bias = nullptr;  // [n], added to the scaled sums; null if `accumulate` is set
};

class Checker;  // checks.h
struct Work;    // work.h

class Backend {
 public:
  virtual ~Backend() = default;

  virtual void fwht(const Context&, const FwhtArgs&) const = 0;
  virtual void hla(const Context&, const MatrixIn& x, const Projection&, const Key& sketch_key,
                   const MatrixOut& out) const = 0;
  virtual void quantize(const Context&, const MatrixIn& x, const QuantSpec&, const MatrixOut& q,
                        float* scale) const = 0;
  virtual void dequantize(const Context&, const MatrixIn& q, const float* scale, Granularity,
                          const MatrixOut& out) const = 0;
  virtual void pack_int4(const Context&, const MatrixIn& q, const MatrixOut& out) const = 0;
  virtual void unpack_int4(const Context&, const MatrixIn& packed, const MatrixOut& out) const = 0;

  virtual std::size_t gemm_workspace(const Context&, std::int64_t m, std::int64_t n,
                                     std::int64_t k) const = 0;
  virtual void gemm(const Context&, const GemmArgs&, void* workspace) const = 0;
  // Product of packed INT4: lda and ldb count bytes, k counts values. `a` and `b` are scratch for
  // the operands unpacked to INT8 [m, k] and [n, k]. A backend may leave them unused.
  virtual void gemm_int4(const Context&, const GemmArgs&, std::int8_t* a, std::int8_t* b,
                         void* workspace) const = 0;

  virtual void encode_blocks(const Context&, const EncodeBlocksJob&) const = 0;
  virtual void sum_blocks(const Context&, const SumBlocksJob&) const = 0;

  virtual void decompress(const Context&, const DecompressJob&) const = 0;
  virtual void quantize_weight_int4(const Context&, const Int4WeightJob&) const = 0;
  virtual void expand_weight_int4(const Context&, const Int4Weight&, const Codes& out) const = 0;
  virtual void dequantize_weight(const Context&, const DequantizeWeightJob&) const = 0;

  // Bytes of a call's workspace.
  virtual std::size_t workspace(const Context&, Work&) const = 0;
  // Quantises the operands of a call, then computes its products and sums.
  virtual void run(const Context&, Work&, const Checker&, const Workspace&) const = 0;
};

const Backend& backend_of(const Context&);  // dispatch.cpp

const Backend& cpu_backend();
// Defined in cuda/backend.cpp, or in cpu/no_cuda.cpp for a build without CUDA. There cuda_backend
// throws, the architectures are "" and the device count is 0.
const Backend& cuda_backend();
const char* cuda_archs() noexcept;
int cuda_device_count() noexcept;

}  // namespace hot::detail

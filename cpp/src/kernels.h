// Interface of a backend. Its arguments are already checked and resolved. Only backward and forward
// check something: the size of their workspace, before they write anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

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
Projection make_projection(std::int64_t tokens, const LowRank& spec);

// Column sums of a matrix (g_b).
struct ColumnSum {
  MatrixOut out;  // a single row
  bool accumulate;
  void* workspace;  // column_sum_workspace bytes
};

// Transforms x [L, O] along O and quantises its rows: [L, Kp], Kp = O rounded up to blocks and 16.
struct RowsJob {
  MatrixIn x;
  int hadamard_block;
  OperandQuant quant;
  Operand out;
  ColumnPowers powers{};  // applied before the transform
};
// Quantises w [O, I] to INT4 after a transform along I.
struct Int4WeightJob {
  MatrixIn w;
  int hadamard_block;
  ColumnPowers powers;
  Int4Weight out;
};
// Computes P x for x [L, C], transposed and quantised: [C, Kp].
struct ColumnsJob {
  MatrixIn x;
  const Projection* projection;
  Side side;
  Key sketch_key;
  OperandQuant quant;
  Operand out;
};
// Requantises x from packed codes (groups of 64 tokens per channel) to INT8, one scale per channel.
struct GroupsJob {
  const std::uint8_t* packed;
  std::int64_t row_bytes;
  const std::uint16_t* scale;
  std::int64_t tokens;
  Operand out;
};

// Compresses x [L, C] with the context's key: into `out` (int8) or `packed` and `scale` (int4).
struct CompressJob {
  MatrixIn x;
  // Output for the token exponents if tokens are equalised, else null. They are computed first.
  std::uint8_t* exponents;
  const BackwardLinearSpec& spec;
  const Projection* projection;
  Operand out;
  std::uint8_t* packed;
  std::int64_t row_bytes;
  std::uint16_t* scale;
  // x divided by its token exponents, if tokens are equalised.
  MatrixIn equalized() const {
    MatrixIn divided = x;
    divided.exponents = exponents;
    divided.divide = exponents != nullptr;
    return divided;
  }
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

class Checker;        // checks.h
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
  // Product of packed INT4: lda and ldb count bytes, k counts values. `a` and `b` are scratch for
  // the operands unpacked to INT8 [m, k] and [n, k]. A backend may leave them unused.
  virtual void gemm_int4(const Context&, const GemmArgs&, std::int8_t* a, std::int8_t* b,
                         void* workspace) const = 0;

  // Bytes of scratch for compress (storage int8) and for quantize_weight.
  virtual std::size_t columns_workspace(const Context&, std::int64_t cols, const Projection&,
                                        const OperandQuant&) const = 0;
  virtual void compress(const Context&, const CompressJob&, void* workspace) const = 0;
  virtual void decompress(const Context&, const DecompressJob&) const = 0;
  virtual void quantize_weight(const Context&, const ColumnsJob&, void* workspace) const = 0;

  virtual std::size_t backward_workspace(const Context&, const BackwardWork&) const = 0;
  virtual void backward(const Context&, const BackwardCall&, const Checker&,
                        const Workspace&) const = 0;

  // Quantise w and x for the forward product, rounding to nearest with a scale per row. If `saved`
  // is not null, x is also compressed, with the workspace of compress.
  virtual void quantize_forward_weight(const Context&, const RowsJob&) const = 0;
  virtual void quantize_forward_input(const Context&, const RowsJob&, const CompressJob* saved,
                                      void* workspace) const = 0;
  virtual void quantize_weight_int4(const Context&, const Int4WeightJob&) const = 0;
  virtual void expand_weight_int4(const Context&, const Int4Weight&, const Operand& out) const = 0;
  virtual std::size_t forward_workspace(const Context&, const ForwardWork&) const = 0;
  virtual void forward(const Context&, const ForwardCall&, const Checker&,
                       const Workspace&) const = 0;
};

const Backend& backend_of(const Context&);  // dispatch.cpp

const Backend& cpu_backend();
// Defined in cuda/backend.cpp, or in cpu/no_cuda.cpp for a build without CUDA. There cuda_backend
// throws, the architectures are "" and the device count is 0.
const Backend& cuda_backend();
const char* cuda_archs() noexcept;
int cuda_device_count() noexcept;

}  // namespace hot::detail

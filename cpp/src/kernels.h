// The interface of a backend. Arguments are checked and resolved before; backward and forward alone
// check their workspace's size, as they carve it and before anything is written.
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

namespace hot::detail {

// Throws for a stream or a counter that no Key may have (context.cpp).
void check_key(const char* call, const char* name, const Key& key);

// Both throw for a bad spec, make_projection also for one that does not fit the tokens.
void check_low_rank(const LowRank& spec);
Projection make_projection(std::int64_t tokens, const LowRank& spec);

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
  Operand out;
};

// x [L, C] as it is kept for backward, by the key of the context: with storage int8 as `out`, with
// int4 as packed codes and bf16 scales.
struct CompressJob {
  MatrixIn x;
  // Where its tokens are equalised: their sizes, to be found first. x is then divided by them.
  std::uint8_t* exponents;
  const BackwardLinearSpec& spec;
  const Projection* projection;  // P
  Operand out;
  std::uint8_t* packed;
  std::int64_t row_bytes;
  std::uint16_t* scale;
  // The view of x that is compressed.
  MatrixIn equalized() const {
    MatrixIn made = x;
    made.exponents = exponents;
    made.divide = exponents != nullptr;
    return made;
  }
};

// Decodes tokens [first, first + out.rows) of a saved x of basis full.
struct DecompressJob {
  const void* codes;  // [channels, row_bytes], INT8 or packed
  std::int64_t row_bytes;
  const void* scale;  // packed: bf16, `groups` for a channel; INT8: f32
  Storage storage;
  std::int64_t scale_step;  // scales from a channel to the next; 0: one for all
  std::int64_t first;
  MatrixOut out;                            // [tokens, channels], not empty
  const std::uint8_t* exponents = nullptr;  // of all tokens, where they were equalised
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

// A product by token (docs/numerics.md, "token") has a scale for each k in `a_scale` and adds in
// fp32, k ascending.
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
  // The same on packed INT4: lda and ldb count bytes, k counts values. `a` and `b` have room for
  // the operands as INT8 [m, k] and [n, k], if the backend unpacks them.
  virtual void gemm_int4(const Context&, const GemmArgs&, std::int8_t* a, std::int8_t* b,
                         void* workspace) const = 0;

  // Scratch of compress (storage int8) and of quantize_weight.
  virtual std::size_t columns_workspace(const Context&, std::int64_t cols, const Projection&,
                                        const OperandQuant&) const = 0;
  virtual void compress(const Context&, const CompressJob&, void* workspace) const = 0;
  virtual void decompress(const Context&, const DecompressJob&) const = 0;
  virtual void quantize_weight(const Context&, const ColumnsJob&, void* workspace) const = 0;

  virtual std::size_t backward_workspace(const Context&, const BackwardWork&) const = 0;
  virtual void backward(const Context&, const BackwardCall&, const Checker&,
                        const Workspace&) const = 0;

  // Rows with a scale each, nothing random: w for the forward product; x for it, and, where `kept`
  // is given, the same x as it is kept (scratch: that of compress).
  virtual void quantize_forward_weight(const Context&, const RowsJob&) const = 0;
  virtual void quantize_forward_input(const Context&, const RowsJob&, const CompressJob* kept,
                                      void* workspace) const = 0;
  virtual std::size_t forward_workspace(const Context&, const ForwardWork&) const = 0;
  virtual void forward(const Context&, const ForwardCall&, const Checker&,
                       const Workspace&) const = 0;
};

const Backend& backend_of(const Context&);  // dispatch.cpp

const Backend& cpu_backend();
// Defined in cuda/backend.cpp, or in cpu/no_cuda.cpp for a build without CUDA: there the backend
// throws, the architectures are "" and the device count is 0.
const Backend& cuda_backend();
const char* cuda_archs() noexcept;
int cuda_device_count() noexcept;

}  // namespace hot::detail

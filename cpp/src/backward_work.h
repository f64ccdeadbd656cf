// A backward pass with checked and resolved arguments (backward_linear.cpp), input of the backends.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "checks.h"
#include "hot/backward_linear.h"
#include "kernels.h"

namespace hot::detail {

// Description of a backward pass: everything that its kernels and scratch depend on.
struct BackwardWork {
  const BackwardLinearSpec& spec;
  LinearShape shape;
  const Projection& tokens;        // transform of g_y and x along the tokens, for g_w
  const Projection& out_features;  // transform of g_y and w along O, for g_x
  bool gx = false, gw = false;     // products to compute
  bool weight = false;             // w must be quantised for g_x
  bool gb = false, accumulate = false;
  bool clear_gx = false, clear_gw = false;  // the contraction is empty: write zeros
};

// A backward pass and its memory.
struct BackwardCall {
  BackwardWork work;
  MatrixIn gy{}, w{};
  Operand quantized{};  // w, if the caller quantised it
  Operand saved{};      // x with storage int8
  GroupsJob groups{};   // x with storage int4; the backend sets `out`
  Key sketch_key{};     // key of the projection of x
  MatrixOut gx{}, gw{}, gb{};
  const std::uint8_t* exponents = nullptr;  // token exponents of an equalised x
};

// Quantisation of each operand. Weights are rounded to nearest: all tokens share them, so rounding
// noise would not average out.
inline OperandQuant gradient_rows_quant(const BackwardLinearSpec& spec) {
  return {spec.gx_bits, spec.gx_scale == Granularity::tensor, false, spec.gx_rounding,
          Purpose::gradient_rows};
}
inline OperandQuant weight_quant(const BackwardLinearSpec& spec) {
  return {spec.gx_bits, spec.gx_scale == Granularity::tensor, false, Rounding::nearest,
          Purpose::weight};
}
inline OperandQuant gradient_columns_quant(const BackwardLinearSpec& spec) {
  return {8, spec.gw_scale == Granularity::tensor, spec.gw_scale == Granularity::token,
          spec.gw_rounding, Purpose::gradient_columns};
}
inline OperandQuant activation_quant(const BackwardLinearSpec& spec) {
  return {8, spec.gw_scale != Granularity::channel, false, Rounding::stochastic,
          Purpose::activation};
}

// Transform of w [O, I] along O: a projection that keeps all rows of its blocks.
inline Projection hadamard_projection(std::int64_t out_features, int block) {
  Projection p;
  p.tokens = p.body_tokens = out_features;
  p.block = p.rank = p.divisor = block;
  p.basis = block == 1 ? Basis::full : Basis::sequency;
  p.blocks = ceil_div(out_features, block);
  p.k = p.blocks * block;
  p.k_padded = round_up(p.k, k_alignment);
  return p;
}

inline Projection out_feature_projection(std::int64_t out_features,
                                         const BackwardLinearSpec& spec) {
  return hadamard_projection(out_features, spec.hadamard_block);
}

// Scratch for largest values, zeroed before kernels update it (CUDA).
struct Zeroed {
  std::uint32_t* words = nullptr;
  std::size_t bytes = 0;
};
inline Zeroed take_zeroed(WorkspaceCursor& cursor, std::int64_t words) {
  auto* const at = cursor.take<std::uint32_t>(words);
  return {at, static_cast<std::size_t>(words) * sizeof *at};
}
// Numbers of words for Operand::amax.
struct AmaxWords {
  std::int64_t rows = 0, weight = 0, columns = 0;
  std::int64_t all() const { return rows + weight + columns; }
};

// Scratch of the CUDA backend that the CPU backend does not need.
struct DeviceScratch {
  AmaxWords amax{};
  std::int64_t sums = 0, sums_alone = 0;  // floats for g_b: with other gradients, and alone
};

// Arrays of a backward pass in its workspace; null if the call does not use them.
struct BackwardScratch {
  Operand rows{}, weight{};         // for g_x
  Operand columns{}, activation{};  // for g_w; activation: x decoded from storage int4
  char *gx_gemm = nullptr, *gw_gemm = nullptr;
  // CUDA only
  char *sums = nullptr, *sums_alone = nullptr;
  Zeroed zeroed{};        // every Operand::amax
  std::size_t bytes = 0;  // size of the workspace
};

// Carves the workspace; a null workspace only counts bytes. `device` is null on the CPU.
// gemm_bytes(m, n, k) returns the scratch of the backend's product.
template <class GemmBytes>
BackwardScratch take_backward_scratch(void* workspace, const BackwardWork& work,
                                      const DeviceScratch* device, const GemmBytes& gemm_bytes) {
  const BackwardLinearSpec& spec = work.spec;
  const auto [L, O, I] = work.shape;
  const std::int64_t kx = work.out_features.k_padded, kw = work.tokens.k_padded;
  WorkspaceCursor cursor(workspace), alone(workspace);
  const auto take_gemm = [&](std::int64_t m, std::int64_t n, std::int64_t k) {
    return cursor.take<char>(static_cast<std::int64_t>(gemm_bytes(m, n, k)));
  };
  // Number of stored scales. CUDA kernels store a single scale once per row.
  const auto places = [&](bool one, std::int64_t many) {
    return device == nullptr && one ? 1 : many;
  };
  BackwardScratch s;
  if (device != nullptr) {
    s.zeroed = take_zeroed(cursor, device->amax.all());
    s.sums = cursor.take<char>(device->sums * static_cast<std::int64_t>(sizeof(float)));
    s.sums_alone = alone.take<char>(device->sums_alone * static_cast<std::int64_t>(sizeof(float)));
  }
  if (work.gx) {
    s.rows = take_operand(cursor, L, kx, places(gradient_rows_quant(spec).per_tensor, L));
    if (work.weight) {
      s.weight = take_operand(cursor, I, kx, places(weight_quant(spec).per_tensor, I));
    }
    s.gx_gemm = take_gemm(L, I, kx);
  }
  if (work.gw) {
    const OperandQuant quant = gradient_columns_quant(spec);
    s.columns =
        take_operand(cursor, O, kw, quant.per_contraction ? kw : places(quant.per_tensor, O));
    if (spec.storage != Storage::int8) s.activation = take_operand(cursor, I, kw, I);
    s.gw_gemm = take_gemm(O, I, kw);
  }
  if (s.zeroed.words != nullptr) {
    s.rows.amax = s.zeroed.words;
    s.weight.amax = s.rows.amax + device->amax.rows;
    s.columns.amax = s.weight.amax + device->amax.weight;
  }
  s.bytes = std::max(cursor.bytes(), alone.bytes());
  return s;
}

// Transform of g_y and x along the tokens, for g_w.
inline Projection token_projection(std::int64_t tokens, const BackwardLinearSpec& spec) {
  Projection p = make_projection(tokens, spec.low_rank);
  p.equalized = spec.equalize_tokens;
  return p;
}

// Checked arguments of a call that saves x (backward_linear.cpp). The constructor writes nothing.
// An object cannot move, because its job points at its projection.
struct CompressCall {
  // `rows` is x as a checked matrix. Error messages name the arguments x and saved.
  CompressCall(const Checker&, const char* call, const Context&, const ConstTensorView& x,
               const MatrixIn& rows, const BackwardLinearSpec&, const SavedActivation& saved,
               const Workspace&);
  CompressCall(const CompressCall&) = delete;
  CompressCall& operator=(const CompressCall&) = delete;

  Projection projection;
  ConstSavedActivation kept{};
  std::optional<CompressJob> job{};  // empty if x has no elements
};

// Column quantisation of x for storage int8.
inline ColumnsJob activation_columns(const Context& context, const CompressJob& job) {
  return {
      job.equalized(), job.projection, Side::activation, context.key(), activation_quant(job.spec),
      job.out};
}

inline GemmArgs product(const Operand& a, const Operand& b, int divisor, bool accumulate,
                        const MatrixOut& out) {
  GemmArgs args{};
  args.a = a.codes;
  args.b = b.codes;
  args.m = a.rows;
  args.n = b.rows;
  args.k = args.lda = args.ldb = a.k_padded;
  args.a_scale = a.scale;
  args.a_scale_step = a.scales == 1 ? 0 : 1;
  args.b_scale = b.scale;
  args.b_scale_step = b.scales == 1 ? 0 : 1;
  args.inv_divisor = 1.0F / static_cast<float>(divisor);
  args.accumulate = accumulate;
  args.out = out;
  return args;
}

}  // namespace hot::detail

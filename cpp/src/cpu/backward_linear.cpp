// A backward pass on the CPU: its stages in order.
#include "backward_work.h"

#include <algorithm>

#include "checks.h"
#include "cpu/backend.h"

namespace hot::detail {
namespace {

// The operands of both products.
struct Scratch {
  Operand gradient_rows{}, weight{};         // g_x
  Operand gradient_columns{}, activation{};  // g_w; activation: from packed codes
  float* offsets = nullptr;                  // of the codes of rht4 and rht2
  char *gx_gemm = nullptr, *gw_gemm = nullptr;
};

// Scales that are written and read, of a possible `many`.
std::int64_t scale_places(bool one, std::int64_t many) { return one ? 1 : many; }

Scratch take_scratch(WorkspaceCursor& cursor, const Backend& backend, const Context& context,
                     const BackwardWork& work) {
  const BackwardLinearSpec& spec = work.spec;
  const LinearShape& shape = work.shape;
  const auto take_gemm = [&](std::int64_t m, std::int64_t n, std::int64_t k) {
    return cursor.take<char>(static_cast<std::int64_t>(backend.gemm_workspace(context, m, n, k)));
  };
  Scratch s;
  if (work.gx) {
    const std::int64_t k = work.out_features.k_padded;
    s.gradient_rows = take_operand(
        cursor, shape.tokens, k, scale_places(spec.gx_scale == Granularity::tensor, shape.tokens));
    if (work.weight) {
      s.weight =
          take_operand(cursor, shape.in_features, k,
                       scale_places(spec.weight_scale == Granularity::tensor, shape.in_features));
    }
    s.gx_gemm = take_gemm(shape.tokens, shape.in_features, k);
  }
  if (work.gw) {
    const std::int64_t k = work.tokens.k_padded;
    s.gradient_columns =
        take_operand(cursor, shape.out_features, k,
                     scale_places(spec.gw_scale == GradScale::tensor,
                                  spec.gw_scale == GradScale::token ? k : shape.out_features));
    if (spec.storage != Storage::int8)
      s.activation = take_operand(cursor, shape.in_features, k, shape.in_features);
    if (rotated_bits(spec.storage) != 0) s.offsets = cursor.take<float>(k);
    s.gw_gemm = take_gemm(shape.out_features, shape.in_features, k);
  }
  return s;
}

}  // namespace

void CpuBackend::compress(const Context& context, const CompressJob& job, void*) const {
  if (job.exponents != nullptr) token_exponents(context, job.x, job.exponents);
  if (job.spec.storage == Storage::int8) {
    quantize_columns(context, activation_columns(context, job));
  } else if (job.x.rows == 0 || job.x.cols == 0) {
    return;
  } else if (job.spec.storage == Storage::int4) {
    compress_groups(context, job.equalized(), job);
  } else {
    compress_rotated(context, job.equalized(), job);
  }
}

std::size_t CpuBackend::backward_workspace(const Context& context, const BackwardWork& work) const {
  WorkspaceCursor cursor;
  take_scratch(cursor, *this, context, work);
  return cursor.bytes();
}

void CpuBackend::backward(const Context& context, const BackwardCall& call, void* workspace) const {
  const BackwardWork& work = call.work;
  const BackwardLinearSpec& spec = work.spec;
  WorkspaceCursor cursor(workspace);
  const Scratch s = take_scratch(cursor, *this, context, work);
  if (work.gx) {
    quantize_rows(context,
                  {call.gy, spec.hadamard_block, gradient_rows_quant(spec), s.gradient_rows});
    Operand weight = call.quantized;
    weight.scales = scale_places(spec.weight_scale == Granularity::tensor, weight.scales);
    if (work.weight) {
      weight = s.weight;
      quantize_columns(context, {call.w, &work.out_features, Side::activation, context.key(),
                                 weight_quant(spec), weight});
    }
    gemm(context, product(s.gradient_rows, weight, spec.hadamard_block, false, call.gx), s.gx_gemm);
  } else if (work.clear_gx) {
    fill_zero(context, call.gx);
  }
  if (work.gw) {
    MatrixIn gradient = call.gy;
    gradient.exponents = call.exponents;
    quantize_columns(context, {gradient, &work.tokens, Side::gradient, call.sketch_key,
                               gradient_columns_quant(spec), s.gradient_columns});
    Operand x = call.saved;
    if (spec.storage != Storage::int8) {
      GroupsJob groups = call.groups;
      x = groups.out = s.activation;
      if (s.offsets != nullptr) {
        dither_offsets(context, call.sketch_key, work.tokens.blocks, s.offsets);
        groups.offsets = s.offsets;
      }
      requantize_groups(context, groups);
    }
    const int divisor = work.tokens.divisor;
    if (spec.gw_scale == GradScale::token) {
      gemm_token(context, token_product(s.gradient_columns, x, divisor, work.accumulate, call.gw),
                 s.gw_gemm);
    } else {
      gemm(context, product(s.gradient_columns, x, divisor, work.accumulate, call.gw), s.gw_gemm);
    }
  } else if (work.clear_gw) {
    fill_zero(context, call.gw);
  }
  if (work.gb && work.shape.out_features > 0) {
    column_sum(context, call.gy, call.gb, work.accumulate);
  }
}

}  // namespace hot::detail

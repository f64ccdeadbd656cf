// compress_activation and backward_linear: composition of the backends' stages, no arithmetic here.
#include "hot/backward_linear.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <string>

#include "checks.h"
#include "hot/error.h"
#include "kernels.h"

namespace hot {

using detail::backend_of;
using detail::Checker;
using detail::float_dtypes;
using detail::MatrixIn;
using detail::MatrixOut;
using detail::OperandQuant;
using detail::Projection;
using detail::Purpose;
using detail::WorkspaceCursor;

const char* storage_name(Storage storage) noexcept {
  return storage == Storage::int8 ? "int8" : storage == Storage::int4 ? "int4" : "unknown";
}

const char* grad_scale_name(GradScale scale) noexcept {
  switch (scale) {
    case GradScale::tensor:
      return "tensor";
    case GradScale::channel:
      return "channel";
    case GradScale::token:
      return "token";
  }
  return "unknown";
}

namespace {

void check_spec(const char* call, const BackwardLinearSpec& spec) {
  const int n = spec.hadamard_block;
  if (!detail::is_power_of_two(n) || n > 256) {
    detail::invalid(
        call, "hadamard_block is " + std::to_string(n) + "; expected a power of two from 1 to 256");
  }
  if (spec.gx_bits != 4 && spec.gx_bits != 8) {
    detail::invalid(call, "gx_bits is " + std::to_string(spec.gx_bits) + "; expected 4 or 8");
  }
  if (spec.gx_scale == Granularity::column) {
    detail::invalid(call, "gx_scale is column; expected row (per token) or tensor");
  }
  if (spec.weight_scale == Granularity::row) {
    detail::invalid(call, "weight_scale is row; expected column (of in_features) or tensor");
  }
  if (spec.x_scale == Granularity::column) {
    detail::invalid(call, "x_scale is column; expected row (per channel) or tensor");
  }
  if (spec.storage == Storage::int4 && spec.low_rank.basis != Basis::full) {
    detail::invalid(call, std::string("storage is int4 with basis ") +
                              basis_name(spec.low_rank.basis) +
                              "; expected basis full (a Hadamard transform hurts INT4 storage)");
  }
  detail::make_projection(0, spec.low_rank);
}

// w [O, I] transformed along O: a projection that keeps all rows of its blocks.
Projection hadamard_projection(std::int64_t out_features, int block) {
  Projection p;
  p.tokens = p.body_tokens = out_features;
  p.block = p.rank = p.divisor = block;
  p.basis = block == 1 ? Basis::full : Basis::sequency;
  p.blocks = detail::ceil_div(out_features, block);
  p.k = p.blocks * block;
  p.k_padded = detail::round_up(p.k, detail::k_alignment);
  return p;
}

// How each operand is quantised. Weights are rounded to nearest: they are the same for every token,
// so noise would not average.
OperandQuant gradient_rows(const BackwardLinearSpec& spec) {
  return {spec.gx_bits, spec.gx_scale == Granularity::tensor, false, spec.gx_rounding,
          Purpose::gradient_rows};
}
OperandQuant weight_columns(const BackwardLinearSpec& spec) {
  return {spec.gx_bits, spec.weight_scale == Granularity::tensor, false, Rounding::nearest,
          Purpose::weight};
}
OperandQuant gradient_columns(const BackwardLinearSpec& spec) {
  return {8, spec.gw_scale == GradScale::tensor, spec.gw_scale == GradScale::token,
          spec.gw_rounding, Purpose::gradient_columns};
}
OperandQuant activation_columns(const BackwardLinearSpec& spec) {
  return {8, spec.x_scale == Granularity::tensor, false, spec.x_rounding, Purpose::activation};
}

// What the backend wants zeroed, together and first.
struct Zeroed {
  std::uint32_t *gradient_rows = nullptr, *weight = nullptr, *gradient_columns = nullptr;
  std::int64_t words = 0;
};

std::int64_t weight_amax_words(const Context& context, const MatrixIn& w,
                               const BackwardLinearSpec& spec) {
  return backend_of(context).columns_amax_words(
      context, w, hadamard_projection(w.rows, spec.hadamard_block), weight_columns(spec));
}

// What a call computes, and whether it has to quantise w for it.
struct Needs {
  bool gx, gw, weight;
};

Zeroed take_zeroed(WorkspaceCursor& cursor, const Context& context, const MatrixIn& gy,
                   const MatrixIn& w, const BackwardLinearSpec& spec, const Needs& need) {
  const detail::Backend& backend = backend_of(context);
  std::int64_t words[3] = {0, 0, 0};
  if (need.gx) words[0] = backend.rows_amax_words(context, gradient_rows(spec));
  if (need.weight) words[1] = weight_amax_words(context, w, spec);
  if (need.gw) {
    words[2] = backend.columns_amax_words(
        context, gy, detail::make_projection(gy.rows, spec.low_rank), gradient_columns(spec));
  }
  Zeroed z;
  z.words = words[0] + words[1] + words[2];
  z.gradient_rows = cursor.take<std::uint32_t>(z.words);
  if (z.gradient_rows != nullptr) {
    z.weight = z.gradient_rows + words[0];
    z.gradient_columns = z.weight + words[1];
  }
  return z;
}

struct GxScratch {
  detail::Operand y, w;
  char* gemm;
};

// Scales of w that a backend writes and reads.
std::int64_t weight_scales(const Context& context, const LinearShape& shape,
                           const BackwardLinearSpec& spec) {
  const bool one =
      spec.weight_scale == Granularity::tensor && !backend_of(context).spreads_scales();
  return one ? 1 : shape.in_features;
}

GxScratch take_gx(WorkspaceCursor& cursor, const Context& context, const LinearShape& shape,
                  const BackwardLinearSpec& spec, bool need_weight) {
  const detail::Backend& backend = backend_of(context);
  const std::int64_t k = hadamard_projection(shape.out_features, spec.hadamard_block).k_padded;
  const bool one = !backend.spreads_scales();
  GxScratch s{};
  s.y = {nullptr, nullptr, shape.tokens, k,
         one && spec.gx_scale == Granularity::tensor ? 1 : shape.tokens};
  s.y.codes = cursor.take<std::int8_t>(s.y.rows * k);
  s.y.scale = cursor.take<float>(s.y.scales);
  if (need_weight) {
    s.w = {nullptr, nullptr, shape.in_features, k, weight_scales(context, shape, spec)};
    s.w.codes = cursor.take<std::int8_t>(s.w.rows * k);
    s.w.scale = cursor.take<float>(s.w.scales);
  }
  s.gemm = cursor.take<char>(static_cast<std::int64_t>(
      backend.gemm_workspace(context, shape.tokens, shape.in_features, k)));
  return s;
}

char* take_gb(WorkspaceCursor& cursor, const Context& context, const LinearShape& shape) {
  return cursor.take<char>(static_cast<std::int64_t>(
      backend_of(context).column_sum_workspace(context, shape.tokens, shape.out_features)));
}

struct GwScratch {
  detail::Operand g, x;
  char* gemm;
  char* sums;
};

GwScratch take_gw(WorkspaceCursor& cursor, const Context& context, const LinearShape& shape,
                  const BackwardLinearSpec& spec, const Projection& p) {
  const detail::Backend& backend = backend_of(context);
  GwScratch s;
  const bool one = spec.gw_scale == GradScale::tensor && !backend.spreads_scales();
  const std::int64_t scales = one                                 ? 1
                              : spec.gw_scale == GradScale::token ? p.k_padded
                                                                  : shape.out_features;
  s.g = {nullptr, nullptr, shape.out_features, p.k_padded, scales};
  s.g.codes = cursor.take<std::int8_t>(s.g.rows * p.k_padded);
  s.g.scale = cursor.take<float>(scales);
  s.x = {nullptr, nullptr, shape.in_features, p.k_padded, shape.in_features};
  if (spec.storage == Storage::int4) {
    s.x.codes = cursor.take<std::int8_t>(s.x.rows * p.k_padded);
    s.x.scale = cursor.take<float>(s.x.scales);
  }
  s.gemm = cursor.take<char>(static_cast<std::int64_t>(
      backend.gemm_workspace(context, shape.out_features, shape.in_features, p.k_padded)));
  s.sums = take_gb(cursor, context, shape);
  return s;
}

detail::GemmArgs product(const detail::Operand& a, const detail::Operand& b, int divisor,
                         const MatrixOut& out) {
  detail::GemmArgs args{};
  args.a = a.codes;
  args.b = b.codes;
  args.m = a.rows;
  args.n = b.rows;
  args.k = args.lda = args.ldb = a.k_padded;
  args.a_scale = a.scale;
  args.b_scale = b.scale;
  args.a_scale_step = a.scales == 1 ? 0 : 1;
  args.b_scale_step = b.scales == 1 ? 0 : 1;
  args.inv_divisor = 1.0F / static_cast<float>(divisor);
  args.out = out;
  return args;
}

detail::GemmTokenArgs token_product(const detail::Operand& a, const detail::Operand& b, int divisor,
                                    const MatrixOut& out) {
  detail::GemmTokenArgs args{};
  args.a = a.codes;
  args.b = b.codes;
  args.m = a.rows;
  args.n = b.rows;
  args.k = args.lda = args.ldb = a.k_padded;
  args.k_scale = a.scale;
  args.b_scale = b.scale;
  args.b_scale_step = b.scales == 1 ? 0 : 1;
  args.inv_divisor = 1.0F / static_cast<float>(divisor);
  args.out = out;
  return args;
}

// x for g_w as it was saved in INT8. Operands are written by the backends and read by the products;
// this one is only read.
detail::Operand saved_operand(const ConstSavedActivation& saved, const SavedLayout& layout) {
  const auto* bytes = static_cast<const char*>(saved.data);
  return {const_cast<std::int8_t*>(static_cast<const std::int8_t*>(saved.data)),
          const_cast<float*>(reinterpret_cast<const float*>(bytes + layout.scale_offset)),
          saved.in_features, layout.k_padded, layout.scales};
}

detail::GroupsJob saved_groups(const ConstSavedActivation& saved, const SavedLayout& layout,
                               const BackwardLinearSpec& spec, const detail::Operand& out) {
  const auto* bytes = static_cast<const char*>(saved.data);
  // Codes on a grid have no low bits to round by: what is not stochastic goes to the nearest.
  return {static_cast<const std::uint8_t*>(saved.data),
          layout.row_bytes,
          reinterpret_cast<const std::uint16_t*>(bytes + layout.scale_offset),
          saved.tokens,
          spec.x_rounding == Rounding::stochastic ? Rounding::stochastic : Rounding::nearest,
          out};
}

// A quantised weight's buffer: codes [I, Kp], then room for I scales.
detail::Operand weight_operand(const Context& context, void* data, const LinearShape& shape,
                               const BackwardLinearSpec& spec) {
  const std::int64_t k = hadamard_projection(shape.out_features, spec.hadamard_block).k_padded;
  auto* bytes = static_cast<std::int8_t*>(data);
  return {bytes, reinterpret_cast<float*>(bytes + shape.in_features * k), shape.in_features, k,
          weight_scales(context, shape, spec)};
}

void check_shape(const char* call, const LinearShape& shape) {
  if (shape.tokens < 0 || shape.out_features < 0 || shape.in_features < 0) {
    detail::invalid(call, "tokens is " + std::to_string(shape.tokens) + ", out_features " +
                              std::to_string(shape.out_features) + ", in_features " +
                              std::to_string(shape.in_features) + "; expected no negative size");
  }
}

void check_bytes(const char* call, const char* name, const void* data, std::size_t bytes,
                 std::size_t expected) {
  if (bytes != expected || (data == nullptr && expected > 0)) {
    detail::invalid(call, std::string(name) + " has " +
                              std::to_string(data == nullptr ? 0 : bytes) + " bytes; expected " +
                              std::to_string(expected) + " for this spec");
  }
  if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0) {
    detail::invalid(call, std::string(name) + " is not aligned to 16 bytes");
  }
}

}  // namespace

Support supported(const Context& context, const LinearShape& shape,
                  const BackwardLinearSpec& spec) noexcept {
  try {
    check_shape("backward_linear", shape);
    check_spec("backward_linear", spec);
    detail::make_projection(shape.tokens, spec.low_rank);
    backend_of(context).gemm_workspace(context, shape.tokens, shape.in_features,
                                       shape.out_features);
    return {true, ""};
  } catch (const std::exception& error) {
    return {false, error.what()};
  }
}

SavedLayout saved_layout(std::int64_t tokens, std::int64_t in_features,
                         const BackwardLinearSpec& spec) {
  check_shape("saved_layout", {tokens, 0, in_features});
  check_spec("saved_layout", spec);
  const Projection p = detail::make_projection(tokens, spec.low_rank);
  SavedLayout layout;
  layout.channels = in_features;
  layout.k = p.k;
  layout.k_padded = p.k_padded;
  std::size_t scale_bytes;
  if (spec.storage == Storage::int4) {
    layout.row_bytes = detail::round_up(tokens, detail::int4_k_alignment) / 2;
    layout.scales = in_features * detail::ceil_div(tokens, detail::int4_group);
    scale_bytes = sizeof(std::uint16_t);
  } else {
    layout.row_bytes = p.k_padded;
    layout.scales = spec.x_scale == Granularity::tensor ? 1 : in_features;
    scale_bytes = sizeof(float);
  }
  // Rows are whole multiples of 16 bytes, so the scales that follow are aligned.
  layout.scale_offset = static_cast<std::size_t>(in_features * layout.row_bytes);
  layout.bytes = layout.scale_offset + static_cast<std::size_t>(layout.scales) * scale_bytes;
  return layout;
}

namespace {

std::int64_t compress_amax_words(const Context& context, const MatrixIn& x, const Projection& p,
                                 const BackwardLinearSpec& spec) {
  if (spec.storage == Storage::int4) return 0;
  return backend_of(context).columns_amax_words(context, x, p, activation_columns(spec));
}

// Of what shape and type a matrix will be: for queries. The type decides which way is taken, so
// that queries, which do not know it, take what most want.
std::size_t most_bytes(const std::function<std::size_t(DType)>& bytes) {
  return std::max({bytes(DType::f32), bytes(DType::f16), bytes(DType::bf16)});
}

}  // namespace

std::size_t compress_activation_workspace(const Context& context, std::int64_t tokens,
                                          std::int64_t in_features,
                                          const BackwardLinearSpec& spec) {
  saved_layout(tokens, in_features, spec);  // the same errors as the call itself
  const Projection p = detail::make_projection(tokens, spec.low_rank);
  return most_bytes([&](DType dtype) {
    WorkspaceCursor cursor;
    cursor.take<std::uint32_t>(compress_amax_words(
        context, {nullptr, dtype, tokens, in_features, in_features, 1}, p, spec));
    return cursor.bytes();
  });
}

void compress_activation(const Context& context, const ConstTensorView& x,
                         const BackwardLinearSpec& spec, const SavedActivation& saved,
                         const Workspace& workspace) {
  const char* const call = "compress_activation";
  const Checker check(call, context);
  check_spec(call, spec);
  check.input("x", x, float_dtypes, 2, max_dims);
  const MatrixIn rows = check.collapsed("x", x);
  const Projection p = detail::make_projection(rows.rows, spec.low_rank);
  const SavedLayout layout = saved_layout(rows.rows, rows.cols, spec);
  if (saved.bytes < layout.bytes || (saved.data == nullptr && layout.bytes > 0)) {
    detail::invalid(call, "saved has " + std::to_string(saved.data == nullptr ? 0 : saved.bytes) +
                              " bytes; expected " + std::to_string(layout.bytes));
  }
  if (reinterpret_cast<std::uintptr_t>(saved.data) % 16 != 0) {
    detail::invalid(call, "saved is not aligned to 16 bytes");
  }
  check.disjoint("saved",
                 vector(saved.data, DType::i8, static_cast<std::int64_t>(layout.bytes), x.device),
                 "x", x);
  check.workspace(workspace, compress_activation_workspace(context, rows.rows, rows.cols, spec));
  if (layout.bytes == 0) return;
  auto* bytes = static_cast<char*>(saved.data);
  const detail::Backend& backend = backend_of(context);
  if (spec.storage == Storage::int4) {
    if (rows.rows == 0) return;
    return backend.quantize_groups(context, rows, spec.x_rounding,
                                   static_cast<std::uint8_t*>(saved.data), layout.row_bytes,
                                   reinterpret_cast<std::uint16_t*>(bytes + layout.scale_offset));
  }
  detail::Operand out{static_cast<std::int8_t*>(saved.data),
                      reinterpret_cast<float*>(bytes + layout.scale_offset), rows.cols,
                      layout.k_padded, layout.scales};
  const std::int64_t words = compress_amax_words(context, rows, p, spec);
  if (words > 0) {
    WorkspaceCursor cursor(workspace.data);
    out.amax = cursor.take<std::uint32_t>(words);
    backend.zero(context, out.amax, static_cast<std::size_t>(words) * sizeof *out.amax);
  }
  backend.quantize_columns(context, rows, p, Side::activation, context.key(),
                           activation_columns(spec), out, nullptr);
}

std::size_t quantized_weight_bytes(std::int64_t out_features, std::int64_t in_features,
                                   const BackwardLinearSpec& spec) {
  const char* const call = "quantized_weight_bytes";
  check_shape(call, {0, out_features, in_features});
  check_spec(call, spec);
  const std::int64_t k = hadamard_projection(out_features, spec.hadamard_block).k_padded;
  return static_cast<std::size_t>(in_features) * (static_cast<std::size_t>(k) + sizeof(float));
}

std::size_t quantize_weight_workspace(const Context& context, std::int64_t out_features,
                                      std::int64_t in_features, const BackwardLinearSpec& spec) {
  quantized_weight_bytes(out_features, in_features, spec);  // the same errors as the call itself
  return most_bytes([&](DType dtype) {
    WorkspaceCursor cursor;
    cursor.take<std::uint32_t>(weight_amax_words(
        context, {nullptr, dtype, out_features, in_features, in_features, 1}, spec));
    return cursor.bytes();
  });
}

void quantize_weight(const Context& context, const ConstTensorView& w,
                     const BackwardLinearSpec& spec, const QuantizedWeight& out,
                     const Workspace& workspace) {
  const char* const call = "quantize_weight";
  const Checker check(call, context);
  check_spec(call, spec);
  check.input("w", w, float_dtypes, 2, 2);
  const MatrixIn weight = detail::matrix_of(w);
  const LinearShape shape{0, weight.rows, weight.cols};
  check_bytes(call, "out", out.data, out.bytes,
              quantized_weight_bytes(shape.out_features, shape.in_features, spec));
  check.disjoint("out", vector(out.data, DType::i8, static_cast<std::int64_t>(out.bytes), w.device),
                 "w", w);
  WorkspaceCursor cursor(workspace.data);
  detail::Operand operand = weight_operand(context, out.data, shape, spec);
  const std::int64_t words = weight_amax_words(context, weight, spec);
  operand.amax = cursor.take<std::uint32_t>(words);
  check.workspace(workspace, cursor.bytes());
  if (shape.in_features == 0) return;
  const Projection p = hadamard_projection(shape.out_features, spec.hadamard_block);
  const detail::ColumnsJob job{
      weight, &p, Side::activation, context.key(), weight_columns(spec), operand, nullptr};
  detail::BackwardOperands operands;
  operands.weight = &job;
  operands.zeroed = operand.amax;
  operands.zeroed_bytes = static_cast<std::size_t>(words) * sizeof(std::uint32_t);
  backend_of(context).quantize_operands(context, operands);
}

std::size_t backward_linear_workspace(const Context& context, const LinearShape& shape,
                                      const BackwardLinearSpec& spec, bool need_gx, bool need_gw) {
  check_shape("backward_linear_workspace", shape);
  check_spec("backward_linear_workspace", spec);
  const Projection p = detail::make_projection(shape.tokens, spec.low_rank);
  const std::size_t bytes = most_bytes([&](DType dtype) {
    WorkspaceCursor cursor;
    take_zeroed(cursor, context,
                {nullptr, dtype, shape.tokens, shape.out_features, shape.out_features, 1},
                {nullptr, dtype, shape.out_features, shape.in_features, shape.in_features, 1}, spec,
                {need_gx, need_gw, need_gx});
    if (need_gx) take_gx(cursor, context, shape, spec, true);
    if (need_gw) take_gw(cursor, context, shape, spec, p);
    return cursor.bytes();
  });
  WorkspaceCursor for_gb;  // on its own: nothing else is alive then
  take_gb(for_gb, context, shape);
  return std::max(bytes, for_gb.bytes());
}

namespace {

// backward_linear once its arguments are known to be good. `weight` has no rows where w comes
// quantised, as `quantized`.
void run_backward(const Context& context, const Checker& check, const MatrixIn& gy,
                  const MatrixIn& weight, const detail::Operand* quantized,
                  const ConstSavedActivation& saved, const LinearShape& shape,
                  const BackwardLinearSpec& spec, const MatrixOut& gx, const MatrixOut& gw,
                  const MatrixOut* gb, bool accumulate, const Workspace& workspace) {
  const detail::Backend& backend = backend_of(context);
  const bool with_gx = gx.rows > 0 && gx.cols > 0 && shape.out_features > 0;
  const bool with_gw = gw.rows > 0 && gw.cols > 0 && shape.tokens > 0;
  const bool with_weight = with_gx && quantized == nullptr;
  const Projection p = detail::make_projection(shape.tokens, spec.low_rank);
  const Projection weight_projection = hadamard_projection(shape.out_features, spec.hadamard_block);

  // Both operands of both products are quantised first, so that g_y is read again while a cache may
  // still hold it and a backend may overlap or join the stages; then the products.
  WorkspaceCursor cursor(workspace.data);
  const Zeroed zeroed =
      take_zeroed(cursor, context, gy, weight, spec, {with_gx, with_gw, with_weight});
  GxScratch for_gx{};
  GwScratch for_gw{};
  if (with_gx) for_gx = take_gx(cursor, context, shape, spec, with_weight);
  if (with_gw) for_gw = take_gw(cursor, context, shape, spec, p);
  WorkspaceCursor for_gb(workspace.data);
  char* const sums = gb == nullptr ? nullptr : take_gb(for_gb, context, shape);
  check.workspace(workspace, std::max(cursor.bytes(), for_gb.bytes()));
  for_gx.y.amax = zeroed.gradient_rows;
  for_gx.w.amax = zeroed.weight;
  for_gw.g.amax = zeroed.gradient_columns;

  const SavedLayout layout =
      with_gw ? saved_layout(shape.tokens, shape.in_features, spec) : SavedLayout{};
  const detail::ColumnSum sum{gb == nullptr ? MatrixOut{} : *gb, accumulate, for_gw.sums};
  const detail::RowsJob rows{gy, spec.hadamard_block, gradient_rows(spec), for_gx.y};
  const detail::ColumnsJob columns{gy,
                                   &p,
                                   Side::gradient,
                                   saved.key,
                                   gradient_columns(spec),
                                   for_gw.g,
                                   gb == nullptr ? nullptr : &sum};
  const detail::ColumnsJob weights{weight,        &weight_projection,   Side::activation,
                                   context.key(), weight_columns(spec), for_gx.w,
                                   nullptr};
  const detail::GroupsJob groups = saved_groups(saved, layout, spec, for_gw.x);
  const bool from_int4 = with_gw && spec.storage == Storage::int4;
  detail::BackwardOperands operands;
  if (with_gx) operands.gradient_rows = &rows;
  if (with_gw) operands.gradient_columns = &columns;
  if (with_weight) operands.weight = &weights;
  if (from_int4) operands.activation = &groups;
  operands.zeroed = zeroed.gradient_rows;
  operands.zeroed_bytes = static_cast<std::size_t>(zeroed.words) * sizeof(std::uint32_t);
  const bool gb_done = backend.quantize_operands(context, operands);

  detail::GemmArgs products[2];
  void* scratch[2];
  int count = 0;
  if (with_gx) {
    scratch[count] = for_gx.gemm;
    products[count++] =
        product(for_gx.y, quantized == nullptr ? for_gx.w : *quantized, spec.hadamard_block, gx);
  } else if (gx.rows > 0 && gx.cols > 0) {
    backend.fill_zero(context, gx);
  }
  const detail::Operand x = from_int4 ? for_gw.x : saved_operand(saved, layout);
  const bool by_token = spec.gw_scale == GradScale::token;
  if (with_gw && !by_token) {
    scratch[count] = for_gw.gemm;
    products[count] = product(for_gw.g, x, p.divisor, gw);
    products[count++].accumulate = accumulate;
  }
  if (count > 0) backend.gemms(context, products, scratch, count);
  if (with_gw && by_token) {
    detail::GemmTokenArgs args = token_product(for_gw.g, x, p.divisor, gw);
    args.accumulate = accumulate;
    backend.gemm_token(context, args, for_gw.gemm);
  } else if (!with_gw && gw.rows > 0 && gw.cols > 0 && !accumulate) {
    backend.fill_zero(context, gw);
  }
  if (gb != nullptr && !gb_done && shape.out_features > 0) {
    backend.column_sum(context, gy, {*gb, accumulate, sums});
  }
}

// w of a call: floats (`view`), or quantised before (`quantized`).
struct WeightArgument {
  const ConstTensorView* view;
  const ConstQuantizedWeight* quantized;
};

void check_and_run(const Context& context, const ConstTensorView& gy, const WeightArgument& w,
                   const ConstSavedActivation& saved, const BackwardLinearSpec& spec,
                   const BackwardOutputs& out, const Workspace& workspace) {
  const char* const call = "backward_linear";
  const Checker check(call, context);
  check_spec(call, spec);
  check.input("gy", gy, float_dtypes, 2, max_dims);
  const MatrixIn gradient = check.collapsed("gy", gy);
  LinearShape shape{gradient.rows, gradient.cols, 0};

  MatrixIn weight{};
  detail::Operand quantized{};
  ConstTensorView weight_memory{};  // what outputs must not touch
  if (out.gx != nullptr && w.quantized != nullptr) {
    shape.in_features = w.quantized->in_features;
    if (w.quantized->out_features != shape.out_features) {
      detail::invalid(call, "w has " + std::to_string(w.quantized->out_features) +
                                " out_features; expected gy's, " +
                                std::to_string(shape.out_features));
    }
    check_bytes(call, "w", w.quantized->data, w.quantized->bytes,
                quantized_weight_bytes(shape.out_features, shape.in_features, spec));
    weight_memory = vector(w.quantized->data, DType::i8,
                           static_cast<std::int64_t>(w.quantized->bytes), gy.device);
    quantized = weight_operand(context, const_cast<void*>(w.quantized->data), shape, spec);
  } else if (out.gx != nullptr) {
    check.input("w", *w.view, float_dtypes, 2, 2);
    check.shape("w", *w.view, {shape.out_features, -1});
    weight = detail::matrix_of(*w.view);
    weight_memory = *w.view;
    shape.in_features = weight.cols;
  }
  if (out.gw != nullptr) {
    if (out.gx != nullptr && saved.in_features != shape.in_features) {
      detail::invalid(call, "saved has " + std::to_string(saved.in_features) +
                                " in_features; expected w's, " + std::to_string(shape.in_features));
    }
    shape.in_features = saved.in_features;
    if (saved.tokens != shape.tokens) {
      detail::invalid(call, "saved has " + std::to_string(saved.tokens) +
                                " tokens; expected gy's, " + std::to_string(shape.tokens));
    }
    check_bytes(call, "saved", saved.data, saved.bytes,
                saved_layout(saved.tokens, saved.in_features, spec).bytes);
  }

  const ConstTensorView saved_bytes =
      vector(saved.data, DType::i8, static_cast<std::int64_t>(saved.bytes), gy.device);
  const struct {
    const char* name;
    const TensorView* view;
    int min_dims, most_dims;
  } outputs[] = {{"gx", out.gx, 2, max_dims}, {"gw", out.gw, 2, 2}, {"gb", out.gb, 1, 1}};
  for (const auto& output : outputs) {
    if (output.view == nullptr) continue;
    check.output(output.name, *output.view, float_dtypes, output.min_dims, output.most_dims);
    check.disjoint(output.name, *output.view, "gy", gy);
    if (out.gx != nullptr) check.disjoint(output.name, *output.view, "w", weight_memory);
    if (out.gw != nullptr) check.disjoint(output.name, *output.view, "saved", saved_bytes);
    for (const auto& other : outputs) {
      if (&other == &output) break;
      if (other.view != nullptr) {
        check.disjoint(output.name, *output.view, other.name, *other.view);
      }
    }
  }
  MatrixOut gx{}, gw{}, gb{};
  if (out.gx != nullptr) {
    gx = check.collapsed_out("gx", *out.gx);
    if (gx.rows != shape.tokens || gx.cols != shape.in_features) {
      detail::invalid(call, "gx has shape " + detail::shape_text(*out.gx) + "; expected " +
                                detail::shape_text({shape.tokens, shape.in_features}) +
                                ", leading dimensions flattened");
    }
  }
  if (out.gw != nullptr) {
    check.shape("gw", *out.gw, {shape.out_features, shape.in_features});
    gw = detail::matrix_out_of(*out.gw);
  }
  if (out.gb != nullptr) {
    check.shape("gb", *out.gb, {shape.out_features});
    gb = {out.gb->data, out.gb->dtype, 1, shape.out_features, 0, out.gb->stride[0]};
  }
  run_backward(context, check, gradient, weight, w.quantized == nullptr ? nullptr : &quantized,
               saved, shape, spec, gx, gw, out.gb == nullptr ? nullptr : &gb, out.accumulate,
               workspace);
}

}  // namespace

void backward_linear(const Context& context, const ConstTensorView& gy, const ConstTensorView& w,
                     const ConstSavedActivation& saved, const BackwardLinearSpec& spec,
                     const BackwardOutputs& out, const Workspace& workspace) {
  check_and_run(context, gy, {&w, nullptr}, saved, spec, out, workspace);
}

void backward_linear(const Context& context, const ConstTensorView& gy,
                     const ConstQuantizedWeight& w, const ConstSavedActivation& saved,
                     const BackwardLinearSpec& spec, const BackwardOutputs& out,
                     const Workspace& workspace) {
  check_and_run(context, gy, {nullptr, &w}, saved, spec, out, workspace);
}

}  // namespace hot

// The tables of operands: which matrix, transform, scales and codes each call needs.
#include "work.h"

#include <algorithm>

namespace hot::detail {

namespace {

// Quantisation of each operand. Weights are rounded to nearest: all tokens share them, so rounding
// noise would not average out. The forward pass is deterministic.
OperandQuant gradient_rows_quant(const BackwardLinearSpec& spec) {
  return {spec.gx_bits, spec.gx_scale == Granularity::tensor, false, spec.gx_rounding,
          Purpose::gradient_rows};
}
OperandQuant weight_quant(const BackwardLinearSpec& spec) {
  return {spec.gx_bits, spec.gx_scale == Granularity::tensor, false, Rounding::nearest,
          Purpose::weight};
}
OperandQuant gradient_columns_quant(const BackwardLinearSpec& spec) {
  return {8, spec.gw_scale == Granularity::tensor, spec.gw_scale == Granularity::token,
          spec.gw_rounding, Purpose::gradient_columns};
}
OperandQuant activation_quant(const BackwardLinearSpec& spec) {
  return {8, spec.gw_scale != Granularity::channel, false, Rounding::stochastic,
          Purpose::activation};
}
constexpr OperandQuant forward_quant{8, false, false, Rounding::nearest, Purpose::quantize};

// ---- products ----------------------------------------------------------------------------------

bool has_elements(const MatrixOut& out) { return out.rows > 0 && out.cols > 0; }

// Writes the codes of its operands into a product.
void take_codes(const Operand& a, const Operand& b, WorkProduct& product) {
  GemmArgs& args = product.args;
  args.a = a.out.codes;
  args.b = b.out.codes;
  args.a_scale = a.out.scale;
  args.b_scale = b.out.scale;
  args.a_scale_step = a.out.scales == 1 ? 0 : 1;
  args.b_scale_step = b.out.scales == 1 ? 0 : 1;
}

// Adds the product of two operands.
WorkProduct& add_product(Work& work, int number, Result result, const Operand& a, const Operand& b,
                         const MatrixOut& out) {
  WorkProduct& product = work.products[number];
  product.result = result;
  product.a = static_cast<int>(&a - work.operands.begin());
  product.b = static_cast<int>(&b - work.operands.begin());
  product.args.out = out;
  product.args.m = a.out.rows;
  product.args.n = b.out.rows;
  product.args.k = product.args.lda = product.args.ldb = a.out.k_padded;
  product.args.inv_divisor = 1.0F / static_cast<float>(b.transform.divisor);
  take_codes(a, b, product);
  return product;
}

// Makes a product that only writes zeros.
void add_zeros(Work& work, int number, Result result, const MatrixOut& out) {
  WorkProduct& product = work.products[number];
  product.result = result;
  product.clear = true;
  product.args.out = out;
  product.args.m = out.rows;
  product.args.n = out.cols;
}

// Marks an operand whose codes the call makes in its workspace, or that the caller has quantised.
void place(Operand& operand, const std::optional<Codes>& quantized) {
  operand.scratch = !quantized;
  if (!quantized) return;
  operand.from = From::codes;
  operand.out = *quantized;
}

}  // namespace

// ---- the table ---------------------------------------------------------------------------------

Operand& Operands::add(Source source, Along along, const Projection& transform,
                       const OperandQuant& quant, const MatrixIn& x) {
  Operand& operand = rows_[count_++];
  operand.source = source;
  operand.along = along;
  operand.transform = transform;
  operand.quant = quant;
  operand.x = x;
  operand.out.rows = along == Along::row ? x.rows : x.cols;
  operand.out.k_padded = transform.k_padded;
  operand.out.scales = quant.per_contraction ? transform.k_padded : operand.out.rows;
  return operand;
}

int Operands::index(Source source, Along along) const {
  int at = 0;
  while (at < count_ && (rows_[at].source != source || rows_[at].along != along)) ++at;
  return at;
}

const Operand* Operands::find(Source source, Along along, From from) const {
  const int at = index(source, along);
  return at < count_ && rows_[at].from == from ? rows_ + at : nullptr;
}

// ---- transforms and saved x --------------------------------------------------------------------

Projection token_projection(std::int64_t tokens, const BackwardLinearSpec& spec, Side side) {
  Projection p = make_projection(tokens, spec.low_rank, side);
  p.equalized = spec.equalize_tokens;
  return p;
}

Projection hadamard_projection(std::int64_t features, int block) {
  Projection p;
  p.tokens = p.body_tokens = features;
  p.block = p.rank = p.divisor = block;
  p.basis = block == 1 ? Basis::full : Basis::sequency;
  p.blocks = ceil_div(features, block);
  p.k = p.blocks * block;
  p.k_padded = round_up(p.k, k_alignment);
  return p;
}

SavedLayout layout_of(std::int64_t tokens, std::int64_t in_features,
                      const BackwardLinearSpec& spec) {
  const Projection p = token_projection(tokens, spec);
  SavedLayout layout;
  layout.channels = in_features;
  layout.k = p.k;
  layout.k_padded = p.k_padded;
  std::size_t scale_bytes;
  if (spec.storage == Storage::int4) {
    layout.row_bytes = round_up(tokens, int4_k_alignment) / 2;
    layout.scales = in_features * ceil_div(tokens, int4_group);
    scale_bytes = sizeof(std::uint16_t);
  } else {
    layout.row_bytes = p.k_padded;
    layout.scales = activation_quant(spec).per_tensor ? 1 : in_features;
    scale_bytes = sizeof(float);
  }
  // The length of a row is a multiple of 16 bytes, so the scales behind the rows are aligned.
  layout.scale_offset = static_cast<std::size_t>(in_features * layout.row_bytes);
  layout.exponent_offset =
      layout.scale_offset + static_cast<std::size_t>(layout.scales) * scale_bytes;
  layout.bytes =
      layout.exponent_offset + static_cast<std::size_t>(spec.equalize_tokens ? tokens : 0);
  return layout;
}

SavedX saved_x(const void* data, const SavedLayout& layout, std::int64_t tokens,
               const BackwardLinearSpec& spec) {
  auto* const bytes = static_cast<std::uint8_t*>(const_cast<void*>(data));
  const auto at = [&](std::size_t offset) { return bytes == nullptr ? nullptr : bytes + offset; };
  auto* const scales = at(layout.scale_offset);
  SavedX saved;
  if (spec.storage == Storage::int4) {
    saved.codes = Groups{bytes, layout.row_bytes, reinterpret_cast<std::uint16_t*>(scales), tokens,
                         layout.channels};
  } else {
    saved.codes = Codes{reinterpret_cast<std::int8_t*>(bytes), reinterpret_cast<float*>(scales),
                        layout.channels, layout.k_padded, layout.scales};
  }
  if (spec.equalize_tokens) saved.exponents = at(layout.exponent_offset);
  return saved;
}

// ---- calls -------------------------------------------------------------------------------------

BackwardCall backward_shape(const BackwardLinearSpec& spec, const LinearShape& shape, DType dtype,
                            DType gw_dtype, bool gx, bool gw, bool gb) {
  const auto [L, O, I] = shape;
  BackwardCall call{spec, shape, shape_in(dtype, L, O), shape_in(dtype, O, I)};
  if (gx) call.gx = shape_out(dtype, L, I);
  if (gw) {
    call.gw = shape_out(gw_dtype, O, I);
    call.saved = saved_x(nullptr, layout_of(L, I, spec), L, spec);
  }
  if (gb) call.gb = shape_out(DType::f32, 1, O);
  return call;
}

Work operands_of(const BackwardCall& call) {
  const BackwardLinearSpec& spec = call.spec;
  const auto [L, O, I] = call.shape;
  Work work{"backward_linear"};
  Operands& operands = work.operands;
  if (has_elements(call.gx) && O > 0) {
    const Projection features = hadamard_projection(O, spec.hadamard_block);
    Operand& gy =
        operands.add(Source::gy, Along::row, features, gradient_rows_quant(spec), call.gy);
    Operand& w = operands.add(Source::w, Along::column, features, weight_quant(spec), call.w);
    gy.scratch = true;
    place(w, call.quantized);
    add_product(work, 0, Result::gx, gy, w, call.gx);
  } else if (has_elements(call.gx)) {
    add_zeros(work, 0, Result::gx, call.gx);
  }
  if (has_elements(call.gw) && L > 0) {
    MatrixIn gradient = call.gy;
    gradient.exponents = call.saved.exponents;
    Operand& gy = operands.add(Source::gy, Along::column, token_projection(L, spec, Side::gradient),
                               gradient_columns_quant(spec), gradient);
    gy.scratch = true;
    gy.sketch_key = call.sketch_key;
    gy.sum = call.gb.rows > 0;
    gy.accumulate = call.accumulate;
    Operand& x = operands.add(Source::x, Along::column, token_projection(L, spec),
                              activation_quant(spec), shape_in(DType::f32, L, I));
    if (const auto* groups = std::get_if<Groups>(&call.saved.codes)) {
      x.from = From::groups;
      x.groups = *groups;
      x.quant.per_tensor = false;
      x.scratch = true;
    } else {
      place(x, std::get<Codes>(call.saved.codes));
    }
    WorkProduct& product = add_product(work, 1, Result::gw, gy, x, call.gw);
    product.args.accumulate = call.accumulate;
    product.by_k = spec.gw_scale == Granularity::token;
  } else if (has_elements(call.gw) && !call.accumulate) {
    add_zeros(work, 1, Result::gw, call.gw);
  }
  if (call.gb.cols > 0) work.sum = {call.gy, call.gb, call.accumulate};
  return work;
}

ForwardCall forward_shape(const ForwardLinearSpec& spec, const LinearShape& shape, DType dtype,
                          bool quantized_x, bool quantized_w) {
  const auto [L, O, I] = shape;
  ForwardCall call{spec, shape, shape_in(dtype, L, I), shape_in(dtype, O, I)};
  const std::int64_t k = forward_k(I, spec);
  if (quantized_x) call.quantized_x = weight_codes(nullptr, L, k);
  if (quantized_w) call.quantized_w = weight_codes(nullptr, O, k);
  call.y = shape_out(dtype, L, O);
  return call;
}

Work operands_of(const ForwardCall& call) {
  const auto [L, O, I] = call.shape;
  Work work{"forward_linear"};
  if (L == 0 || O == 0) return work;
  const Projection features = hadamard_projection(I, call.spec.hadamard_block);
  Operand& x = work.operands.add(Source::x, Along::row, features, forward_quant, call.x);
  Operand& w = work.operands.add(Source::w, Along::row, features, forward_quant, call.w);
  place(x, call.quantized_x);
  place(w, call.quantized_w);
  work.bias = call.bias;
  add_product(work, 0, Result::y, x, w, call.y);
  return work;
}

void add_forward_operand(Work& work, Source source, const MatrixIn& matrix,
                         const ForwardLinearSpec& spec, void* out, const ColumnPowers& powers) {
  const Projection features = hadamard_projection(matrix.cols, spec.hadamard_block);
  Operand& operand = work.operands.add(source, Along::row, features, forward_quant, matrix);
  operand.powers = powers;
  operand.out = weight_codes(out, matrix.rows, features.k_padded);
}

void add_weight(Work& work, const MatrixIn& w, const BackwardLinearSpec& spec, void* out) {
  const Projection features = hadamard_projection(w.rows, spec.hadamard_block);
  Operand& operand = work.operands.add(Source::w, Along::column, features, weight_quant(spec), w);
  operand.out = weight_codes(out, w.cols, features.k_padded);
}

void add_saved_x(Work& work, const Key& key, const MatrixIn& x, const SavedX& saved,
                 const BackwardLinearSpec& spec) {
  Operand& operand = work.operands.add(Source::x, Along::column, token_projection(x.rows, spec),
                                       activation_quant(spec), x);
  operand.sketch_key = key;
  operand.exponents = saved.exponents;
  operand.x.exponents = saved.exponents;
  operand.x.divide = saved.exponents != nullptr;
  if (const auto* groups = std::get_if<Groups>(&saved.codes)) {
    operand.code = Storage::int4;
    operand.groups = *groups;
  } else {
    operand.out = std::get<Codes>(saved.codes);
  }
}

// ---- workspaces --------------------------------------------------------------------------------

std::size_t take_scratch(Work& work, void* workspace, const ScratchSizes& sizes) {
  Operand* const operands = work.operands.begin();
  WorkspaceCursor cursor(workspace), alone(workspace);
  std::int64_t words = 0;
  for (const std::int64_t count : sizes.amax) words += count;
  work.zeroed = cursor.take<std::uint32_t>(words + (sizes.counter ? 1 : 0));
  if (sizes.counter && work.zeroed != nullptr) work.counter = work.zeroed + words;
  work.sum.workspace = cursor.take<float>(sizes.sums);
  work.all_scratch = alone.take<float>(sizes.sums_alone);
  std::uint32_t* amax = work.zeroed;
  for (Operand& operand : work.operands) {
    const std::int64_t count = sizes.amax[&operand - operands];
    if (count == 0 || amax == nullptr) continue;
    operand.out.amax = amax;
    amax += count;
  }
  const auto take = [&](Operand& operand) {
    Codes& out = operand.out;
    if (!operand.scratch) return;
    if (operand.quant.per_tensor && !sizes.repeat_scales) out.scales = 1;
    out.codes = cursor.take<std::int8_t>(out.rows * out.k_padded);
    out.scale = cursor.take<float>(out.scales);
  };
  for (int i = 0; i < 2; ++i) {
    WorkProduct& product = work.products[i];
    if (product.a < 0) continue;
    take(operands[product.a]);
    take(operands[product.b]);
    take_codes(operands[product.a], operands[product.b], product);
    if (work.widens()) work.wide_bias = cursor.take<float>(work.bias.cols);
    if (work.bias.rows > 0) {
      product.args.bias =
          work.widens() ? work.wide_bias : static_cast<const float*>(work.bias.data);
    }
    product.scratch = cursor.take<char>(static_cast<std::int64_t>(sizes.product[i]));
  }
  return std::max(cursor.bytes(), alone.bytes());
}

}  // namespace hot::detail

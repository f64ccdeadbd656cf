// compress_activation and backward_linear: checks, then the backend. No arithmetic here.
#include "hot/backward_linear.h"

#include "arithmetic.h"
#include "checks.h"
#include "config_fields.h"
#include "fingerprint.h"
#include "kernels.h"
#include "work.h"

namespace hot {

using namespace detail;

namespace {

constexpr const char* backward_name = "backward_linear";

void check_spec(const char* call, const BackwardLinearSpec& spec) {
  const int block = spec.hadamard_block;
  if (!is_power_of_two(block) || block > 256) {
    invalid(call, "hadamard_block is ", block, "; expected a power of two from 1 to 256");
  }
  if (spec.gx_bits != 4 && spec.gx_bits != 8) {
    invalid(call, "gx_bits is ", spec.gx_bits, "; expected 4 or 8");
  }
  check_choices(call, spec);
  if (spec.storage != Storage::int8 && spec.low_rank.basis != Basis::full) {
    invalid(call, "storage is ", storage_name(spec.storage), " with basis ",
            basis_name(spec.low_rank.basis),
            "; expected basis full (other bases require storage int8)");
  }
  check_low_rank(spec.low_rank);
}

}  // namespace

Support supported(const Context& context, const LinearShape& shape,
                  const BackwardLinearSpec& spec) noexcept {
  return answer_supported([&] {
    check_shape("backward_linear", shape);
    check_spec("backward_linear", spec);
    token_projection(shape.tokens, spec);
    backend_of(context).gemm_workspace(context, shape.tokens, shape.in_features,
                                       shape.out_features);
  });
}

std::uint64_t saved_format(const BackwardLinearSpec& spec) {
  check_spec("saved_format", spec);
  // Fields that do not affect the bytes get a fixed value.
  BackwardLinearSpec normalised = spec;
  normalised.hadamard_block = 0;
  const bool one_scale = spec.storage == Storage::int8 && spec.gw_scale != Granularity::channel;
  normalised.gw_scale = one_scale ? Granularity::tensor : Granularity::channel;
  if (spec.low_rank.basis == Basis::full) normalised.low_rank = {};
  if (!normalised.low_rank.rows.empty()) normalised.low_rank.rank = 0;
  Fingerprint print;
  add_fields(print.add('x'), normalised, in_saved);
  return print.value();
}

std::uint64_t weight_format(const BackwardLinearSpec& spec) {
  check_spec("weight_format", spec);
  Fingerprint print;
  add_fields(print.add('w'), spec, in_weight);
  return print.value();
}

SavedLayout saved_layout(std::int64_t tokens, std::int64_t in_features,
                         const BackwardLinearSpec& spec) {
  check_shape("saved_layout", {tokens, 0, in_features});
  check_spec("saved_layout", spec);
  return layout_of(tokens, in_features, spec);
}

std::size_t compress_activation_workspace(const Context& context, std::int64_t tokens,
                                          std::int64_t in_features,
                                          const BackwardLinearSpec& spec) {
  const SavedLayout layout = saved_layout(tokens, in_features, spec);
  Work work;
  add_saved_x(work, {}, shape_in(DType::f32, tokens, in_features),
              saved_x(nullptr, layout, tokens, spec), spec);
  return backend_of(context).workspace(context, work);
}

ConstSavedActivation detail::check_saved_x(const Checker& check, const Context& context,
                                           const ConstTensorView& x, const MatrixIn& rows,
                                           const BackwardLinearSpec& spec,
                                           const SavedActivation& saved, Work& work) {
  check_spec(work.call, spec);
  const SavedLayout layout = layout_of(rows.rows, rows.cols, spec);
  const ConstTensorView memory =
      check.buffer("saved", saved.data, saved.bytes, layout.bytes, BufferSize::at_least);
  check.disjoint("saved", memory, "x", x);
  add_saved_x(work, context.key(), rows, saved_x(saved.data, layout, rows.rows, spec), spec);
  return {saved.data, layout.bytes, rows.rows, rows.cols, context.key(), saved_format(spec)};
}

ConstSavedActivation compress_activation(const Context& context, const ConstTensorView& x,
                                         const BackwardLinearSpec& spec,
                                         const SavedActivation& saved, const Workspace& workspace) {
  const StandardArithmetic arithmetic;
  const char* const call = "compress_activation";
  const Checker check(call, context);
  check.input("x", x, float_dtypes, 2, max_dims);
  Work work{call};
  const ConstSavedActivation kept =
      check_saved_x(check, context, x, check.collapsed("x", x), spec, saved, work);
  backend_of(context).run(context, work, check, workspace);
  return kept;
}

void decompress_activation(const Context& context, const ConstSavedActivation& saved,
                           std::int64_t first, std::int64_t last, const BackwardLinearSpec& spec,
                           const TensorView& out) {
  const StandardArithmetic arithmetic;
  const char* const call = "decompress_activation";
  const Checker check(call, context);
  check_spec(call, spec);
  if (spec.low_rank.basis != Basis::full) {
    unsupported(call, "saved has basis ", basis_name(spec.low_rank.basis),
                ", which keeps projected rows and not x; expected basis full");
  }
  check_format(call, "saved", "compress_activation", saved.format, saved_format(spec));
  check_key(call, "saved.key", saved.key);
  check_sizes(call, {"saved.tokens", "saved.in_features"}, {saved.tokens, saved.in_features});
  const SavedLayout layout = layout_of(saved.tokens, saved.in_features, spec);
  const ConstTensorView memory = check.buffer("saved", saved.data, saved.bytes, layout.bytes);
  if (first < 0 || first > saved.tokens) {
    invalid(call, "first is ", first, "; expected 0 to ", saved.tokens, " (saved.tokens)");
  }
  if (last < first || last > saved.tokens) {
    invalid(call, "last is ", last, "; expected first = ", first, " to ", saved.tokens,
            " (saved.tokens)");
  }
  check.output("out", out, float_dtypes, 2, 2);
  check.shape("out", out, {last - first, saved.in_features});
  check.disjoint("out", out, "saved", memory);
  const MatrixOut rows = matrix_out_of(out);
  if (rows.rows == 0 || rows.cols == 0) return;
  const SavedX x = saved_x(saved.data, layout, saved.tokens, spec);
  const Backend& backend = backend_of(context);
  if (const auto* groups = std::get_if<Groups>(&x.codes)) {
    return backend.decompress(context,
                              {groups->packed, groups->row_bytes, groups->scale, Storage::int4,
                               ceil_div(groups->tokens, int4_group), first, rows, x.exponents});
  }
  const Codes& codes = std::get<Codes>(x.codes);
  backend.decompress(context, {codes.codes, codes.k_padded, codes.scale, Storage::int8,
                               codes.scales == 1 ? 0 : 1, first, rows, x.exponents});
}

std::size_t quantized_weight_bytes(std::int64_t out_features, std::int64_t in_features,
                                   const BackwardLinearSpec& spec) {
  const char* const call = "quantized_weight_bytes";
  check_shape(call, {0, out_features, in_features});
  check_spec(call, spec);
  return weight_bytes(in_features, hadamard_projection(out_features, spec.hadamard_block).k_padded);
}

std::size_t quantize_weight_workspace(const Context& context, std::int64_t out_features,
                                      std::int64_t in_features, const BackwardLinearSpec& spec) {
  quantized_weight_bytes(out_features, in_features, spec);  // throws the errors of the call itself
  Work work;
  add_weight(work, shape_in(DType::f32, out_features, in_features), spec, nullptr);
  return backend_of(context).workspace(context, work);
}

ConstQuantizedWeight quantize_weight(const Context& context, const ConstTensorView& w,
                                     const BackwardLinearSpec& spec, const QuantizedWeight& out,
                                     const Workspace& workspace) {
  const StandardArithmetic arithmetic;
  const char* const call = "quantize_weight";
  const Checker check(call, context);
  check_spec(call, spec);
  check.input("w", w, float_dtypes, 2, 2);
  const MatrixIn weight = matrix_of(w);
  const std::int64_t k_padded = hadamard_projection(weight.rows, spec.hadamard_block).k_padded;
  const ConstTensorView memory =
      check.buffer("out", out.data, out.bytes, weight_bytes(weight.cols, k_padded));
  check.disjoint("out", memory, "w", w);
  Work work{call};
  add_weight(work, weight, spec, out.data);
  backend_of(context).run(context, work, check, workspace);
  return {out.data, out.bytes, weight.rows, weight.cols, weight_format(spec)};
}

std::size_t backward_linear_workspace(const Context& context, const LinearShape& shape,
                                      const BackwardLinearSpec& spec, bool need_gx, bool need_gw) {
  check_shape("backward_linear_workspace", shape);
  check_spec("backward_linear_workspace", spec);
  Work work =
      operands_of(backward_shape(spec, shape, DType::f32, DType::f32, need_gx, need_gw, true));
  return backend_of(context).workspace(context, work);
}

namespace {

// Checks `saved` against the sizes of the call, fills the fields that g_w reads, and returns the
// memory of `saved`.
ConstTensorView resolve_saved(const Checker& check, BackwardCall& call,
                              const ConstSavedActivation& saved, bool has_weight) {
  const BackwardLinearSpec& spec = call.spec;
  LinearShape& shape = call.shape;
  check_format(backward_name, "saved", "compress_activation", saved.format, saved_format(spec));
  if (has_weight && saved.in_features != shape.in_features) {
    invalid(backward_name, "saved has ", saved.in_features, " in_features; expected w's, ",
            shape.in_features);
  }
  shape.in_features = saved.in_features;
  if (saved.tokens != shape.tokens) {
    invalid(backward_name, "saved has ", saved.tokens, " tokens; expected gy's, ", shape.tokens);
  }
  check_key(backward_name, "saved.key", saved.key);
  const SavedLayout layout = saved_layout(saved.tokens, saved.in_features, spec);
  const ConstTensorView memory = check.buffer("saved", saved.data, saved.bytes, layout.bytes);
  call.saved = saved_x(saved.data, layout, saved.tokens, spec);
  call.sketch_key = saved.key;
  return memory;
}

void check_and_run(const Context& context, const ConstTensorView& gy, const WeightArgument& w,
                   const ConstSavedActivation& saved, const BackwardLinearSpec& spec,
                   const BackwardOutputs& out, const Workspace& workspace) {
  const StandardArithmetic arithmetic;
  const Checker check(backward_name, context);
  check_spec(backward_name, spec);
  if (out.gx == nullptr && out.gw == nullptr && out.gb == nullptr) {
    invalid(backward_name, "out requests no gradient; set at least one of gx, gw, gb");
  }
  check.input("gy", gy, float_dtypes, 2, max_dims);
  const MatrixIn rows = check.collapsed("gy", gy);
  BackwardCall call{spec, {rows.rows, rows.cols, 0}};
  call.gy = rows;
  LinearShape& shape = call.shape;

  ConstTensorView weight_memory{};
  if (out.gx != nullptr) {
    const ResolvedWeight weight = resolve_weight(
        check, w,
        {backward_name, "quantize_weight", weight_format(spec), true, shape.out_features, "gy",
         hadamard_projection(shape.out_features, spec.hadamard_block).k_padded});
    call.w = weight.matrix;
    call.quantized = weight.quantized;
    shape.in_features = weight.other_size;
    weight_memory = weight.memory;
  }
  ConstTensorView saved_memory{};
  if (out.gw != nullptr) saved_memory = resolve_saved(check, call, saved, out.gx != nullptr);

  const struct {
    const char* name;
    const TensorView* view;
    int min_ndim, max_ndim;
  } outputs[] = {{"gx", out.gx, 2, max_dims}, {"gw", out.gw, 2, 2}, {"gb", out.gb, 1, 1}};
  for (const auto& output : outputs) {
    if (output.view == nullptr) continue;
    check.output(output.name, *output.view, float_dtypes, output.min_ndim, output.max_ndim);
    check.disjoint(output.name, *output.view, "gy", gy);
    if (out.gx != nullptr) check.disjoint(output.name, *output.view, "w", weight_memory);
    if (out.gw != nullptr) check.disjoint(output.name, *output.view, "saved", saved_memory);
    for (const auto& other : outputs) {
      if (&other == &output) break;
      if (other.view != nullptr) check.disjoint(output.name, *output.view, other.name, *other.view);
    }
  }
  if (out.gx != nullptr) {
    call.gx = check.collapsed_out("gx", *out.gx, shape.tokens, shape.in_features);
  }
  if (out.gw != nullptr) {
    check.shape("gw", *out.gw, {shape.out_features, shape.in_features});
    call.gw = matrix_out_of(*out.gw);
  }
  if (out.gb != nullptr) {
    check.shape("gb", *out.gb, {shape.out_features});
    call.gb = {out.gb->data, out.gb->dtype, 1, shape.out_features, 0, out.gb->stride[0]};
  }
  // Without g_w the projection is unused. Building it checks low_rank against the tokens.
  if (out.gw == nullptr) token_projection(shape.tokens, spec);
  call.accumulate = out.accumulate;
  Work work = operands_of(call);
  backend_of(context).run(context, work, check, workspace);
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

// forward_linear: checks, then the backend. No arithmetic here.
#include "hot/forward_linear.h"

#include <optional>

#include "arithmetic.h"
#include "backward_work.h"
#include "checks.h"
#include "fingerprint.h"
#include "forward_work.h"
#include "kernels.h"

namespace hot {

using detail::backend_of;
using detail::bytes_view;
using detail::check_forward_spec;
using detail::check_shape;
using detail::Checker;
using detail::float_dtypes;
using detail::forward_k;

void detail::check_forward_spec(const char* call, const ForwardLinearSpec& spec) {
  check_hadamard_block(call, spec.hadamard_block);
  if (spec.hadamard_block == 128) {  // 64 was never worse; ConvRot's weights use 256
    invalid(call, "hadamard_block is 128; expected a power of two from 1 to 64, or 256");
  }
}

detail::ColumnPowers detail::column_powers(const Checker& check, const char* call,
                                           const ConstTensorView& exponents, std::int64_t features,
                                           bool divide) {
  if (!is_given(exponents)) return {};
  check.input("exponents", exponents, {DType::i8}, 1, 1);
  check.shape("exponents", exponents, {features});
  check.rows_contiguous("exponents", exponents);
  if (reinterpret_cast<std::uintptr_t>(exponents.data) % 16 != 0) {
    invalid(call, "exponents is not aligned to 16 bytes");
  }
  return {static_cast<const std::int8_t*>(exponents.data), divide};
}

namespace {

constexpr const char* forward_name = "forward_linear";

// Argument x: floats (`view`) or quantised (`quantized`).
struct InputArgument {
  const ConstTensorView* view;
  const ConstQuantizedInput* quantized;
};

// Checks x, writes x and its sizes into `call`, and returns x's memory.
ConstTensorView resolve_input(const Checker& check, const Context& context, const InputArgument& x,
                              detail::ForwardCall& call) {
  LinearShape& shape = call.work.shape;
  if (x.quantized == nullptr) {
    check.input("x", *x.view, float_dtypes, 2, max_dims);
    call.x = check.collapsed("x", *x.view);
    shape.tokens = call.x.rows;
    shape.in_features = call.x.cols;
    return *x.view;
  }
  const ConstQuantizedInput& codes = *x.quantized;
  detail::check_sizes(forward_name, {"tokens", "in_features"}, {codes.tokens, codes.in_features});
  detail::check_format(forward_name, "x", "quantize_forward_input", codes.format,
                       forward_input_format(call.work.spec));
  const std::int64_t k = forward_k(codes.in_features, call.work.spec);
  detail::check_bytes(forward_name, "x", codes.data, codes.bytes,
                      detail::weight_bytes(codes.tokens, k));
  shape.tokens = codes.tokens;
  shape.in_features = codes.in_features;
  call.quantized_x = detail::quantized_operand(codes.data, codes.tokens, k);
  const ConstTensorView memory = bytes_view(codes.data, codes.bytes, context.device());
  check.uses("x", memory);
  return memory;
}

void check_and_run(const Context& context, const InputArgument& given_x,
                   const detail::WeightArgument& w, const ConstTensorView& bias,
                   const ForwardLinearSpec& spec, const TensorView& y, const Workspace& workspace) {
  const detail::StandardArithmetic arithmetic;
  const Checker check(forward_name, context);
  check_forward_spec(forward_name, spec);
  detail::ForwardCall call{{spec, {}, given_x.quantized == nullptr, w.quantized == nullptr}};
  LinearShape& shape = call.work.shape;
  const ConstTensorView x = resolve_input(check, context, given_x, call);
  const detail::ResolvedWeight weight =
      detail::resolve_weight(check, w,
                             {forward_name, "quantize_forward_weight", forward_weight_format(spec),
                              false, shape.in_features, "x", forward_k(shape.in_features, spec)},
                             x.device);
  call.w = weight.matrix;
  call.quantized = weight.quantized.value_or(detail::Operand{});
  shape.out_features = weight.other_size;
  check_shape(forward_name, shape);

  check.output("y", y, float_dtypes, 2, max_dims);
  check.disjoint("y", y, "x", x);
  check.disjoint("y", y, "w", weight.memory);
  call.work.bias = detail::is_given(bias);
  if (call.work.bias) {
    check.input("bias", bias, float_dtypes, 1, 1);
    check.shape("bias", bias, {shape.out_features});
    check.disjoint("y", y, "bias", bias);
    call.bias = {bias.data, bias.dtype, 1, shape.out_features, 0, bias.stride[0]};
    call.work.wide = bias.dtype != DType::f32 || (bias.stride[0] != 1 && shape.out_features > 1);
  }
  call.y = check.collapsed_out("y", y, shape.tokens, shape.out_features);
  backend_of(context).forward(context, call, check, workspace);
}

}  // namespace

Support forward_supported(const Context& context, const LinearShape& shape,
                          const ForwardLinearSpec& spec) noexcept {
  return detail::answer_supported([&] { forward_linear_workspace(context, shape, spec, false); });
}

std::uint64_t forward_weight_format(const ForwardLinearSpec& spec) {
  check_forward_spec("forward_weight_format", spec);
  return detail::Fingerprint().add('f').add(spec.hadamard_block).value();
}

std::size_t forward_weight_bytes(std::int64_t out_features, std::int64_t in_features,
                                 const ForwardLinearSpec& spec) {
  const char* const call = "forward_weight_bytes";
  check_shape(call, {0, out_features, in_features});
  check_forward_spec(call, spec);
  return detail::weight_bytes(out_features, forward_k(in_features, spec));
}

ConstQuantizedWeight quantize_forward_weight(const Context& context, const ConstTensorView& w,
                                             const ForwardLinearSpec& spec,
                                             const QuantizedWeight& out) {
  const detail::StandardArithmetic arithmetic;
  const char* const call = "quantize_forward_weight";
  const Checker check(call, context);
  check_forward_spec(call, spec);
  check.input("w", w, float_dtypes, 2, 2);
  const detail::MatrixIn weight = detail::matrix_of(w);
  const std::int64_t k = forward_k(weight.cols, spec);
  detail::check_bytes(call, "out", out.data, out.bytes, detail::weight_bytes(weight.rows, k));
  check.disjoint("out", bytes_view(out.data, out.bytes, w.device), "w", w);
  if (weight.rows > 0) {
    backend_of(context).quantize_forward_weight(context,
                                                {weight, spec.hadamard_block, detail::forward_quant,
                                                 detail::weight_operand(out.data, weight.rows, k)});
  }
  return {out.data, out.bytes, weight.rows, weight.cols, forward_weight_format(spec)};
}

std::uint64_t forward_input_format(const ForwardLinearSpec& spec) {
  check_forward_spec("forward_input_format", spec);
  return detail::Fingerprint().add('i').add(spec.hadamard_block).value();
}

std::size_t forward_input_bytes(std::int64_t tokens, std::int64_t in_features,
                                const ForwardLinearSpec& spec) {
  const char* const call = "forward_input_bytes";
  detail::check_sizes(call, {"tokens", "in_features"}, {tokens, in_features});
  check_forward_spec(call, spec);
  return detail::weight_bytes(tokens, forward_k(in_features, spec));
}

namespace {

constexpr const char* input_name = "quantize_forward_input";

// Quantises x, and compresses it if `kept` (its spec) is not null.
ForwardInput quantize_input(const Context& context, const ConstTensorView& x,
                            const ForwardLinearSpec& spec, const QuantizedInput& out,
                            const BackwardLinearSpec* kept, const SavedActivation& saved,
                            const Workspace& workspace, const ConstTensorView& exponents) {
  const detail::StandardArithmetic arithmetic;
  const Checker check(input_name, context);
  check_forward_spec(input_name, spec);
  check.input("x", x, float_dtypes, 2, max_dims);
  const detail::MatrixIn rows = check.collapsed("x", x);
  const std::int64_t k = forward_k(rows.cols, spec);
  detail::check_bytes(input_name, "out", out.data, out.bytes, detail::weight_bytes(rows.rows, k));
  const ConstTensorView memory = bytes_view(out.data, out.bytes, x.device);
  check.disjoint("out", memory, "x", x);
  const detail::ColumnPowers powers =
      detail::column_powers(check, input_name, exponents, rows.cols, true);
  check.disjoint("out", memory, "exponents", exponents);
  check.uses("out", memory);
  ForwardInput result{{out.data, out.bytes, rows.rows, rows.cols, forward_input_format(spec)}, {}};
  std::optional<detail::CompressCall> compress;
  if (kept != nullptr) {
    compress.emplace(check, input_name, context, x, rows, *kept, saved, workspace);
    result.saved = compress->kept;
    const ConstTensorView kept_memory = bytes_view(saved.data, result.saved.bytes, x.device);
    check.disjoint("saved", kept_memory, "out", memory);
    check.disjoint("saved", kept_memory, "exponents", exponents);
  }
  const detail::CompressJob* const job = compress && compress->job ? &*compress->job : nullptr;
  if (rows.rows > 0) {
    backend_of(context).quantize_forward_input(
        context,
        {rows, spec.hadamard_block, detail::forward_quant,
         detail::weight_operand(out.data, rows.rows, k), powers},
        job, workspace.data);
  } else if (job != nullptr) {
    backend_of(context).compress(context, *job, workspace.data);
  }
  return result;
}

}  // namespace

ConstQuantizedInput quantize_forward_input(const Context& context, const ConstTensorView& x,
                                           const ForwardLinearSpec& spec, const QuantizedInput& out,
                                           const ConstTensorView& exponents) {
  return quantize_input(context, x, spec, out, nullptr, {}, {}, exponents).quantized;
}

ForwardInput quantize_forward_input(const Context& context, const ConstTensorView& x,
                                    const ForwardLinearSpec& spec, const QuantizedInput& out,
                                    const BackwardLinearSpec& kept, const SavedActivation& saved,
                                    const Workspace& workspace, const ConstTensorView& exponents) {
  return quantize_input(context, x, spec, out, &kept, saved, workspace, exponents);
}

std::size_t forward_linear_workspace(const Context& context, const LinearShape& shape,
                                     const ForwardLinearSpec& spec, bool quantized_weight,
                                     bool quantized_input) {
  check_shape("forward_linear_workspace", shape);
  check_forward_spec("forward_linear_workspace", spec);
  return backend_of(context).forward_workspace(
      context, {spec, shape, !quantized_input, !quantized_weight, true, true});
}

void forward_linear(const Context& context, const ConstTensorView& x, const ConstTensorView& w,
                    const ConstTensorView& bias, const ForwardLinearSpec& spec, const TensorView& y,
                    const Workspace& workspace) {
  check_and_run(context, {&x, nullptr}, {&w, nullptr}, bias, spec, y, workspace);
}

void forward_linear(const Context& context, const ConstTensorView& x, const ConstQuantizedWeight& w,
                    const ConstTensorView& bias, const ForwardLinearSpec& spec, const TensorView& y,
                    const Workspace& workspace) {
  check_and_run(context, {&x, nullptr}, {nullptr, &w}, bias, spec, y, workspace);
}

void forward_linear(const Context& context, const ConstQuantizedInput& x, const ConstTensorView& w,
                    const ConstTensorView& bias, const ForwardLinearSpec& spec, const TensorView& y,
                    const Workspace& workspace) {
  check_and_run(context, {nullptr, &x}, {&w, nullptr}, bias, spec, y, workspace);
}

void forward_linear(const Context& context, const ConstQuantizedInput& x,
                    const ConstQuantizedWeight& w, const ConstTensorView& bias,
                    const ForwardLinearSpec& spec, const TensorView& y,
                    const Workspace& workspace) {
  check_and_run(context, {nullptr, &x}, {nullptr, &w}, bias, spec, y, workspace);
}

}  // namespace hot

// forward_linear: checks, then the backend; no arithmetic here.
#include "hot/forward_linear.h"

#include <string>

#include "arithmetic.h"
#include "checks.h"
#include "fingerprint.h"
#include "forward_work.h"
#include "kernels.h"

namespace hot {

using detail::backend_of;
using detail::Checker;
using detail::float_dtypes;
using detail::forward_k;

namespace {

constexpr const char* forward_name = "forward_linear";

void check_spec(const char* call, const ForwardLinearSpec& spec) {
  detail::check_hadamard_block(call, spec.hadamard_block);
}

void check_shape(const char* call, const LinearShape& shape) {
  detail::check_sizes(call, {"tokens", "out_features", "in_features"},
                      {shape.tokens, shape.out_features, shape.in_features});
}

void check_and_run(const Context& context, const ConstTensorView& x,
                   const detail::WeightArgument& w, const ConstTensorView& bias,
                   const ForwardLinearSpec& spec, const TensorView& y, const Workspace& workspace) {
  const detail::StandardArithmetic arithmetic;
  const Checker check(forward_name, context);
  check_spec(forward_name, spec);
  check.input("x", x, float_dtypes, 2, max_dims);
  detail::ForwardCall call{{spec, {}, w.quantized == nullptr}};
  call.x = check.collapsed("x", x);
  LinearShape& shape = call.work.shape;
  shape.tokens = call.x.rows;
  shape.in_features = call.x.cols;
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
  call.work.bias = bias.ndim != 0;
  if (call.work.bias) {
    check.input("bias", bias, float_dtypes, 1, 1);
    check.shape("bias", bias, {shape.out_features});
    check.disjoint("y", y, "bias", bias);
    call.bias = {bias.data, bias.dtype, 1, shape.out_features, 0, bias.stride[0]};
    call.work.wide = bias.dtype != DType::f32 || (bias.stride[0] != 1 && shape.out_features > 1);
  }
  call.y = check.collapsed_out("y", y);
  if (call.y.rows != shape.tokens || call.y.cols != shape.out_features) {
    detail::invalid(forward_name, "y has shape " + detail::shape_text(y) + "; expected " +
                                      detail::shape_text({shape.tokens, shape.out_features}) +
                                      ", leading dimensions flattened");
  }
  const detail::Backend& backend = backend_of(context);
  check.workspace(workspace, backend.forward_workspace(context, call.work));
  if (shape.tokens == 0 || shape.out_features == 0) return;
  backend.forward(context, call, workspace.data);
}

}  // namespace

Support forward_supported(const Context& context, const LinearShape& shape,
                          const ForwardLinearSpec& spec) noexcept {
  return detail::answer_supported([&] { forward_linear_workspace(context, shape, spec, false); });
}

std::uint64_t forward_weight_format(const ForwardLinearSpec& spec) {
  check_spec("forward_weight_format", spec);
  return detail::Fingerprint().add('f').add(spec.hadamard_block).value();
}

std::size_t forward_weight_bytes(std::int64_t out_features, std::int64_t in_features,
                                 const ForwardLinearSpec& spec) {
  const char* const call = "forward_weight_bytes";
  check_shape(call, {0, out_features, in_features});
  check_spec(call, spec);
  return detail::weight_bytes(out_features, forward_k(in_features, spec));
}

ConstQuantizedWeight quantize_forward_weight(const Context& context, const ConstTensorView& w,
                                             const ForwardLinearSpec& spec,
                                             const QuantizedWeight& out) {
  const detail::StandardArithmetic arithmetic;
  const char* const call = "quantize_forward_weight";
  const Checker check(call, context);
  check_spec(call, spec);
  check.input("w", w, float_dtypes, 2, 2);
  const detail::MatrixIn weight = detail::matrix_of(w);
  const std::int64_t k = forward_k(weight.cols, spec);
  detail::check_bytes(call, "out", out.data, out.bytes, detail::weight_bytes(weight.rows, k));
  check.disjoint("out", vector(out.data, DType::i8, static_cast<std::int64_t>(out.bytes), w.device),
                 "w", w);
  if (weight.rows > 0) {
    backend_of(context).quantize_forward_weight(context,
                                                {weight, spec.hadamard_block, detail::forward_quant,
                                                 detail::weight_operand(out.data, weight.rows, k)});
  }
  return {out.data, out.bytes, weight.rows, weight.cols, forward_weight_format(spec)};
}

std::size_t forward_linear_workspace(const Context& context, const LinearShape& shape,
                                     const ForwardLinearSpec& spec, bool quantized_weight) {
  check_shape("forward_linear_workspace", shape);
  check_spec("forward_linear_workspace", spec);
  return backend_of(context).forward_workspace(context,
                                               {spec, shape, !quantized_weight, true, true});
}

void forward_linear(const Context& context, const ConstTensorView& x, const ConstTensorView& w,
                    const ConstTensorView& bias, const ForwardLinearSpec& spec, const TensorView& y,
                    const Workspace& workspace) {
  check_and_run(context, x, {&w, nullptr}, bias, spec, y, workspace);
}

void forward_linear(const Context& context, const ConstTensorView& x, const ConstQuantizedWeight& w,
                    const ConstTensorView& bias, const ForwardLinearSpec& spec, const TensorView& y,
                    const Workspace& workspace) {
  check_and_run(context, x, {nullptr, &w}, bias, spec, y, workspace);
}

}  // namespace hot

// forward_linear: checks, then the backend. No arithmetic here.
#include "hot/forward_linear.h"

#include "arithmetic.h"
#include "checks.h"
#include "fingerprint.h"
#include "kernels.h"
#include "work.h"

namespace hot {

using namespace detail;

void detail::check_forward_spec(const char* call, const ForwardLinearSpec& spec) {
  const int block = spec.hadamard_block;
  if (is_power_of_two(block) && (block <= 64 || block == 256)) return;  // 128: 64 was never worse
  invalid(call, "hadamard_block is ", block, "; expected a power of two from 1 to 64, or 256");
}

ColumnPowers detail::column_powers(const Checker& check, const char* call,
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
ConstTensorView resolve_input(const Checker& check, const InputArgument& x, ForwardCall& call) {
  LinearShape& shape = call.shape;
  if (x.quantized == nullptr) {
    check.input("x", *x.view, float_dtypes, 2, max_dims);
    call.x = check.collapsed("x", *x.view);
    shape.tokens = call.x.rows;
    shape.in_features = call.x.cols;
    return *x.view;
  }
  const ConstQuantizedInput& codes = *x.quantized;
  check_sizes(forward_name, {"tokens", "in_features"}, {codes.tokens, codes.in_features});
  check_format(forward_name, "x", "quantize_forward_input", codes.format,
               forward_input_format(call.spec));
  const std::int64_t k = forward_k(codes.in_features, call.spec);
  shape.tokens = codes.tokens;
  shape.in_features = codes.in_features;
  const ConstTensorView memory =
      check.buffer("x", codes.data, codes.bytes, weight_bytes(codes.tokens, k));
  call.quantized_x = weight_codes(codes.data, codes.tokens, k);
  return memory;
}

void check_and_run(const Context& context, const InputArgument& given_x, const WeightArgument& w,
                   const ConstTensorView& bias, const ForwardLinearSpec& spec, const TensorView& y,
                   const Workspace& workspace) {
  const StandardArithmetic arithmetic;
  const Checker check(forward_name, context);
  check_forward_spec(forward_name, spec);
  ForwardCall call{spec, {}};
  LinearShape& shape = call.shape;
  const ConstTensorView x = resolve_input(check, given_x, call);
  const ResolvedWeight weight =
      resolve_weight(check, w,
                     {forward_name, "quantize_forward_weight", forward_weight_format(spec), false,
                      shape.in_features, "x", forward_k(shape.in_features, spec)});
  call.w = weight.matrix;
  call.quantized_w = weight.quantized;
  shape.out_features = weight.other_size;
  check_shape(forward_name, shape);

  check.output("y", y, float_dtypes, 2, max_dims);
  check.disjoint("y", y, "x", x);
  check.disjoint("y", y, "w", weight.memory);
  if (is_given(bias)) {
    check.input("bias", bias, float_dtypes, 1, 1);
    check.shape("bias", bias, {shape.out_features});
    check.disjoint("y", y, "bias", bias);
    call.bias = {bias.data, bias.dtype, 1, shape.out_features, 0, bias.stride[0]};
  }
  call.y = check.collapsed_out("y", y, shape.tokens, shape.out_features);
  Work work = operands_of(call);
  backend_of(context).run(context, work, check, workspace);
}

}  // namespace

Support forward_supported(const Context& context, const LinearShape& shape,
                          const ForwardLinearSpec& spec) noexcept {
  return answer_supported([&] { forward_linear_workspace(context, shape, spec, false); });
}

std::uint64_t forward_weight_format(const ForwardLinearSpec& spec) {
  check_forward_spec("forward_weight_format", spec);
  return Fingerprint().add('f').add(spec.hadamard_block).value();
}

std::size_t forward_weight_bytes(std::int64_t out_features, std::int64_t in_features,
                                 const ForwardLinearSpec& spec) {
  const char* const call = "forward_weight_bytes";
  check_shape(call, {0, out_features, in_features});
  check_forward_spec(call, spec);
  return weight_bytes(out_features, forward_k(in_features, spec));
}

ConstQuantizedWeight quantize_forward_weight(const Context& context, const ConstTensorView& w,
                                             const ForwardLinearSpec& spec,
                                             const QuantizedWeight& out) {
  const StandardArithmetic arithmetic;
  const char* const call = "quantize_forward_weight";
  const Checker check(call, context);
  check_forward_spec(call, spec);
  check.input("w", w, float_dtypes, 2, 2);
  const MatrixIn weight = matrix_of(w);
  const std::size_t bytes = weight_bytes(weight.rows, forward_k(weight.cols, spec));
  check.disjoint("out", check.buffer("out", out.data, out.bytes, bytes), "w", w);
  Work work{call};
  add_forward_operand(work, Source::w, weight, spec, out.data);
  backend_of(context).run(context, work, check, {});
  return {out.data, out.bytes, weight.rows, weight.cols, forward_weight_format(spec)};
}

void dequantize_weight(const Context& context, const ConstQuantizedWeight& w,
                       const ForwardLinearSpec& spec, const TensorView& out,
                       const ConstTensorView& exponents) {
  const StandardArithmetic arithmetic;
  const char* const call = "dequantize_weight";
  const Checker check(call, context);
  check_forward_spec(call, spec);
  const ResolvedWeight weight =
      resolve_weight(check, {nullptr, &w},
                     {call, "quantize_forward_weight", forward_weight_format(spec), false,
                      w.in_features, "w", forward_k(w.in_features, spec)});
  check.output("out", out, float_dtypes, 2, 2);
  check.shape("out", out, {w.out_features, w.in_features});
  check.disjoint("out", out, "w", weight.memory);
  const ColumnPowers powers = column_powers(check, call, exponents, w.in_features, true);
  check.disjoint("out", out, "exponents", exponents);
  if (w.out_features == 0 || w.in_features == 0) return;
  backend_of(context).dequantize_weight(
      context, {*weight.quantized, spec.hadamard_block, powers, matrix_out_of(out)});
}

std::uint64_t forward_input_format(const ForwardLinearSpec& spec) {
  check_forward_spec("forward_input_format", spec);
  return Fingerprint().add('i').add(spec.hadamard_block).value();
}

std::size_t forward_input_bytes(std::int64_t tokens, std::int64_t in_features,
                                const ForwardLinearSpec& spec) {
  const char* const call = "forward_input_bytes";
  check_sizes(call, {"tokens", "in_features"}, {tokens, in_features});
  check_forward_spec(call, spec);
  return weight_bytes(tokens, forward_k(in_features, spec));
}

namespace {

constexpr const char* input_name = "quantize_forward_input";

// Quantises x, and compresses it if `kept` (its spec) is not null.
ForwardInput quantize_input(const Context& context, const ConstTensorView& x,
                            const ForwardLinearSpec& spec, const QuantizedInput& out,
                            const BackwardLinearSpec* kept, const SavedActivation& saved,
                            const Workspace& workspace, const ConstTensorView& exponents) {
  const StandardArithmetic arithmetic;
  const Checker check(input_name, context);
  check_forward_spec(input_name, spec);
  check.input("x", x, float_dtypes, 2, max_dims);
  const MatrixIn rows = check.collapsed("x", x);
  const std::size_t bytes = weight_bytes(rows.rows, forward_k(rows.cols, spec));
  const ConstTensorView memory = check.buffer("out", out.data, out.bytes, bytes);
  check.disjoint("out", memory, "x", x);
  const ColumnPowers powers = column_powers(check, input_name, exponents, rows.cols, true);
  check.disjoint("out", memory, "exponents", exponents);
  ForwardInput result{{out.data, out.bytes, rows.rows, rows.cols, forward_input_format(spec)}, {}};
  Work work{input_name};
  add_forward_operand(work, Source::x, rows, spec, out.data, powers);
  if (kept != nullptr) {
    result.saved = check_saved_x(check, context, x, rows, *kept, saved, work);
    const ConstTensorView saved_memory =
        vector(saved.data, DType::i8, static_cast<std::int64_t>(result.saved.bytes), x.device);
    check.disjoint("saved", saved_memory, "out", memory);
    check.disjoint("saved", saved_memory, "exponents", exponents);
  }
  backend_of(context).run(context, work, check, workspace);
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
  ForwardCall call = forward_shape(spec, shape, DType::f32, quantized_input, quantized_weight);
  call.bias = shape_in(DType::bf16, 1, shape.out_features);  // needs the most
  Work work = operands_of(call);
  return backend_of(context).workspace(context, work);
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

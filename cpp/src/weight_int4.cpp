// weight_int4: checks, then the backend. No arithmetic here.
#include "hot/weight_int4.h"

#include "arithmetic.h"
#include "checks.h"
#include "fingerprint.h"
#include "kernels.h"
#include "work.h"

namespace hot {

using namespace detail;

namespace {

// Checks the spec and returns the length of a row of codes.
std::int64_t row_length(const char* call, std::int64_t in_features, const WeightInt4Spec& spec) {
  check_forward_spec(call, spec.forward);
  if (spec.group != 32 && spec.group != 64) {
    invalid(call, "group is ", spec.group, "; expected 32 or 64");
  }
  const std::int64_t k = forward_k(in_features, spec.forward);
  if (k % spec.group != 0) {
    invalid(call, "w has ", in_features, " in features, ", k, " after padding to whole blocks of ",
            spec.forward.hadamard_block, "; expected a multiple of group = ", spec.group);
  }
  return k;
}

}  // namespace

std::uint64_t weight_int4_format(const WeightInt4Spec& spec) {
  row_length("weight_int4_format", 0, spec);
  return Fingerprint().add('4').add(spec.forward.hadamard_block).add(spec.group).value();
}

std::size_t weight_int4_bytes(std::int64_t out_features, std::int64_t in_features,
                              const WeightInt4Spec& spec) {
  const char* const call = "weight_int4_bytes";
  check_sizes(call, {"out_features", "in_features"}, {out_features, in_features});
  return int4_weight_bytes(out_features, row_length(call, in_features, spec), spec.group);
}

ConstQuantizedWeight quantize_weight_int4(const Context& context, const ConstTensorView& w,
                                          const ConstTensorView& exponents,
                                          const WeightInt4Spec& spec, const QuantizedWeight& out) {
  const StandardArithmetic arithmetic;
  const char* const call = "quantize_weight_int4";
  const Checker check(call, context);
  check.input("w", w, float_dtypes, 2, 2);
  const MatrixIn weight = matrix_of(w);
  const std::int64_t k = row_length(call, weight.cols, spec);
  const ConstTensorView memory =
      check.buffer("out", out.data, out.bytes, int4_weight_bytes(weight.rows, k, spec.group));
  const ColumnPowers powers = column_powers(check, call, exponents, weight.cols, false);
  check.disjoint("out", memory, "w", w);
  check.disjoint("out", memory, "exponents", exponents);
  if (weight.rows > 0) {
    backend_of(context).quantize_weight_int4(context,
                                             {weight, spec.forward.hadamard_block, powers,
                                              int4_weight(out.data, weight.rows, k, spec.group)});
  }
  return {out.data, out.bytes, weight.rows, weight.cols, weight_int4_format(spec)};
}

ConstQuantizedWeight expand_weight_int4(const Context& context, const ConstQuantizedWeight& w,
                                        const WeightInt4Spec& spec, const QuantizedWeight& out) {
  const char* const call = "expand_weight_int4";
  check_sizes(call, {"out_features", "in_features"}, {w.out_features, w.in_features});
  const std::int64_t k = row_length(call, w.in_features, spec);
  check_format(call, "w", "quantize_weight_int4", w.format, weight_int4_format(spec));
  const Checker check(call, context);
  const ConstTensorView from =
      check.buffer("w", w.data, w.bytes, int4_weight_bytes(w.out_features, k, spec.group));
  check.disjoint("out", check.buffer("out", out.data, out.bytes, weight_bytes(w.out_features, k)),
                 "w", from);
  if (w.out_features > 0) {
    backend_of(context).expand_weight_int4(
        context, int4_weight(const_cast<void*>(w.data), w.out_features, k, spec.group),
        weight_codes(out.data, w.out_features, k));
  }
  return {out.data, out.bytes, w.out_features, w.in_features, forward_weight_format(spec.forward)};
}

}  // namespace hot

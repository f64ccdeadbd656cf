// Public functions of the single stages: check the arguments, select the backend, call it. All
// checks run before anything is written.
#include <algorithm>

#include "arithmetic.h"
#include "checks.h"
#include "hot/hot.h"
#include "kernels.h"

namespace hot {

using namespace detail;

const detail::Backend& detail::backend_of(const Context& context) {
  return context.device().type == Device::Type::cpu ? cpu_backend() : cuda_backend();
}

namespace {

bool same_elements(const ConstTensorView& a, const ConstTensorView& b) {
  if (a.data != b.data || a.dtype != b.dtype) return false;
  for (int d = 0; d < a.ndim; ++d) {
    if (a.shape[d] > 1 && a.stride[d] != b.stride[d]) return false;
  }
  return true;
}

}  // namespace

std::int64_t scale_count(std::int64_t rows, std::int64_t cols, Granularity scale) {
  return scale == Granularity::tensor ? 1 : scale == Granularity::token ? rows : cols;
}

void fwht(const Context& context, const ConstTensorView& x, int axis, int block,
          const TensorView& out) {
  const StandardArithmetic arithmetic;
  const Checker check("fwht", context);
  check.input("x", x, float_dtypes, 1, max_dims);
  check.output("out", out, float_dtypes, 1, max_dims);
  if (axis < -x.ndim || axis >= x.ndim) {
    invalid("fwht", "axis is ", axis, "; expected ", -x.ndim, " to ", x.ndim - 1);
  }
  if (!is_power_of_two(block) || block > max_fwht_block) {
    invalid("fwht", "block is ", block, "; expected a power of two from 1 to ", max_fwht_block);
  }
  const int along = axis < 0 ? axis + x.ndim : axis;
  if (x.shape[along] % block != 0) {
    invalid("fwht", "x has ", x.shape[along], " elements along axis ", axis,
            "; expected a multiple of block = ", block);
  }
  if (out.ndim != x.ndim || !std::equal(x.shape, x.shape + x.ndim, out.shape)) {
    invalid("fwht", "out has shape ", shape_text(out), "; expected that of x, ", shape_text(x));
  }
  if (!same_elements(x, out)) check.disjoint("out", out, "x", x);
  for (int d = 0; d < x.ndim; ++d) {
    if (x.shape[d] == 0) return;
  }

  FwhtArgs args{};
  args.x = x.data;
  args.x_dtype = x.dtype;
  args.out = out.data;
  args.out_dtype = out.dtype;
  args.axis_length = x.shape[along];
  args.axis_stride_x = x.stride[along];
  args.axis_stride_out = out.stride[along];
  args.block = block;
  for (int d = 0; d < x.ndim; ++d) {
    if (d == along) continue;
    args.outer_shape[args.outer_dims] = x.shape[d];
    args.outer_stride_x[args.outer_dims] = x.stride[d];
    args.outer_stride_out[args.outer_dims] = out.stride[d];
    ++args.outer_dims;
  }
  backend_of(context).fwht(context, args);
}

void hla(const Context& context, const ConstTensorView& x, const LowRank& spec, Side side,
         const TensorView& out) {
  const StandardArithmetic arithmetic;
  const Checker check("hla", context);
  check.input("x", x, float_dtypes, 2, 2);
  check.output("out", out, float_dtypes, 2, 2);
  const Projection p = make_projection(x.shape[0], spec, side);
  check.shape("out", out, {p.k, x.shape[1]});
  check.disjoint("out", out, "x", x);
  backend_of(context).hla(context, matrix_of(x), p, context.key(), matrix_out_of(out));
}

void quantize(const Context& context, const ConstTensorView& x, const QuantSpec& spec,
              const TensorView& q, const TensorView& scale) {
  const StandardArithmetic arithmetic;
  const Checker check("quantize", context);
  if (spec.bits != 4 && spec.bits != 8) {
    invalid("quantize", "bits is ", spec.bits, "; expected 4 or 8");
  }
  check_rounding("quantize", "rounding", spec.rounding);
  check_granularity("quantize", "scale", spec.scale);
  check.input("x", x, float_dtypes, 2, 2);
  check.output("q", q, {DType::i8, DType::i4x2}, 2, 2);
  if (q.dtype == DType::i4x2 && spec.bits != 4) {
    invalid("quantize", "q is packed INT4, but bits is 8; expected int8");
  }
  check.output("scale", scale, {DType::f32}, 1, 1);
  const std::int64_t rows = x.shape[0], cols = x.shape[1];
  check.shape("q", q, {rows, q.dtype == DType::i4x2 ? (cols + 1) / 2 : cols});
  check.shape("scale", scale, {scale_count(rows, cols, spec.scale)});
  check.rows_contiguous("q", q);
  check.rows_contiguous("scale", scale);
  check.disjoint("q", q, "x", x);
  check.disjoint("scale", scale, "x", x);
  check.disjoint("scale", scale, "q", q);
  backend_of(context).quantize(context, matrix_of(x), spec, matrix_out_of(q),
                               static_cast<float*>(scale.data));
}

void dequantize(const Context& context, const ConstTensorView& q, const ConstTensorView& scale,
                Granularity granularity, const TensorView& out) {
  const StandardArithmetic arithmetic;
  const Checker check("dequantize", context);
  check_granularity("dequantize", "granularity", granularity);
  check.input("q", q, {DType::i8, DType::i4x2}, 2, 2);
  check.input("scale", scale, {DType::f32}, 1, 1);
  check.output("out", out, float_dtypes, 2, 2);
  const std::int64_t rows = out.shape[0], cols = out.shape[1];
  check.shape("q", q, {rows, q.dtype == DType::i4x2 ? (cols + 1) / 2 : cols});
  check.shape("scale", scale, {scale_count(rows, cols, granularity)});
  check.rows_contiguous("q", q);
  check.rows_contiguous("scale", scale);
  check.disjoint("out", out, "q", q);
  check.disjoint("out", out, "scale", scale);
  if (rows == 0 || cols == 0) return;
  backend_of(context).dequantize(context, matrix_of(q), static_cast<const float*>(scale.data),
                                 granularity, matrix_out_of(out));
}

void pack_int4(const Context& context, const ConstTensorView& q, const TensorView& out) {
  const Checker check("pack_int4", context);
  check.input("q", q, {DType::i8}, 2, 2);
  check.output("out", out, {DType::i4x2}, 2, 2);
  check.shape("out", out, {q.shape[0], (q.shape[1] + 1) / 2});
  check.rows_contiguous("q", q);
  check.rows_contiguous("out", out);
  check.disjoint("out", out, "q", q);
  if (q.shape[0] == 0 || q.shape[1] == 0) return;
  backend_of(context).pack_int4(context, matrix_of(q), matrix_out_of(out));
}

void unpack_int4(const Context& context, const ConstTensorView& packed, const TensorView& out) {
  const Checker check("unpack_int4", context);
  check.input("packed", packed, {DType::i4x2}, 2, 2);
  check.output("out", out, {DType::i8}, 2, 2);
  check.shape("packed", packed, {out.shape[0], (out.shape[1] + 1) / 2});
  check.rows_contiguous("packed", packed);
  check.rows_contiguous("out", out);
  check.disjoint("out", out, "packed", packed);
  if (out.shape[0] == 0 || out.shape[1] == 0) return;
  backend_of(context).unpack_int4(context, matrix_of(packed), matrix_out_of(out));
}

namespace {

// Checks a wire and the vector `values` that it stands for; returns the vector's parts. The wire
// has a dimension of parts unless it has `min_ndim` dimensions.
BlockParts block_parts(const Checker& check, const char* call, const ConstTensorView& wire,
                       int min_ndim, const char* name, const ConstTensorView& values) {
  const int last = wire.ndim - 1;
  check.rows_contiguous(name, values);
  const std::int64_t n = values.shape[0], count = wire.ndim == min_ndim ? 1 : wire.shape[last - 1];
  const std::int64_t ranks = min_ndim == 1 ? 1 : wire.shape[0];
  if (count < 1 || ranks < 1) {
    invalid(call, "wire has shape ", shape_text(wire), "; expected one row or more");
  }
  const std::int64_t size = ceil_div(n, count);
  const BlockParts parts{n, count, size, ceil_div(size, BlockParts::block)};
  if (wire.shape[last] != parts.bytes()) {
    invalid(call, "wire has rows of ", wire.shape[last], " bytes; expected ", parts.bytes(),
            ", 68 for each block of 64 of ", size, " values");
  }
  std::int64_t stride = 1;
  for (int d = last; d >= 0; stride *= wire.shape[d--]) {
    if (wire.shape[d] > 1 && wire.stride[d] != stride && n > 0) {
      invalid(call, "wire has stride ", wire.stride[d], " along dimension ", d,
              "; expected a contiguous array");
    }
  }
  if (reinterpret_cast<std::uintptr_t>(wire.data) % sizeof(float) != 0) {
    invalid(call, "wire is not aligned to 4 bytes");
  }
  return parts;
}

}  // namespace

void encode_blocks(const Context& context, const ConstTensorView& x, Rounding rounding,
                   const TensorView& wire) {
  const StandardArithmetic arithmetic;
  const char* const call = "encode_blocks";
  const Checker check(call, context);
  check_rounding(call, "rounding", rounding);
  check.input("x", x, float_dtypes, 1, 1);
  check.output("wire", wire, {DType::i8, DType::i4x2}, 1, 2);
  const BlockParts parts = block_parts(check, call, wire, 1, "x", x);
  if (rounding == Rounding::stochastic && context.key().stream + parts.count > 8192) {
    invalid(call, "key.stream is ", context.key().stream, " with ", parts.count,
            " parts; expected at most 8191 for the last part");
  }
  check.disjoint("wire", wire, "x", x);
  if (parts.values == 0) return;
  backend_of(context).encode_blocks(
      context, {x.data, x.dtype, parts, rounding, static_cast<std::int8_t*>(wire.data)});
}

void sum_blocks(const Context& context, const ConstTensorView& wire, float factor,
                const TensorView& out) {
  const StandardArithmetic arithmetic;
  const char* const call = "sum_blocks";
  const Checker check(call, context);
  check.input("wire", wire, {DType::i8, DType::i4x2}, 2, 3);
  check.output("out", out, float_dtypes, 1, 1);
  const BlockParts parts = block_parts(check, call, wire, 2, "out", out);
  check.disjoint("out", out, "wire", wire);
  if (parts.values == 0) return;
  backend_of(context).sum_blocks(context, {static_cast<const std::int8_t*>(wire.data),
                                           wire.shape[0], parts, factor, out.data, out.dtype});
}

namespace {

// Workspace of a product; null memory only counts bytes.
struct GemmScratch {
  WorkspaceCursor cursor;
  char* product;
  std::int8_t *a, *b;  // unpacked operands of gemm_int4
  GemmScratch(const Context& context, std::int64_t m, std::int64_t n, std::int64_t k, void* memory)
      : cursor(memory),
        product(cursor.take<char>(
            static_cast<std::int64_t>(backend_of(context).gemm_workspace(context, m, n, k)))),
        a(cursor.take<std::int8_t>(m * k)),
        b(cursor.take<std::int8_t>(n * k)) {}
};

const float* checked_scale(const Checker& check, const char* call, const char* name,
                           const ConstTensorView& scale, std::int64_t size, const TensorView& out,
                           std::int64_t& step) {
  check.input(name, scale, {DType::f32}, 1, 1);
  if (scale.shape[0] != 1 && scale.shape[0] != size) {
    invalid(call, name, " has shape ", shape_text(scale), "; expected (1,) or (", size, ",)");
  }
  check.rows_contiguous(name, scale);
  check.disjoint("out", out, name, scale);
  step = scale.shape[0] == 1 ? 0 : 1;
  return static_cast<const float*>(scale.data);
}

// Checks and runs a product. `given_k` is the K of packed INT4 operands, null for INT8.
void run_gemm(const char* call, const Context& context, const ConstTensorView& a,
              const ConstTensorView& b, const std::int64_t* given_k, const ConstTensorView& a_scale,
              const ConstTensorView& b_scale, const GemmSpec& spec, const TensorView& out,
              const Workspace& workspace) {
  const StandardArithmetic arithmetic;
  const Checker check(call, context);
  const DType dtype = given_k == nullptr ? DType::i8 : DType::i4x2;
  check.input("a", a, {dtype}, 2, 2);
  check.input("b", b, {dtype}, 2, 2);
  const std::int64_t bytes = a.shape[1], k = given_k == nullptr ? bytes : *given_k;
  if (given_k != nullptr && (k < 0 || k / 2 + k % 2 != bytes)) {
    invalid(call, "k is ", k, "; expected ", 2 * bytes, ", or one less, for rows of ", bytes,
            " bytes");
  }
  check.shape("b", b, {-1, bytes});
  check.rows_contiguous("a", a);
  check.rows_contiguous("b", b);
  GemmArgs args{};
  args.m = a.shape[0];
  args.n = b.shape[0];
  args.k = k;
  check.output("out", out, {DType::f32, DType::f16, DType::bf16, DType::i32}, 2, 2);
  check.shape("out", out, {args.m, args.n});
  check.disjoint("out", out, "a", a);
  check.disjoint("out", out, "b", b);
  if (!is_power_of_two(spec.divisor)) {
    invalid(call, "divisor is ", spec.divisor, "; expected a power of two");
  }
  args.inv_divisor = 1.0F / static_cast<float>(spec.divisor);
  args.accumulate = spec.accumulate;
  args.out = matrix_out_of(out);
  if (out.dtype == DType::i32) {
    if (is_given(a_scale) || is_given(b_scale)) {
      invalid(call, "out is int32 (unscaled sums); expected no a_scale and no b_scale");
    }
    if (spec.divisor != 1 || spec.accumulate) {
      invalid(call, "out is int32 (unscaled sums); expected divisor 1 and no accumulation");
    }
    if (k > int32_safe_k) {
      invalid(call, "a has a contraction of ", k, "; with an int32 out, expected at most ",
              int32_safe_k);
    }
  } else {
    args.a_scale = checked_scale(check, call, "a_scale", a_scale, args.m, out, args.a_scale_step);
    args.b_scale = checked_scale(check, call, "b_scale", b_scale, args.n, out, args.b_scale_step);
  }
  check_sizes("gemm_workspace", {"m", "n", "k"}, {args.m, args.n, k});
  const GemmScratch scratch(context, args.m, args.n, k, workspace.data);
  check.workspace(workspace, scratch.cursor.bytes());
  args.a = static_cast<const std::int8_t*>(a.data);
  args.b = static_cast<const std::int8_t*>(b.data);
  args.lda = a.stride[0];
  args.ldb = b.stride[0];
  if (given_k == nullptr) return backend_of(context).gemm(context, args, scratch.product);
  backend_of(context).gemm_int4(context, args, scratch.a, scratch.b, scratch.product);
}

}  // namespace

std::size_t gemm_workspace(const Context& context, std::int64_t m, std::int64_t n, std::int64_t k) {
  check_sizes("gemm_workspace", {"m", "n", "k"}, {m, n, k});
  return GemmScratch(context, m, n, k, nullptr).cursor.bytes();
}

void gemm_int8(const Context& context, const ConstTensorView& a, const ConstTensorView& b,
               const ConstTensorView& a_scale, const ConstTensorView& b_scale, const GemmSpec& spec,
               const TensorView& out, const Workspace& workspace) {
  run_gemm("gemm_int8", context, a, b, nullptr, a_scale, b_scale, spec, out, workspace);
}

void gemm_int4(const Context& context, const ConstTensorView& a, const ConstTensorView& b,
               std::int64_t k, const ConstTensorView& a_scale, const ConstTensorView& b_scale,
               const GemmSpec& spec, const TensorView& out, const Workspace& workspace) {
  run_gemm("gemm_int4", context, a, b, &k, a_scale, b_scale, spec, out, workspace);
}

}  // namespace hot

// Plans of whole calls, their workspaces, and the members of Plan.
#include <algorithm>
#include <cstdint>
#include <new>
#include <type_traits>

#include "hot/error.h"
#include "plan/steps.h"

namespace hot::detail::plan {
namespace {

// ---- names -------------------------------------------------------------------------------------

#define HOT_KERNEL_INFO(name, function, file, overlaps, launcher) {function, file, overlaps},
constexpr KernelInfo kernels[kernel_count] = {HOT_KERNELS(HOT_KERNEL_INFO)};
#undef HOT_KERNEL_INFO

#define HOT_BUFFER_NAME(name, text, ...) text,
constexpr const char* buffer_names[buffer_count] = {HOT_BUFFERS(HOT_BUFFER_NAME)};
#undef HOT_BUFFER_NAME

#define HOT_SCRATCH(name, text, in_workspace) (in_workspace ? Buffers(Buffer::name) : Buffers()) |
constexpr Buffers scratch = HOT_BUFFERS(HOT_SCRATCH) Buffers();
#undef HOT_SCRATCH

}  // namespace

const KernelInfo& info(Kernel kernel) { return kernels[static_cast<std::size_t>(kernel)]; }
const char* buffer_name(Buffer buffer) { return buffer_names[static_cast<std::size_t>(buffer)]; }

// ---- the device --------------------------------------------------------------------------------

const char* feature_name(Feature feature) {
  constexpr const char* names[feature_count] = {"cluster", "dependent-launch", "bulk-copy", "wgmma",
                                                "tcgen05"};
  return names[static_cast<std::size_t>(feature)];
}

void set_features(DeviceFacts& facts, bool sm90, bool wgmma) {
  constexpr Features since_sm90 =
      Features(Feature::clusters) | Feature::dependent_launch | Feature::bulk_copy;
  const int major = facts.arch / 10;
  if (major >= 9) facts.hardware = since_sm90;
  if (major == 9) facts.hardware |= Feature::wgmma;
  if (major == 10 || major == 11) facts.hardware |= Feature::tcgen05;
  // There are no kernels for later architectures.
  if (major == 9 && sm90) facts.kernels = since_sm90;
  if (major == 9 && wgmma) facts.kernels |= Feature::wgmma;
}

Reason why_not(const DeviceFacts& facts, Feature feature) {
  if (facts.kernels.has(feature)) return {};
  return {facts.hardware.has(feature) ? "this build has no %s kernels for sm_%n"
                                      : "sm_%n runs no %s kernels",
          facts.arch, feature_name(feature)};
}

// ---- reasons -----------------------------------------------------------------------------------

bool Plan::takes(const Refusal& kernel) {
  if (!kernel.reason) return true;
  if (end_passed_ < max_passed) ::new (&passed_.at[end_passed_++]) Refusal(kernel);
  return false;
}

Kernel Plan::choose(std::initializer_list<Refusal> list) {
  for (const Refusal& one : list) {
    if (takes(one)) return one.kernel;
  }
  throw Error(ErrorCode::unsupported, "plan: no kernel is left");
}

// ---- dependencies ------------------------------------------------------------------------------

namespace {

// Whether two sets of buffers share memory.
bool overlap(Buffers a, Buffers b) {
  return a.meets(b) || (a.has(Buffer::all_scratch) && b.meets(scratch)) ||
         (b.has(Buffer::all_scratch) && a.meets(scratch));
}

}  // namespace

static_assert(std::is_trivially_copyable_v<Step> &&
              std::is_trivially_copyable_v<Refusal>);  // Plan::Slots copies bytes

// A step that waits starts when all earlier steps have ended. An independent step starts when every
// CTA of the previous step has started. Therefore the last step that waited, and all steps since,
// may still run. The first step of a call waits, because earlier work on the stream is unknown.
void Plan::add(Kernel kernel, const LaunchShape& shape, Buffers reads, Buffers writes,
               const StepWork& work, DType dtype) {
  if (count_ == max_steps) {
    throw Error(ErrorCode::unsupported, "plan: more steps than a plan has");
  }
  Step& step = *::new (&steps_.at[count_]) Step{kernel, shape, reads, writes, work, dtype};
  if (kernel != Kernel::zero && kernel != Kernel::broadcast_scale) {  // these prepare another step
    step.first_passed = first_passed_;
    step.end_passed = first_passed_ = end_passed_;
  }
  if (shape.blocks == 0 && kernel != Kernel::zero) return;  // the next step takes its place
  step.independent = info(kernel).can_overlap && last_waiting_ >= 0;
  for (int i = last_waiting_; step.independent && i < count_; ++i) {
    const Step& before = (*this)[i];
    step.independent = !overlap(before.writes, reads | writes) && !overlap(before.reads, writes);
  }
  if (!step.independent && kernel != Kernel::zero) last_waiting_ = count_;
  ++count_;
}

namespace {

std::int64_t rows_amax_words(const OperandQuant& quant) {
  return quant.per_tensor ? grouped::max_amax_slots : 0;
}

}  // namespace

AmaxWords amax_words(const DeviceFacts& facts, const BackwardWork& work) {
  AmaxWords words;
  if (work.gx) words.rows = rows_amax_words(gradient_rows_quant(work.spec));
  if (work.weight) {
    words.weight = columns_amax_words(facts, work.shape.in_features, work.out_features,
                                      weight_quant(work.spec));
  }
  if (work.gw) {
    words.columns = columns_amax_words(facts, work.shape.out_features, work.tokens,
                                       gradient_columns_quant(work.spec));
  }
  return words;
}

// ---- whole calls -------------------------------------------------------------------------------

Plan plan_backward(const DeviceFacts& facts, const BackwardWork& work,
                   const BackwardArrays& arrays) {
  const BackwardLinearSpec& spec = work.spec;
  const LinearShape& shape = work.shape;
  const std::int64_t kx = work.out_features.k_padded, kw = work.tokens.k_padded;
  const bool packed = work.gw && spec.storage != Storage::int8;
  const bool by_token = spec.gw_scale == Granularity::token;
  Plan plan;

  // Quantises all operands before the products. Then g_y is read again while the L2 cache may still
  // hold it, and kernels overlap.
  const RowsShape rows{
      Source::gy,          Buffer::gy_rows,           arrays.gy, shape.tokens, shape.out_features,
      spec.hadamard_block, gradient_rows_quant(spec), kx};
  const ColumnsShape columns{Source::gy,
                             Buffer::columns,
                             arrays.gy,
                             shape.out_features,
                             work.tokens,
                             gradient_columns_quant(spec),
                             by_token ? kw : shape.out_features,
                             work.gb,
                             work.accumulate};
  const ColumnsShape weight{Source::w,         Buffer::weight,    arrays.w,
                            shape.in_features, work.out_features, weight_quant(spec),
                            shape.in_features};
  OperandShapes operands;
  if (work.gx) operands.rows = &rows;
  if (work.gw) operands.columns = &columns;
  if (work.weight) operands.weight = &weight;
  if (packed) operands.packed_channels = shape.in_features;
  operands.zeroed = amax_words(facts, work);
  const bool summed = add_operands(plan, facts, operands);

  Products products;
  add_gx(plan, products, work, arrays.gx);
  const Buffer x = packed ? Buffer::activation : Buffer::saved;
  if (work.gw && !by_token) {
    ProductShape& p = products.add(1, shape.out_features, shape.in_features, kw, arrays.gw,
                                   {Buffer::columns, x, Buffer::gw});
    p.one_scale_b = p.one_scale_b || (!packed && activation_quant(spec).per_tensor);
    p.accumulate = work.accumulate;
  }
  add_products(plan, facts, products);
  if (work.gw && by_token) {
    Buffers reads = Buffer::columns | x;
    if (work.accumulate) reads |= Buffer::gw;
    plan.takes({Kernel::wgmma_128x128, "fp32 product, one thread a result", scales_by_token});
    plan.add(Kernel::token, {ceil_div(shape.out_features * shape.in_features, 256), 256}, reads,
             Buffer::gw, ProductStep{1}, arrays.gw.dtype);
  }
  add_no_gw(plan, work);
  if (work.gb && !summed && shape.out_features > 0) {
    if (work.gx || work.gw) {
      note_sum_again(plan, {"no kernel of its rows or columns adds them up"});
    }
    add_sum_alone(plan, shape, arrays.gy, work.accumulate);
  }
  return plan;
}

void add_sum_alone(Plan& plan, const LinearShape& shape, const ArrayFacts& gy, bool accumulate) {
  const std::int64_t runs = sum_runs(shape.tokens);
  plan.add(Kernel::partial_sum,
           {runs * ceil_div(shape.out_features, bias::sum_threads), bias::sum_threads}, Buffer::gy,
           Buffer::all_scratch, SumsStep{runs}, gy.dtype);
  add_final_sum(plan, runs, shape.out_features, accumulate, Buffer::all_scratch);
}

namespace {

ColumnsShape activation_shape(const CompressShape& job) {
  const OperandQuant quant = activation_quant(job.spec);
  return {Source::x, Buffer::saved, job.x, job.cols, job.p, quant, quant.per_tensor ? 1 : job.cols};
}

void add_token_exponents(Plan& plan, const CompressShape& job) {
  if (!job.spec.equalize_tokens) return;
  constexpr int warps = exponent_rows;
  plan.takes({Kernel::token_exponents, "x is read first for its tokens' sizes", equalized});
  note_loads(plan, Kernel::token_exponents, not_vectors(job.x.rows_aligned, job.cols));
  plan.add(Kernel::token_exponents, {ceil_div(job.rows, warps), 32 * warps}, Buffer::x,
           Buffer::exponents, {}, job.x.dtype);
}

void add_activation_zero(Plan& plan, const DeviceFacts& facts, const CompressShape& job) {
  if (job.spec.storage != Storage::int8) return;
  add_zero(plan, {0, 0, columns_amax_words(facts, job.cols, job.p, activation_quant(job.spec))});
}

void add_activation(Plan& plan, const DeviceFacts& facts, const CompressShape& job) {
  if (job.spec.storage == Storage::int8) {
    add_columns(plan, facts, activation_shape(job));
    return;
  }
  Buffers reads = Buffer::x;
  if (job.spec.equalize_tokens) reads |= Buffer::exponents;
  const bool two_bytes = dtype_size(job.x.dtype) == 2;
  const Kernel kernel =
      plan.choose({{Kernel::group_quads, two_bytes ? "x is read one column a thread" : nullptr,
                    !two_bytes                 ? of_dtype
                    : job.spec.equalize_tokens ? equalized
                    : !job.x.quads_aligned     ? not_fours(job.cols)
                                               : Reason{}},
                   {Kernel::groups}});
  const std::int64_t blocks = ceil_div(job.cols, 128) * ceil_div(job.rows, int4_group);
  plan.add(kernel, {blocks, 128}, reads, Buffer::saved, {}, job.x.dtype);
}

}  // namespace

Plan plan_compress(const DeviceFacts& facts, const CompressShape& job) {
  Plan plan;
  add_token_exponents(plan, job);
  add_activation_zero(plan, facts, job);
  add_activation(plan, facts, job);
  return plan;
}

Plan plan_weight(const DeviceFacts& facts, const ArrayFacts& w, std::int64_t cols,
                 const Projection& p, const OperandQuant& quant, std::int64_t scales) {
  Plan plan;
  const ColumnsShape weight{Source::w, Buffer::quantized_w, w, cols, p, quant, scales};
  OperandShapes operands;
  operands.weight = &weight;
  operands.zeroed.weight = columns_amax_words(facts, cols, p, quant);
  add_operands(plan, facts, operands);
  return plan;
}

namespace {

RowsShape forward_rows(Source source, Buffer codes, const ArrayFacts& array, std::int64_t rows,
                       std::int64_t cols, const ForwardLinearSpec& spec) {
  return {
      source, codes, array, rows, cols, spec.hadamard_block, forward_quant, forward_k(cols, spec)};
}

}  // namespace

Plan plan_forward(const DeviceFacts& facts, const ForwardWork& work, const ForwardArrays& arrays) {
  const LinearShape& shape = work.shape;
  Plan plan;
  if (work.input) {
    add_rows(plan, forward_rows(Source::x, Buffer::x_rows, arrays.x, shape.tokens,
                                shape.in_features, work.spec));
  }
  if (work.weight) {
    add_rows(plan, forward_rows(Source::w, Buffer::weight_rows, arrays.w, shape.out_features,
                                shape.in_features, work.spec));
  }
  if (work.wide) {
    plan.add(Kernel::widen, {ceil_div(shape.out_features, 256), 256}, Buffer::bias,
             Buffer::wide_bias);
  }
  Buffers b = work.weight ? Buffer::weight_rows : Buffer::forward_w;
  if (work.bias) b |= work.wide ? Buffer::wide_bias : Buffer::bias;
  Products products;
  products
      .add(0, shape.tokens, shape.out_features, forward_k(shape.in_features, work.spec), arrays.y,
           {work.input ? Buffer::x_rows : Buffer::forward_x, b, Buffer::y})
      .bias = work.bias;
  add_products(plan, facts, products);
  return plan;
}

Plan plan_forward_input(const DeviceFacts& facts, const ArrayFacts& x, std::int64_t rows,
                        std::int64_t cols, const ForwardLinearSpec& spec,
                        const CompressShape* saved) {
  Plan plan;
  const RowsShape job = forward_rows(Source::x, Buffer::forward_x, x, rows, cols, spec);
  if (saved == nullptr) {
    add_rows(plan, job);
    return plan;
  }
  add_token_exponents(plan, *saved);
  if (saved->spec.storage == Storage::int8) {
    add_activation_zero(plan, facts, *saved);
    add_rows_and_columns(plan, facts, job, activation_shape(*saved));
  } else if (const Reason why = add_rows_groups(plan, job, *saved)) {
    add_rows(plan, job);
    plan.takes({Kernel::rows_groups, "x is read again to be kept", why});
    add_activation(plan, facts, *saved);
  }
  return plan;
}

Plan plan_forward_weight(const ArrayFacts& w, std::int64_t rows, std::int64_t cols,
                         int hadamard_block) {
  Plan plan;
  add_rows(plan, forward_rows(Source::w, Buffer::forward_w, w, rows, cols, {hadamard_block}));
  return plan;
}

// ---- properties of arrays ----------------------------------------------------------------------

namespace {

bool aligned(const void* data, std::int64_t stride_bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride_bytes % 16 == 0;
}

}  // namespace

ArrayFacts array_facts(const MatrixIn& x) {
  const auto size = static_cast<std::int64_t>(dtype_size(x.dtype));
  const auto address = reinterpret_cast<std::uintptr_t>(x.data);
  const bool dense = x.col_stride == 1;
  return {x.dtype, dense && aligned(x.data, x.row_stride * size),
          dense && x.cols % 4 == 0 && x.row_stride % 4 == 0 &&
              address % static_cast<std::uintptr_t>(4 * size) == 0};
}

OutFacts out_facts(const MatrixOut& out) {
  const auto size = static_cast<std::int64_t>(dtype_size(out.dtype));
  return {out.dtype, out.col_stride == 1, aligned(out.data, out.row_stride * size)};
}

ProductShape product_shape(const GemmArgs& args) {
  ProductShape p;
  p.m = args.m;
  p.n = args.n;
  p.k = args.k;
  p.rows_aligned = aligned(args.a, args.lda) && aligned(args.b, args.ldb);
  p.rows_near = args.lda < UINT32_MAX && args.ldb < UINT32_MAX;
  p.scaled = args.a_scale != nullptr && args.b_scale != nullptr;
  p.one_scale_a = args.a_scale_step == 0;
  p.one_scale_b = args.b_scale_step == 0;
  p.accumulate = args.accumulate;
  p.out = out_facts(args.out);
  return p;
}

// ---- workspaces --------------------------------------------------------------------------------

BackwardScratch take_scratch(const DeviceFacts& facts, const BackwardWork& work, void* workspace) {
  const std::int64_t L = work.shape.tokens, O = work.shape.out_features;
  // If only g_b is computed, its partial sums may use the whole workspace. There is one per 128
  // tokens, or the number that rows_column_amax_kernel needs.
  const std::int64_t runs = std::max(sum_runs(L), rows_column_amax_sums(facts, L));
  DeviceScratch device{amax_words(facts, work)};
  if (work.gb) device.sums_alone = runs * O;
  if (work.gw && work.gb) device.sums = runs * O;
  return take_backward_scratch(workspace, work, &device,
                               [&](std::int64_t m, std::int64_t n, std::int64_t k) {
                                 return gemm_workspace(facts, m, n, k);
                               });
}

ForwardScratch take_scratch(const DeviceFacts& facts, const ForwardWork& work, void* workspace) {
  return take_forward_scratch(workspace, work, [&](std::int64_t m, std::int64_t n, std::int64_t k) {
    return gemm_workspace(facts, m, n, k);
  });
}

}  // namespace hot::detail::plan

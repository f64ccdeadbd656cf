// Members of Plan, names and features, properties of arrays, the plan of a whole call.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <new>
#include <type_traits>

#include "checks.h"
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

// Buffers of an operand's codes, in the workspace and of the caller, and of its largest values.
struct OperandBuffers {
  Source source;
  Along along;
  Buffer scratch, given, amax;
};
constexpr OperandBuffers operand_buffers[] = {
    {Source::gy, Along::row, Buffer::gy_rows, Buffer::gy_rows, Buffer::rows_amax},
    {Source::gy, Along::column, Buffer::columns, Buffer::columns, Buffer::columns_amax},
    {Source::w, Along::row, Buffer::weight_rows, Buffer::forward_w, Buffer::rows_amax},
    {Source::w, Along::column, Buffer::weight, Buffer::quantized_w, Buffer::weight_amax},
    {Source::x, Along::row, Buffer::x_rows, Buffer::forward_x, Buffer::rows_amax},
    {Source::x, Along::column, Buffer::activation, Buffer::saved, Buffer::columns_amax},
};

const OperandBuffers& buffers_of(const Operand& operand) {
  const OperandBuffers* one = operand_buffers;
  while (one->source != operand.source || one->along != operand.along) ++one;
  return *one;
}

// Whether two sets of buffers share memory.
bool overlap(Buffers a, Buffers b) {
  return a.meets(b) || (a.has(Buffer::all_scratch) && b.meets(scratch)) ||
         (b.has(Buffer::all_scratch) && a.meets(scratch));
}

bool can_zero_counter(const Step& step) {
  return step.kernel == Kernel::zero || step.kernel == Kernel::widen ||
         std::holds_alternative<RowsStep>(step.work) ||
         std::holds_alternative<GroupedStep>(step.work);
}

bool aligned(const void* data, std::int64_t stride_bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride_bytes % 16 == 0;
}

// Partial sums per column of g_b alone, one per 128 tokens.
std::int64_t sum_runs(std::int64_t rows) { return ceil_div(rows, 16 * bias::sum_run); }

}  // namespace

const KernelInfo& info(Kernel kernel) { return kernels[static_cast<std::size_t>(kernel)]; }
const char* buffer_name(Buffer buffer) { return buffer_names[static_cast<std::size_t>(buffer)]; }

Buffer codes_buffer(const Operand& operand) {
  return operand.scratch ? buffers_of(operand).scratch : buffers_of(operand).given;
}
Buffer amax_buffer(const Operand& operand) { return buffers_of(operand).amax; }

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

void Plan::zero_counter() {
  Step* const first = steps_.at;
  for (const Step& step : *this) {
    if (step.writes.has(Buffer::counter)) return;
  }
  Step* step = std::find_if(first, first + count_, can_zero_counter);
  if (step == first + count_) {
    // Between two kernels a memset would keep them from overlapping.
    add(Kernel::zero, {}, {}, {}, ZeroStep{0});
    std::rotate(first, first + count_ - 1, first + count_);
    if (last_waiting_ >= 0) ++last_waiting_;
    step = first;
  }
  step->writes |= Buffer::counter;
  if (auto* const zero = std::get_if<ZeroStep>(&step->work)) zero->bytes += sizeof(std::uint32_t);
}

// ---- g_b ---------------------------------------------------------------------------------------

std::int64_t most_sum_runs(const DeviceFacts& facts, std::int64_t rows) {
  constexpr std::int64_t unit_rows =
      std::int64_t{rows_column_amax::token_block} * rows_column_amax::max_unit_tiles;
  return std::max(sum_runs(rows), ceil_div(rows, unit_rows) +
                                      std::int64_t{rows_column_amax::cta_units} * facts.sm_count);
}

void add_final_sum(Plan& plan, std::int64_t runs, std::int64_t cols, bool accumulate, Buffer sums) {
  Buffers reads = sum_reads(accumulate);
  if (runs > 0) reads |= sums;
  plan.add(Kernel::final_sum, {ceil_div(cols, 32), 32 * bias::final_warps}, reads, Buffer::gb,
           SumsStep{runs});
}

// ---- properties of arrays ----------------------------------------------------------------------

bool rows_aligned(const MatrixIn& x) {
  return x.col_stride == 1 && aligned(x.data, x.row_stride * element_bytes(x.dtype));
}

bool quads_aligned(const MatrixIn& x) {
  return x.col_stride == 1 && x.cols % 4 == 0 && x.row_stride % 4 == 0 &&
         reinterpret_cast<std::uintptr_t>(x.data) % (4 * dtype_size(x.dtype)) == 0;
}

OutFacts out_facts(const MatrixOut& out) {
  return {out.dtype, out.col_stride == 1,
          aligned(out.data, out.row_stride * element_bytes(out.dtype))};
}

ProductShape product_shape(const GemmArgs& args) {
  ProductShape p{args.m, args.n, args.k};
  p.rows_aligned = aligned(args.a, args.lda) && aligned(args.b, args.ldb);
  p.rows_near = args.lda < UINT32_MAX && args.ldb < UINT32_MAX;
  p.scaled = args.a_scale != nullptr && args.b_scale != nullptr;
  p.one_scale_a = args.a_scale_step == 0;
  p.one_scale_b = args.b_scale_step == 0;
  p.accumulate = args.accumulate;
  p.out = out_facts(args.out);
  return p;
}

// ---- a whole call ------------------------------------------------------------------------------

void check_counts(const char* call, std::initializer_list<std::int64_t> counts) {
  for (const std::int64_t count : counts) {
    if (count > std::numeric_limits<std::int32_t>::max()) {
      invalid(call, "a size is ", count,
              "; expected at most 2^31 - 1 on CUDA, and results of at most 2^43 elements");
    }
  }
}

void check_counts(const char* call, std::int64_t m, std::int64_t n, std::int64_t k) {
  check_counts(call, {m, n, k});
  check_counts(call, {ceil_div(m, 64) * ceil_div(n, 64)});  // tiles
}

// All operands are quantised before the products. Then g_y is read again while the L2 cache may
// still hold it, and kernels overlap.
Plan plan_of(const DeviceFacts& facts, const Work& work) {
  for (const Operand& operand : work.operands) {
    check_counts(work.call, {operand.x.rows, operand.x.cols, operand.out.k_padded});
  }
  check_counts(work.call, {work.sum.x.rows, work.sum.x.cols});
  for (const WorkProduct& product : work.products) {
    check_counts(work.call, product.args.m, product.args.n, product.args.k);
  }
  Plan plan;
  const bool summed = add_operands(plan, facts, work);
  if (work.widens()) {
    plan.add(Kernel::widen, {ceil_div(work.bias.cols, 256), 256}, Buffer::bias, Buffer::wide_bias);
  }
  add_products(plan, facts, work);
  const ColumnSum& sum = work.sum;
  plan.scratch.sums_alone = sum.out.cols * sum_runs(sum.x.rows);
  if (summed || sum.out.cols == 0) return plan;
  if (work.operands.begin() != work.operands.end()) {
    plan.takes({Kernel::partial_sum,
                "g_y is read again for g_b",
                {"no kernel of its rows or columns adds them up"}});
  }
  const std::int64_t runs = sum_runs(sum.x.rows);
  plan.add(Kernel::partial_sum, {runs * ceil_div(sum.x.cols, bias::sum_threads), bias::sum_threads},
           Buffer::gy, Buffer::all_scratch, SumsStep{runs}, sum.x.dtype);
  add_final_sum(plan, runs, sum.x.cols, sum.accumulate, Buffer::all_scratch);
  return plan;
}

}  // namespace hot::detail::plan

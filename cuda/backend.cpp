// CUDA backend: gathers facts about the device, makes plans (plan.h) and executes them.
#include "cuda/backend.h"

#include <algorithm>
#include <optional>

#include "cuda/gemm_int8_sm90.h"
#include "cuda/launch.h"
#include "cuda/launchers.h"
#include "cuda_device.h"

namespace hot::detail {

const Backend& cuda_backend() {
  static const CudaBackend backend;
  return backend;
}

// ---- the device --------------------------------------------------------------------------------

CudaDevice::CudaDevice(const Context& context) : context_(context) {
  const char* const stage = "plan";
  const int major = device_attribute(context, cudaDevAttrComputeCapabilityMajor, stage);
  const bool restricted = context.arch() == 80;
  facts_.arch = 10 * major + device_attribute(context, cudaDevAttrComputeCapabilityMinor, stage);
  facts_.sm_count = device_attribute(context, cudaDevAttrMultiProcessorCount, stage);
  facts_.shared_bytes = device_attribute(context, cudaDevAttrMaxSharedMemoryPerBlockOptin, stage);
  if (!restricted) plan::set_features(facts_, kernels_overlap(context, stage), sm90_built());
  // sm_90 runs INT4 mma.sync at 1/30 of its INT8 rate; only tests of sm_80's kernels use it there.
  facts_.int4_units = major == 8 || (restricted && mma_int4(10 * major));
  facts_.queries = this;
}

std::size_t CudaDevice::stream_k_workspace(std::int64_t m, std::int64_t n, std::int64_t k,
                                           const Sm90Plan& plan) const {
  const DeviceGuard guard(context_.device().index, "gemm");
  GemmArgs args{};
  args.m = m;
  args.n = n;
  args.k = args.lda = args.ldb = k;
  args.out.row_stride = n;
  // All instances need the same workspace.
  return sm90_instance(Sm90Kernel::stream_k, DType::bf16, Sm90Output::store)
      .workspace(context_, args, plan);
}

void with_device_facts(const Context& context,
                       const std::function<void(const plan::DeviceFacts&)>& call) {
  const DeviceGuard guard(context.device().index, "explain");
  call(CudaDevice(context).facts());
}

// ---- executing a plan --------------------------------------------------------------------------

namespace {

using plan::Kernel;
using plan::Source;
using plan::Step;

template <class Job>
struct BySource {
  const Job* jobs[3] = {};
  const Job*& operator[](Source source) { return jobs[static_cast<int>(source)]; }
  const Job* operator[](Source source) const { return jobs[static_cast<int>(source)]; }
};

// Memory of a call. A null pointer is not used by any step of its plan.
struct Memory {
  Zeroed zeroed{};
  MatrixIn gy{};
  BySource<RowsJob> rows{};               // g_y for g_x; x and w for the forward product
  MatrixIn bias{};                        // bias of the forward product
  float* wide_bias = nullptr;             // bias in fp32
  BySource<ColumnsJob> columns{};         // P g_y, w, P x
  const CompressJob* kept = nullptr;      // x to be saved
  const GroupsJob* groups = nullptr;      // x from packed codes
  const ColumnSum* sum = nullptr;         // g_b from a quantiser of g_y
  const ColumnSum* sum_alone = nullptr;   // g_b from its own kernels
  GemmArgs product[2]{};                  // g_x (or y), g_w
  void* scratch[2] = {nullptr, nullptr};  // scratch of each product
  GemmArgs token{};                       // g_w with gw_scale token
  MatrixIn packed[2]{};                   // INT4 operands
  MatrixOut unpacked[2]{};                // INT4 operands unpacked to INT8
};

// Vectors of repeated single scales in the workspace, and the rest of it.
struct BroadcastScales {
  float *a, *b;
  void* rest;
  BroadcastScales(const GemmArgs& args, void* scratch)
      : a(static_cast<float*>(scratch)),
        b(a + round_up(args.m, 64)),
        rest(b + round_up(args.n, 64)) {}
};

// Launchers of kernels.def. Each gets a step, the step after it (or null), and the memory of its
// call.
#define HOT_LAUNCHER(name)                                                                    \
  void run_##name([[maybe_unused]] const Context& context, [[maybe_unused]] const Step& step, \
                  [[maybe_unused]] const Step* next, [[maybe_unused]] const Memory& memory)

HOT_LAUNCHER(zero) {
  check_cuda(
      cudaMemsetAsync(memory.zeroed.words, 0, step.as<plan::ZeroStep>().bytes, context.stream()),
      "backward_linear", "cudaMemsetAsync");
}
HOT_LAUNCHER(rows) { launch_rows(context, step, *memory.rows[step.as<plan::RowsStep>().of]); }
HOT_LAUNCHER(rows_column_amax) {
  const Source source = step.as<plan::RowsColumnAmaxStep>().of;
  launch_rows_column_amax(context, step, *memory.rows[source], *memory.columns[source],
                          source == Source::gy ? memory.sum : nullptr);
}
HOT_LAUNCHER(rows_groups) {
  launch_rows_groups(context, step, *memory.rows[Source::x], *memory.kept);
}
HOT_LAUNCHER(columns) {
  const Source source = step.as<plan::ColumnsStep>().of;
  launch_columns(context, step, *memory.columns[source],
                 source == Source::gy ? memory.sum : nullptr);
}
HOT_LAUNCHER(generic_columns) {
  launch_generic_columns(context, step, *memory.columns[step.as<plan::GenericColumnsStep>().of]);
}
HOT_LAUNCHER(finish_scales) {
  launch_finish_scales(context, step, *memory.columns[step.as<plan::GenericColumnsStep>().of]);
}
HOT_LAUNCHER(grouped) {
  launch_grouped(context, step,
                 {memory.rows[Source::gy], memory.columns[Source::gy], memory.columns[Source::w],
                  memory.groups, memory.sum});
}
HOT_LAUNCHER(token_exponents) { launch_token_exponents(context, step, *memory.kept); }
HOT_LAUNCHER(groups) { launch_groups(context, step, *memory.kept); }
HOT_LAUNCHER(requantize) { launch_requantize(context, step, *memory.groups); }
HOT_LAUNCHER(partial_sum) {
  launch_partial_sum(context, step, memory.gy, memory.sum_alone->workspace);
}
HOT_LAUNCHER(final_sum) {
  launch_final_sum(context, step,
                   step.reads.has(plan::Buffer::sums) ? *memory.sum : *memory.sum_alone);
}
HOT_LAUNCHER(fill_zero) {
  launch_fill_zero(context, step, memory.product[step.as<plan::ProductStep>().product].out);
}
HOT_LAUNCHER(broadcast_scale) {
  const auto& work = step.as<plan::BroadcastScaleStep>();
  const GemmArgs& args = memory.product[work.product];
  const BroadcastScales vectors(args, memory.scratch[work.product]);
  if (work.of_b) {
    launch_broadcast_scale(context, step, args.b_scale, args.n, vectors.b);
  } else {
    launch_broadcast_scale(context, step, args.a_scale, args.m, vectors.a);
  }
}
HOT_LAUNCHER(widen) { launch_widen(context, step, memory.bias, memory.wide_bias); }
HOT_LAUNCHER(unpack) {
  const int operand = step.as<plan::UnpackStep>().of_b ? 1 : 0;
  launch_unpack(context, step, memory.packed[operand], memory.unpacked[operand]);
}
HOT_LAUNCHER(small_gemms) {
  GemmArgs products[2];
  int count = 0;
  for (const GemmArgs& product : memory.product) {
    if (product.a != nullptr) products[count++] = product;
  }
  launch_small_gemms(context, step, products, count);
}
HOT_LAUNCHER(wgmma) {
  const auto& work = step.as<plan::ProductStep>();
  GemmArgs args = memory.product[work.product];
  const BroadcastScales vectors(args, memory.scratch[work.product]);
  if (args.a_scale_step == 0) args.a_scale = vectors.a;
  if (args.b_scale_step == 0) args.b_scale = vectors.b;
  launch_wgmma(context, step, args, vectors.rest);
}
HOT_LAUNCHER(mma) {
  const auto& work = step.as<plan::ProductStep>();
  void* const scratch = memory.scratch[work.product];
  const GemmArgs& args = memory.product[work.product];
  launch_mma(context, step, args, scratch);
  if (next != nullptr && next->kernel == Kernel::mma_fixup) {
    launch_mma(context, *next, args, scratch);
  }
}
HOT_LAUNCHER(mma_fixup) {}  // run_mma launches it
HOT_LAUNCHER(token) { launch_token(context, step, memory.token); }
#undef HOT_LAUNCHER

void run(const Context& context, const plan::Plan& plan, const Memory& memory) {
#define HOT_RUN(name, function, file, overlaps, launcher) run_##launcher,
  using Launcher = void (*)(const Context&, const Step&, const Step* next, const Memory&);
  static constexpr Launcher launchers[plan::kernel_count] = {HOT_KERNELS(HOT_RUN)};
#undef HOT_RUN
  for (const Step* step = plan.begin(); step != plan.end(); ++step) {
    const Step* const next = step + 1 == plan.end() ? nullptr : step + 1;
    launchers[static_cast<std::size_t>(step->kernel)](context, *step, next, memory);
  }
}

}  // namespace

// ---- calls -------------------------------------------------------------------------------------

std::size_t CudaBackend::gemm_workspace(const Context& context, std::int64_t m, std::int64_t n,
                                        std::int64_t k) const {
  return plan::gemm_workspace(CudaDevice(context).facts(), m, n, k);
}

void CudaBackend::gemm(const Context& context, const GemmArgs& args, void* workspace) const {
  const DeviceGuard guard(context.device().index, "gemm");
  const CudaDevice device(context);
  Memory memory;
  memory.product[0] = args;
  memory.scratch[0] = workspace;
  run(context, plan::plan_gemm(device.facts(), plan::product_shape(args)), memory);
}

void CudaBackend::gemm_int4(const Context& context, const GemmArgs& args, std::int8_t* a,
                            std::int8_t* b, void* workspace) const {
  const DeviceGuard guard(context.device().index, "gemm_int4");
  const CudaDevice device(context);
  GemmArgs unpacked = args;
  unpacked.a = a;
  unpacked.b = b;
  unpacked.lda = unpacked.ldb = args.k;
  const plan::Plan plan = plan::plan_gemm_int4(device.facts(), plan::product_shape(unpacked),
                                               plan::product_shape(args).rows_aligned);
  Memory memory;
  memory.scratch[0] = workspace;
  const bool packed = plan.size() > 0 && plan[0].kernel != Kernel::unpack;
  memory.product[0] = packed ? args : unpacked;
  const std::int64_t bytes = ceil_div(args.k, 2);
  memory.packed[0] = {args.a, DType::i4x2, args.m, bytes, args.lda, 1};
  memory.packed[1] = {args.b, DType::i4x2, args.n, bytes, args.ldb, 1};
  memory.unpacked[0] = {a, DType::i8, args.m, args.k, args.k, 1};
  memory.unpacked[1] = {b, DType::i8, args.n, args.k, args.k, 1};
  run(context, plan, memory);
}

std::size_t CudaBackend::columns_workspace(const Context& context, std::int64_t cols,
                                           const Projection& p, const OperandQuant& quant) const {
  WorkspaceCursor cursor;
  take_zeroed(cursor, plan::columns_amax_words(CudaDevice(context).facts(), cols, p, quant));
  return cursor.bytes();
}

namespace {

// Returns the job with memory for its largest values, from the start of the workspace.
ColumnsJob with_amax(const plan::DeviceFacts& facts, ColumnsJob job, void* workspace,
                     Zeroed& zeroed) {
  WorkspaceCursor cursor(workspace);
  zeroed =
      take_zeroed(cursor, plan::columns_amax_words(facts, job.x.cols, *job.projection, job.quant));
  job.out.amax = zeroed.words;
  return job;
}

// Shape and jobs of an x to be saved.
struct Kept {
  Zeroed zeroed{};
  ColumnsJob columns{};
  plan::CompressShape shape;

  Kept(const Context& context, const plan::DeviceFacts& facts, const CompressJob& job,
       void* workspace)
      : shape{plan::array_facts(job.x), job.x.rows, job.x.cols, *job.projection, job.spec} {
    if (job.spec.storage != Storage::int8) return;
    columns = with_amax(facts, activation_columns(context, job), workspace, zeroed);
  }
};

Memory memory_of(const CompressJob& job, const Kept& saved) {
  Memory memory;
  memory.zeroed = saved.zeroed;
  memory.columns[Source::x] = &saved.columns;
  memory.kept = &job;
  return memory;
}

}  // namespace

void CudaBackend::compress(const Context& context, const CompressJob& job, void* workspace) const {
  const DeviceGuard guard(context.device().index, "compress_activation");
  const CudaDevice device(context);
  const Kept saved(context, device.facts(), job, workspace);
  run(context, plan::plan_compress(device.facts(), saved.shape), memory_of(job, saved));
}

void CudaBackend::quantize_weight(const Context& context, const ColumnsJob& job,
                                  void* workspace) const {
  const DeviceGuard guard(context.device().index, "quantize_weight");
  const CudaDevice device(context);
  const plan::DeviceFacts& facts = device.facts();
  Memory memory;
  const ColumnsJob weight = with_amax(facts, job, workspace, memory.zeroed);
  memory.columns[Source::w] = &weight;
  run(context,
      plan::plan_weight(facts, plan::array_facts(job.x), job.x.cols, *job.projection, job.quant,
                        job.out.scales),
      memory);
}

std::size_t CudaBackend::backward_workspace(const Context& context,
                                            const BackwardWork& work) const {
  return plan::take_scratch(CudaDevice(context).facts(), work, nullptr).bytes;
}

void CudaBackend::backward(const Context& context, const BackwardCall& call, const Checker& check,
                           const Workspace& workspace) const {
  const DeviceGuard guard(context.device().index, "backward_linear");
  const CudaDevice device(context);
  const BackwardWork& work = call.work;
  const BackwardLinearSpec& spec = work.spec;
  const BackwardScratch s = plan::take_scratch(device.facts(), work, workspace.data);
  check.workspace(workspace, s.bytes);
  const bool packed = work.gw && spec.storage != Storage::int8;
  const bool by_token = spec.gw_scale == Granularity::token;
  const RowsJob rows{call.gy, work.out_features.block, gradient_rows_quant(spec), s.rows};
  MatrixIn gradient = call.gy;
  gradient.exponents = call.exponents;
  const ColumnsJob columns{
      gradient, &work.tokens, Side::gradient, call.sketch_key, gradient_columns_quant(spec),
      s.columns};
  const ColumnsJob weight{call.w,        &work.out_features, Side::activation,
                          context.key(), weight_quant(spec), s.weight};
  const ColumnSum sum{call.gb, work.accumulate, s.sums};
  const ColumnSum sum_alone{call.gb, work.accumulate, s.sums_alone};
  const Operand& x = packed ? s.activation : call.saved;
  Memory memory;
  memory.zeroed = s.zeroed;
  memory.gy = call.gy;
  if (work.gx) memory.rows[Source::gy] = &rows;
  if (work.weight) memory.columns[Source::w] = &weight;
  if (work.gb) memory.sum = &sum;
  memory.sum_alone = &sum_alone;
  memory.scratch[0] = s.gx_gemm;
  memory.scratch[1] = s.gw_gemm;
  memory.product[0].out = call.gx;
  memory.product[1].out = call.gw;
  if (work.gx) {
    memory.product[0] = product(s.rows, work.weight ? s.weight : call.quantized,
                                work.out_features.divisor, false, call.gx);
  }
  GroupsJob groups = call.groups;
  groups.out = s.activation;
  if (work.gw) {
    memory.columns[Source::gy] = &columns;
    if (packed) memory.groups = &groups;
    (by_token ? memory.token : memory.product[1]) =
        product(s.columns, x, work.tokens.divisor, work.accumulate, call.gw);
  }
  run(context,
      plan::plan_backward(device.facts(), work,
                          {plan::array_facts(call.gy), plan::array_facts(call.w),
                           plan::out_facts(call.gx), plan::out_facts(call.gw)}),
      memory);
}

void CudaBackend::quantize_forward_weight(const Context& context, const RowsJob& job) const {
  const DeviceGuard guard(context.device().index, "quantize_forward_weight");
  const CudaDevice device(context);
  Memory memory;
  memory.rows[Source::w] = &job;
  run(context,
      plan::plan_forward_weight(plan::array_facts(job.x), job.x.rows, job.x.cols,
                                job.hadamard_block),
      memory);
}

void CudaBackend::quantize_forward_input(const Context& context, const RowsJob& job,
                                         const CompressJob* saved, void* workspace) const {
  const DeviceGuard guard(context.device().index, "quantize_forward_input");
  const CudaDevice device(context);
  const plan::DeviceFacts& facts = device.facts();
  std::optional<Kept> also;
  Memory memory;
  if (saved != nullptr) {
    also.emplace(context, facts, *saved, workspace);
    memory = memory_of(*saved, *also);
  }
  memory.rows[Source::x] = &job;
  plan::ArrayFacts x = plan::array_facts(job.x);
  x.powers = job.powers.exponents != nullptr;
  run(context,
      plan::plan_forward_input(facts, x, job.x.rows, job.x.cols, {job.hadamard_block},
                               also ? &also->shape : nullptr),
      memory);
}

std::size_t CudaBackend::forward_workspace(const Context& context, const ForwardWork& work) const {
  return plan::take_scratch(CudaDevice(context).facts(), work, nullptr).bytes;
}

void CudaBackend::forward(const Context& context, const ForwardCall& call, const Checker& check,
                          const Workspace& workspace) const {
  const DeviceGuard guard(context.device().index, "forward_linear");
  const CudaDevice device(context);
  const ForwardWork& work = call.work;
  const int block = work.spec.hadamard_block;
  const ForwardScratch scratch = plan::take_scratch(device.facts(), work, workspace.data);
  check.workspace(workspace, scratch.bytes);
  if (work.empty()) return;
  const RowsJob x{call.x, block, forward_quant, scratch.x};
  const RowsJob weight{call.w, block, forward_quant, scratch.weight};
  Memory memory;
  if (work.input) memory.rows[Source::x] = &x;
  if (work.weight) memory.rows[Source::w] = &weight;
  memory.bias = call.bias;
  memory.wide_bias = scratch.bias;
  memory.scratch[0] = scratch.gemm;
  memory.product[0] = product(work.input ? scratch.x : call.quantized_x,
                              work.weight ? scratch.weight : call.quantized, block, false, call.y);
  if (work.bias) {
    memory.product[0].bias = work.wide ? scratch.bias : static_cast<const float*>(call.bias.data);
  }
  run(context,
      plan::plan_forward(
          device.facts(), work,
          {plan::array_facts(call.x), plan::array_facts(call.w), plan::out_facts(call.y)}),
      memory);
}

}  // namespace hot::detail

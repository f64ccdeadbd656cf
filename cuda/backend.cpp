// CUDA backend: gathers facts about the device and makes plans (plan.h), which launchers.cpp
// executes.
#include "cuda/backend.h"

#include <algorithm>

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
  const LaunchFacts& device = launch_facts(context, "plan");
  const bool restricted = context.arch() == 80;
  facts_.arch = 10 * device.major + device.minor;
  facts_.sm_count = std::max(device.sm_count - context.sm_margin(), std::min(device.sm_count, 2));
  facts_.shared_bytes = device.shared_bytes;
  if (!restricted) plan::set_features(facts_, device.overlap, sm90_built());
  // sm_90 runs INT4 mma.sync at 1/30 of its INT8 rate; only tests of sm_80's kernels use it there.
  facts_.int4_units = device.major == 8 || (restricted && mma_int4(10 * device.major));
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

// ---- calls -------------------------------------------------------------------------------------

std::size_t CudaBackend::gemm_workspace(const Context& context, std::int64_t m, std::int64_t n,
                                        std::int64_t k) const {
  return plan::gemm_workspace(CudaDevice(context).facts(), m, n, k);
}

namespace {

// A product alone. Its workspace holds its scratch, then the counter of tiles.
Work product_work(const plan::DeviceFacts& facts, const GemmArgs& args, void* workspace) {
  Work work;
  work.products[0].args = args;
  work.products[0].scratch = workspace;
  work.counter = reinterpret_cast<std::uint32_t*>(
      static_cast<char*>(workspace) + plan::product_scratch(facts, args.m, args.n, args.k));
  work.zeroed = work.counter;
  return work;
}

}  // namespace

void CudaBackend::gemm(const Context& context, const GemmArgs& args, void* workspace) const {
  const DeviceGuard guard(context.device().index, "gemm");
  const CudaDevice device(context);
  launch_plan(context, plan::plan_gemm(device.facts(), plan::product_shape(args)),
              product_work(device.facts(), args, workspace));
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
  // A memset of the counter may come before the unpacking.
  const bool packed = std::none_of(plan.begin(), plan.end(), [](const plan::Step& step) {
    return step.kernel == plan::Kernel::unpack;
  });
  const std::int64_t bytes = ceil_div(args.k, 2);
  Work work = product_work(device.facts(), packed ? args : unpacked, workspace);
  WorkProduct& product = work.products[0];
  product.packed[0] = {args.a, DType::i4x2, args.m, bytes, args.lda, 1};
  product.packed[1] = {args.b, DType::i4x2, args.n, bytes, args.ldb, 1};
  product.unpacked[0] = {a, DType::i8, args.m, args.k, args.k, 1};
  product.unpacked[1] = {b, DType::i8, args.n, args.k, args.k, 1};
  launch_plan(context, plan, work);
}

std::size_t CudaBackend::workspace(const Context& context, Work& work) const {
  return take_scratch(work, nullptr, plan::plan_of(CudaDevice(context).facts(), work).scratch);
}

void CudaBackend::run(const Context& context, Work& work, const Checker& check,
                      const Workspace& workspace) const {
  const DeviceGuard guard(context.device().index, work.call);
  const CudaDevice device(context);
  const plan::Plan plan = plan::plan_of(device.facts(), work);
  check.workspace(workspace, take_scratch(work, workspace.data, plan.scratch));
  launch_plan(context, plan, work);
}

}  // namespace hot::detail

// Forward product on the CPU.
#include "cpu/backend.h"
#include "forward_work.h"

#include "backward_work.h"

namespace hot::detail {
namespace {

ForwardScratch take_scratch(const Backend& backend, const Context& context, const ForwardWork& work,
                            void* workspace) {
  return take_forward_scratch(workspace, work, [&](std::int64_t m, std::int64_t n, std::int64_t k) {
    return backend.gemm_workspace(context, m, n, k);
  });
}

}  // namespace

void CpuBackend::quantize_forward_weight(const Context& context, const RowsJob& job) const {
  quantize_rows(context, job);
}

void CpuBackend::quantize_forward_input(const Context& context, const RowsJob& job,
                                        const CompressJob* saved, void* workspace) const {
  quantize_rows(context, job);
  if (saved != nullptr) compress(context, *saved, workspace);
}

std::size_t CpuBackend::forward_workspace(const Context& context, const ForwardWork& work) const {
  return take_scratch(*this, context, work, nullptr).bytes;
}

void CpuBackend::forward(const Context& context, const ForwardCall& call, const Checker& check,
                         const Workspace& workspace) const {
  const ForwardWork& work = call.work;
  const int block = work.spec.hadamard_block;
  const ForwardScratch s = take_scratch(*this, context, work, workspace.data);
  check.workspace(workspace, s.bytes);
  if (work.empty()) return;
  if (work.input) quantize_rows(context, {call.x, block, forward_quant, s.x});
  if (work.weight) quantize_rows(context, {call.w, block, forward_quant, s.weight});
  GemmArgs args = product(work.input ? s.x : call.quantized_x,
                          work.weight ? s.weight : call.quantized, block, false, call.y);
  if (work.wide) {
    load_row(simd_kernels(context.isa()), call.bias, 0, 0, work.shape.out_features, s.bias);
    args.bias = s.bias;
  } else if (work.bias) {
    args.bias = static_cast<const float*>(call.bias.data);
  }
  gemm(context, args, s.gemm);
}

}  // namespace hot::detail

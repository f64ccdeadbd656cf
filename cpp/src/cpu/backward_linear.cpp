// Backward pass on the CPU.
#include "backward_work.h"

#include <algorithm>
#include <optional>

#include "checks.h"
#include "cpu/backend.h"

namespace hot::detail {
namespace {

BackwardScratch take_scratch(const Backend& backend, const Context& context,
                             const BackwardWork& work, void* workspace) {
  return take_backward_scratch(workspace, work, nullptr,
                               [&](std::int64_t m, std::int64_t n, std::int64_t k) {
                                 return backend.gemm_workspace(context, m, n, k);
                               });
}

// Whether the pass over g_y's rows can also find the largest values of the columns for g_w. The
// columns must have their own scales and no transform.
bool can_find_columns(const BackwardWork& work) {
  const BackwardLinearSpec& spec = work.spec;
  const Projection& p = work.tokens;
  return spec.gx_scale != Granularity::tensor && spec.gw_scale == Granularity::channel &&
         p.basis == Basis::full && p.body_tokens == p.tokens && !p.equalized &&
         work.shape.out_features <= QuantizeRows::most_found;
}

}  // namespace

void CpuBackend::compress(const Context& context, const CompressJob& job, void*) const {
  if (job.exponents != nullptr) token_exponents(context, job.x, job.exponents);
  if (job.spec.storage == Storage::int8) {
    quantize_columns(context, activation_columns(context, job));
  } else if (job.x.rows > 0 && job.x.cols > 0) {
    compress_groups(context, job.equalized(), job);
  }
}

std::size_t CpuBackend::backward_workspace(const Context& context, const BackwardWork& work) const {
  return take_scratch(*this, context, work, nullptr).bytes;
}

// Runs four phases. Phase 1 reads g_y, w and x. Phase 2 writes codes that need the largest values
// of phase 1. Phase 3 packs panels, phase 4 computes products. Threads synchronise between phases.
// A phase starts its longest tasks first: a long task at the end makes the other threads wait.
void CpuBackend::backward(const Context& context, const BackwardCall& call, const Checker& check,
                          const Workspace& workspace) const {
  const BackwardWork& work = call.work;
  const BackwardLinearSpec& spec = work.spec;
  const BackwardScratch s = take_scratch(*this, context, work, workspace.data);
  check.workspace(workspace, s.bytes);
  const bool by_token = spec.gw_scale == Granularity::token;

  std::optional<QuantizeRows> rows;
  std::optional<QuantizeColumns> weight, columns;
  std::optional<RequantizeGroups> groups;
  std::optional<Product> gx, gw;
  std::optional<SumColumns> sums;
  if (work.gx) {
    rows.emplace(context, RowsJob{call.gy, spec.hadamard_block, gradient_rows_quant(spec), s.rows});
    Operand codes = call.quantized;
    if (weight_quant(spec).per_tensor) codes.scales = 1;
    if (work.weight) {
      codes = s.weight;
      weight.emplace(context, ColumnsJob{call.w, &work.out_features, Side::activation,
                                         context.key(), weight_quant(spec), codes});
    }
    gx.emplace(context, product(s.rows, codes, work.out_features.divisor, false, call.gx),
               s.gx_gemm);
  }
  Operand x = call.saved;
  if (work.gw) {
    MatrixIn gradient = call.gy;
    gradient.exponents = call.exponents;
    columns.emplace(context, ColumnsJob{gradient, &work.tokens, Side::gradient, call.sketch_key,
                                        gradient_columns_quant(spec), s.columns});
    if (spec.storage != Storage::int8) {
      GroupsJob job = call.groups;
      x = job.out = s.activation;
      groups.emplace(context, job);
    }
    if (!by_token) {
      gw.emplace(context, product(s.columns, x, work.tokens.divisor, work.accumulate, call.gw),
                 s.gw_gemm);
    }
  }
  if (work.gb) sums.emplace(context, call.gy, call.gb, work.accumulate);
  const bool found_by_rows = rows && columns && can_find_columns(work);
  if (found_by_rows) rows->find_columns(columns->amax());

  Phase phase(context);
  const bool one_scale = spec.gx_scale == Granularity::tensor;
  if (sums) sums->add_sums(phase);
  if (rows && one_scale) rows->add_largest(phase);
  if (rows && !one_scale) rows->add_codes(phase);
  if (columns && !found_by_rows) columns->add_largest(phase);
  if (weight) weight->add_largest(phase);
  if (groups) groups->add_codes(phase);
  phase.run();

  if (gw) gw->add_panels(phase);
  if (gx && !weight) gx->add_panels(phase);
  if (rows && one_scale) rows->add_codes(phase);
  if (columns) columns->add_codes(phase, found_by_rows);
  if (weight) weight->add_codes(phase);
  phase.run();

  if (rows) rows->finish();
  if (columns) columns->add_finish(phase);
  if (weight) weight->add_finish(phase);
  if (gx && weight) gx->add_panels(phase);
  if (gx) gx->add_bias(phase);
  if (gw) gw->add_bias(phase);
  phase.run();

  const bool gx_longer = work.out_features.k_padded > work.tokens.k_padded;
  if (gx && gx_longer) gx->add_tiles(phase);
  if (gw) gw->add_tiles(phase);
  if (gx && !gx_longer) gx->add_tiles(phase);
  phase.run();

  if (work.gw && by_token) {
    gemm_token(context, product(s.columns, x, work.tokens.divisor, work.accumulate, call.gw),
               s.gw_gemm);
  }
  if (work.clear_gx) fill_zero(context, call.gx);
  if (work.clear_gw) fill_zero(context, call.gw);
}

}  // namespace hot::detail

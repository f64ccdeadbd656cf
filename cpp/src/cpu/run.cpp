// Work of a call on the CPU: the stages of all its operands and products, in four phases.
#include <optional>

#include "checks.h"
#include "cpu/backend.h"

namespace hot::detail {
namespace {

// Stages of the operands that are made of one matrix.
struct Quantisers {
  std::optional<QuantizeRows> rows;
  std::optional<QuantizeColumns> columns;
  bool found = false;  // the pass over the rows finds the largest values of the columns
};

// Whether the pass over a matrix's rows can also find the largest values of its columns. The
// columns must have their own scales and no transform.
bool can_find_columns(const Operand& rows, const Operand& columns) {
  const Projection& p = columns.transform;
  return rows.powers.exponents == nullptr && !rows.quant.per_tensor && !columns.quant.per_tensor &&
         !columns.quant.per_contraction && p.basis == Basis::full && p.body_tokens == p.tokens &&
         !p.equalized && columns.x.cols <= QuantizeRows::most_found;
}

std::size_t take_memory(const CpuBackend& backend, const Context& context, Work& work,
                        void* memory) {
  ScratchSizes sizes;
  for (int i = 0; i < 2; ++i) {
    const GemmArgs& args = work.products[i].args;
    sizes.product[i] = backend.gemm_workspace(context, args.m, args.n, args.k);
  }
  return take_scratch(work, memory, sizes);
}

}  // namespace

std::size_t CpuBackend::workspace(const Context& context, Work& work) const {
  return take_memory(*this, context, work, nullptr);
}

// Runs four phases. Phase 1 reads the matrices. Phase 2 writes codes that need the largest values
// of phase 1. Phase 3 packs panels, phase 4 computes products. Threads synchronise between phases.
// A phase starts its longest tasks first: a long task at the end makes the other threads wait.
void CpuBackend::run(const Context& context, Work& work, const Checker& check,
                     const Workspace& memory) const {
  check.workspace(memory, take_memory(*this, context, work, memory.data));
  Quantisers sources[3];  // by Source
  std::optional<RequantizeGroups> groups;
  std::optional<Product> products[2];
  std::optional<SumColumns> sums;
  for (const Operand& operand : work.operands) {
    Quantisers& source = sources[static_cast<int>(operand.source)];
    if (operand.exponents != nullptr) token_exponents(context, operand);
    if (operand.from == From::codes) continue;
    if (operand.from == From::groups) {
      groups.emplace(context, operand);
    } else if (operand.code == Storage::int4) {
      compress_groups(context, operand);
    } else if (operand.out.scales == 0) {
      continue;  // neither codes nor scales
    } else if (operand.along == Along::row) {
      source.rows.emplace(context, operand);
    } else {
      source.columns.emplace(context, operand);
      const Operand* const rows = work.operands.find(operand.source, Along::row);
      source.found = rows != nullptr && can_find_columns(*rows, operand);
    }
  }
  if (work.widens()) {
    load_row(simd_kernels(context.isa()), work.bias, 0, 0, work.bias.cols, work.wide_bias);
  }
  for (int i = 0; i < 2; ++i) {
    const WorkProduct& product = work.products[i];
    if (product.multiplies()) products[i].emplace(context, product.args, product.scratch);
  }
  if (work.sum.out.cols > 0) sums.emplace(context, work.sum);

  Phase phase(context);
  if (sums) sums->add_sums(phase);
  for (Quantisers& source : sources) {
    auto& [rows, columns, found] = source;
    if (found) rows->find_columns(columns->amax());
    if (rows && rows->one_scale()) rows->add_largest(phase);
    if (rows && !rows->one_scale()) rows->add_codes(phase);
    if (columns && !found) columns->add_largest(phase);
  }
  if (groups) groups->add_codes(phase);
  phase.run();

  // Panels of a weight that is quantised by columns wait for its codes.
  const auto late = [&](int i) {
    const Operand& operand = work.operands.begin()[work.products[i].b];
    return operand.from == From::matrix && operand.along == Along::column;
  };
  for (const int i : {1, 0}) {
    if (products[i] && !late(i)) products[i]->add_panels(phase);
  }
  for (const auto& [rows, columns, found] : sources) {
    if (rows && rows->one_scale()) rows->add_codes(phase);
    if (columns) columns->add_codes(phase, found);
  }
  phase.run();

  for (const auto& [rows, columns, found] : sources) {
    if (rows) rows->finish();
    if (columns) columns->add_finish(phase);
  }
  for (int i = 0; i < 2; ++i) {
    if (products[i] && late(i)) products[i]->add_panels(phase);
    if (products[i]) products[i]->add_bias(phase);
  }
  phase.run();

  const bool first_longer = work.products[0].args.k > work.products[1].args.k;
  if (products[0] && first_longer) products[0]->add_tiles(phase);
  if (products[1]) products[1]->add_tiles(phase);
  if (products[0] && !first_longer) products[0]->add_tiles(phase);
  phase.run();

  for (const WorkProduct& product : work.products) {
    if (product.by_k && product.exists()) gemm_token(context, product.args, product.scratch);
    if (product.clear) fill_zero(context, product.args.out);
  }
}

}  // namespace hot::detail

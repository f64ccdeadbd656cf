// Launchers of a plan's steps, each in the file of its kernel. The step holds all decisions, the
// other arguments the memory. The context's device must be current.
#pragma once

#include <cstdint>

#include "backward_work.h"
#include "kernels.h"
#include "plan/plan.h"

namespace hot::detail {

// quantize_rows.cu
void launch_rows(const Context&, const plan::Step&, const RowsJob&);
// quantize_rows_column_amax.cu; `sum` may be null, here and below
void launch_rows_column_amax(const Context&, const plan::Step&, const RowsJob&, const ColumnsJob&,
                             const ColumnSum* sum);
// quantize_rows_groups.cu
void launch_rows_groups(const Context&, const plan::Step&, const RowsJob&, const CompressJob&);
// quantize_columns.cu
void launch_columns(const Context&, const plan::Step&, const ColumnsJob&, const ColumnSum* sum);
// quantize_columns_generic.cu
void launch_generic_columns(const Context&, const plan::Step&, const ColumnsJob&);
// quantize.cu
void launch_finish_scales(const Context&, const plan::Step&, const ColumnsJob&);
// quantize_grouped.cu; jobs may be null
struct GroupedJobs {
  const RowsJob* rows = nullptr;
  const ColumnsJob* columns = nullptr;
  const ColumnsJob* weight = nullptr;
  const GroupsJob* groups = nullptr;
  const ColumnSum* sum = nullptr;
};
void launch_grouped(const Context&, const plan::Step&, const GroupedJobs&);
// int4_activation.cu
void launch_token_exponents(const Context&, const plan::Step&, const CompressJob&);
void launch_groups(const Context&, const plan::Step&, const CompressJob&);
void launch_requantize(const Context&, const plan::Step&, const GroupsJob&);
// bias.cu
void launch_partial_sum(const Context&, const plan::Step&, const MatrixIn& x, void* sums);
void launch_final_sum(const Context&, const plan::Step&, const ColumnSum&);
void launch_fill_zero(const Context&, const plan::Step&, const MatrixOut&);
// pack.cu
void launch_unpack(const Context&, const plan::Step&, const MatrixIn& packed, const MatrixOut& out);
// gemm.cu
void launch_broadcast_scale(const Context&, const plan::Step&, const float* scale,
                            std::int64_t count, float* vector);
void launch_widen(const Context&, const plan::Step&, const MatrixIn& bias, float* out);
void launch_wgmma(const Context&, const plan::Step&, const GemmArgs&, void* workspace);
// gemm_small.cu; products in the order of the plan
void launch_small_gemms(const Context&, const plan::Step&, const GemmArgs* products, int count);
// gemm_sm80.cu: kernels mma_* (args.k counts values, also for INT4) and token
void launch_mma(const Context&, const plan::Step&, const GemmArgs&, void* workspace);
void launch_token(const Context&, const plan::Step&, const GemmArgs&);

}  // namespace hot::detail

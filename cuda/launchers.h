// The steps of a plan as launches, each in the file of its kernel. The step holds all decisions,
// the other arguments hold the memory. The device is current.
#pragma once

#include <cstdint>

#include "backward_work.h"
#include "cuda/plan.h"
#include "kernels.h"

namespace hot::detail {

// quantize_rows.cu
void launch_rows(const Context&, const plan::Step&, const RowsJob&);
// quantize_rows_column_amax.cu; `sum`: null: not wanted, as below
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
// quantize_grouped.cu; null: not wanted
struct GroupedJobs {
  const RowsJob* rows = nullptr;
  const ColumnsJob* columns = nullptr;
  const ColumnsJob* weight = nullptr;
  const GroupsJob* groups = nullptr;
  const ColumnSum* sum = nullptr;
};
void launch_grouped(const Context&, const plan::Step&, const GroupedJobs&);
// int4_activation.cu
void launch_groups(const Context&, const plan::Step&, const CompressJob&);
void launch_requantize(const Context&, const plan::Step&, const GroupsJob&);
// rotated_activation.cu
void launch_token_exponents(const Context&, const plan::Step&, const CompressJob&);
void launch_rotate(const Context&, const plan::Step&, const CompressJob&);
void launch_requantize_rotated(const Context&, const plan::Step&, const GroupsJob&);
// token_sizes.cu
struct SizesJob {
  const char* stage;
  MatrixIn x;
  FeatureScratch scratch;  // its sums and the first sampled exponents, the CTAs' ticket, are zeros
  std::uint8_t* exponents;
  float* ones;  // as many as there are factors; null: not wanted
  std::int64_t padded;
  Key signs;
};
void launch_feature_sizes(const Context&, const plan::Step&, const SizesJob&);
// token_rows.cu; `sums`: null: not wanted
void launch_token_rows(const Context&, const plan::Step&, const RowsJob&, float* sums);
void launch_kept_tokens(const Context&, const plan::Step&, const CompressJob&,
                        const float* factors);
// token_gradient.cu
// The tokens that g_w takes, by slots: all, or a share.
struct DeviceDrawn {
  std::int32_t* token;  // null: slot and token are the same; -1: an empty slot
  float* factor;        // what a slot's contribution is multiplied by
  std::int64_t slots;
};
struct TransposeJob {
  Operand from, to;
  DeviceDrawn drawn;
};
struct ContributionsJob {
  const TokenCodesIn* x;
  Key key;                   // that x is kept with
  const float* token_scale;  // of g_y's tokens
  DeviceDrawn drawn;
  Operand out;
};
struct UndoJob {
  MatrixOut product;  // fp32 [O', I']
  bool by_rows;       // its rows in the order of product_row
  int out_block, in_block;
  const float* out_factors;
  Key in_key;
  const std::uint8_t* in_exponents;
  bool accumulate;
  MatrixOut out;
};
void launch_draw_tokens(const Context&, const plan::Step&, const ContributionsJob&);
void launch_token_transpose(const Context&, const plan::Step&, const TransposeJob&);
void launch_contributions(const Context&, const plan::Step&, const ContributionsJob&);
void launch_undo_transforms(const Context&, const plan::Step&, const UndoJob&);
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
// gemm_small.cu; the products in the order of the plan
void launch_small_gemms(const Context&, const plan::Step&, const GemmArgs* products, int count);
// gemm_sm80.cu: the kernels mma_*; of INT4 operands args.k counts values. token
void launch_mma(const Context&, const plan::Step&, const GemmArgs&, void* workspace);
void launch_token(const Context&, const plan::Step&, const GemmTokenArgs&);

// How many of a kernel's CTAs or clusters the device runs at the same time.
std::int64_t clusters_at_once(const Context&, const plan::ColumnsOnePass&, const LaunchShape&);

}  // namespace hot::detail

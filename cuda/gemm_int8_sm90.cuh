// Stage: integer product for sm_90a with CUTLASS's collective builder: wgmma on INT8, operands by
// TMA, persistent grid, INT32 sums, and in the epilogue
//   out[m, n] = (sum * b_scale[n]) * (a_scale[m] * inv_divisor)
// as a visitor tree, so that the sums never leave the registers. One instance a file (it compiles
// for a minute); gemm_int8_sm90.cu chooses among them.
#pragma once

#include <cstddef>

#include "cuda/gemm_int8_sm90.h"
#include "cuda/launch.h"
#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"

namespace hot::detail {

template <class Out, class TileShape, class ClusterShape, class MainloopSchedule,
          class EpilogueSchedule, class Scheduler = cutlass::gemm::PersistentScheduler>
struct Sm90Gemm {
  using Layout = cutlass::layout::RowMajor;
  static constexpr int out_alignment = 16 / static_cast<int>(sizeof(Out));
  static constexpr auto round = cutlass::FloatRoundStyle::round_to_nearest;

  using Multiply = cutlass::epilogue::fusion::Sm90Compute<cutlass::multiplies, float, float, round>;
  using MultiplyOut =
      cutlass::epilogue::fusion::Sm90Compute<cutlass::multiplies, Out, float, round>;
  using RowScale = cutlass::epilogue::fusion::Sm90ColBroadcast<0, TileShape, float>;
  using ColumnScale = cutlass::epilogue::fusion::Sm90RowBroadcast<0, TileShape, float>;
  using Divisor = cutlass::epilogue::fusion::Sm90ScalarBroadcast<float>;
  using Fusion = cutlass::epilogue::fusion::Sm90EVT<
      MultiplyOut,
      cutlass::epilogue::fusion::Sm90EVT<Multiply, ColumnScale,
                                         cutlass::epilogue::fusion::Sm90AccFetch>,
      cutlass::epilogue::fusion::Sm90EVT<Multiply, RowScale, Divisor>>;

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
      cutlass::epilogue::collective::EpilogueTileAuto, std::int32_t, float, void, Layout,
      out_alignment, Out, Layout, out_alignment, EpilogueSchedule, Fusion>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, std::int8_t, cutlass::layout::RowMajor,
      16, std::int8_t, cutlass::layout::ColumnMajor, 16, std::int32_t, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      MainloopSchedule>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop,
                                                      Epilogue, Scheduler>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static constexpr bool stream_k = cute::is_same_v<Scheduler, cutlass::gemm::StreamKScheduler>;

  // Both scales are vectors here: the caller has spread single ones. `splits` is for stream-K: 1
  // leaves the division of the contraction to CUTLASS.
  static typename Device::Arguments arguments(const Context& context, const GemmArgs& args,
                                              int sm_count, int splits) {
    const int m = static_cast<int>(args.m), n = static_cast<int>(args.n),
              k = static_cast<int>(args.k);
    const auto stride_a = cute::make_stride(args.lda, cute::Int<1>{}, std::int64_t{0});
    const auto stride_b = cute::make_stride(args.ldb, cute::Int<1>{}, std::int64_t{0});
    const auto stride_d = cute::make_stride(args.out.row_stride, cute::Int<1>{}, std::int64_t{0});
    typename Device::Arguments all{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {m, n, k, 1},
        {args.a, stride_a, args.b, stride_b},
        {{}, nullptr, stride_d, static_cast<Out*>(args.out.data), stride_d}};
    all.epilogue.thread = {{{args.b_scale, 0.0F, {}}, {}, {}},
                           {{args.a_scale, 0.0F, {}}, {{args.inv_divisor}, {nullptr}}, {}},
                           {}};
    all.hw_info.device_id = context.device().index;
    all.hw_info.sm_count = sm_count;
    // Measured best on nearly every shape of docs/performance.md: along N, no swizzle.
    all.scheduler.max_swizzle_size = 1;
    all.scheduler.raster_order = cutlass::gemm::kernel::detail::RasterOrderOptions::AlongN;
    if constexpr (stream_k) all.scheduler.splits = splits;
    return all;
  }

  static std::size_t workspace(const Context& context, const GemmArgs& args, int sm_count,
                               int splits) {
    return Device::get_workspace_size(arguments(context, args, sm_count, splits));
  }

  static void run(const Context& context, const GemmArgs& args, int sm_count, int splits = 1,
                  void* workspace = nullptr) {
    Device gemm;
    check(gemm.initialize(arguments(context, args, sm_count, splits), workspace, context.stream()),
          "initialize");
    // Where kernels overlap, its producers wait for what is before, as begin_kernel does.
    const bool overlap = !stream_k && kernels_overlap(context, "gemm");
    check(gemm.run(context.stream(), nullptr, overlap), "run");
  }

  static void check(cutlass::Status status, const char* call) {
    if (status == cutlass::Status::kSuccess) return;
    throw Error(ErrorCode::cuda, std::string("gemm: CUTLASS ") + call +
                                     " failed: " + cutlassGetStatusString(status));
  }
};

}  // namespace hot::detail

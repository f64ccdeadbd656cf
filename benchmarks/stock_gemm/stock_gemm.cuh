// INT8 wgmma as CUTLASS's collective builder makes it: persistent scheduler, INT32 sums, row scale
// x column scale in the epilogue by a visitor tree, bf16. Multiplies in hotcore's order
// (cuda/gemm_int8_sm90.cuh), so that the bits are the same; without its divisor, which is 1 here.
// One instance a file: it compiles for a minute.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/kernel_hardware_info.h"
#include "stock_gemm.h"

namespace hot::stock {

template <int tile_m, int tile_n, int cluster_m, int cluster_n, class MainloopSchedule,
          class EpilogueSchedule>
struct Gemm {
  using TileShape = cute::Shape<cute::Int<tile_m>, cute::Int<tile_n>, cute::_128>;
  using ClusterShape = cute::Shape<cute::Int<cluster_m>, cute::Int<cluster_n>, cute::_1>;
  using Out = cutlass::bfloat16_t;
  using Layout = cutlass::layout::RowMajor;
  static constexpr int code_alignment = 16, out_alignment = 8;  // 16 bytes, which TMA asks for

  template <class To>
  using Multiply =
      cutlass::epilogue::fusion::Sm90Compute<cutlass::multiplies, To, float,
                                             cutlass::FloatRoundStyle::round_to_nearest>;
  template <class... Nodes>
  using Tree = cutlass::epilogue::fusion::Sm90EVT<Nodes...>;
  using RowScale = cutlass::epilogue::fusion::Sm90ColBroadcast<0, TileShape, float>;
  using ColumnScale = cutlass::epilogue::fusion::Sm90RowBroadcast<0, TileShape, float>;
  using Sum = cutlass::epilogue::fusion::Sm90AccFetch;
  using Scaled = Tree<Multiply<Out>, Tree<Multiply<float>, ColumnScale, Sum>, RowScale>;

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
      cutlass::epilogue::collective::EpilogueTileAuto, std::int32_t, float, void, Layout,
      out_alignment, Out, Layout, out_alignment, EpilogueSchedule, Scaled>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, std::int8_t, cutlass::layout::RowMajor,
      code_alignment, std::int8_t, cutlass::layout::ColumnMajor, code_alignment, std::int32_t,
      TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      MainloopSchedule>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop,
                                                      Epilogue, cutlass::gemm::PersistentScheduler>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static typename Device::Arguments arguments(const Problem& problem, Order order) {
    const auto dense = [](int columns) {
      return cute::make_stride(std::int64_t{columns}, cute::Int<1>{}, std::int64_t{0});
    };
    const auto [m, n, k, a, b, a_scale, b_scale, out] = problem;
    typename Device::Arguments all{cutlass::gemm::GemmUniversalMode::kGemm,
                                   {m, n, k, 1},
                                   {a, dense(k), b, dense(k)},
                                   {{}, nullptr, dense(n), static_cast<Out*>(out), dense(n)}};
    all.epilogue.thread = {{{b_scale, 0.0F, {}}, {}, {}}, {a_scale, 0.0F, {}}, {}};
    // query_device_multiprocessor_count() ignores its argument and takes the current device.
    all.hw_info.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count();
    using Raster = cutlass::gemm::kernel::detail::RasterOrderOptions;
    all.scheduler.max_swizzle_size = order.swizzle;
    all.scheduler.raster_order = order.along_m ? Raster::AlongM : Raster::AlongN;
    return all;
  }

  static int run(const Problem& problem, Order order, cudaStream_t stream) {
    const auto all = arguments(problem, order);
    cutlass::Status status = Device::can_implement(all);
    // This scheduler and this epilogue need no workspace.
    if (status == cutlass::Status::kSuccess && Device::get_workspace_size(all) != 0) {
      status = cutlass::Status::kErrorWorkspaceNull;
    }
    Device gemm;
    if (status == cutlass::Status::kSuccess) status = gemm.initialize(all, nullptr, stream);
    if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
    return static_cast<int>(status);
  }
};

template <int tile_m, int tile_n, int cluster_m, int cluster_n>
using Pingpong =
    Gemm<tile_m, tile_n, cluster_m, cluster_n, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
         cutlass::epilogue::TmaWarpSpecialized>;
template <int tile_m, int tile_n, int cluster_m, int cluster_n>
using Cooperative =
    Gemm<tile_m, tile_n, cluster_m, cluster_n, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
         cutlass::epilogue::TmaWarpSpecializedCooperative>;

}  // namespace hot::stock

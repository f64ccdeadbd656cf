// Stage: integer product for sm_90a with CUTLASS's collective builder: wgmma on INT8, operands by
// TMA, persistent grid, INT32 sums. The epilogue is a visitor tree that computes
//   scaled = (sum * b_scale[n]) * (a_scale[m] * inv_divisor)
// and stores scaled, out[m, n] + scaled, or scaled + bias[n]. Sums stay in registers and are
// rounded once to the type of out. TMA loads the old values of out as CUTLASS's C. The CTA that
// writes a piece of a tile loads it first; in stream-K this is the CTA that finishes the tile.
// Compiled with --fmad=false, because the order of roundings is fixed (docs/numerics.md). A file
// has all instances of a kernel: the compiler's front end does most of its work once for all of
// them.
#pragma once

#include <cstddef>

#include "cuda/gemm_int8_sm90.h"
#include "cuda/launch.h"
#include "cuda/tile_scheduler_sm90.cuh"
#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"

namespace hot::detail {

// Instance of the product. `tile_n`: columns of a tile. The two CTAs of a cluster are neighbours
// along N or M and share the operand that both read.
template <class Out, Sm90Output output, int tile_n, class ClusterShape, class MainloopSchedule,
          class EpilogueSchedule, class Scheduler>
struct Sm90Gemm {
  static constexpr bool accumulate = output == Sm90Output::accumulate;
  static constexpr bool bias = output == Sm90Output::bias;
  using TileShape = cute::Shape<cute::_128, cute::Int<tile_n>, cute::_128>;
  using Layout = cutlass::layout::RowMajor;
  static constexpr int out_alignment = 16 / static_cast<int>(sizeof(Out));
  static constexpr auto round = cutlass::FloatRoundStyle::round_to_nearest;

  template <template <class> class Operation, class To>
  using Compute = cutlass::epilogue::fusion::Sm90Compute<Operation, To, float, round>;
  template <class... Nodes>
  using Tree = cutlass::epilogue::fusion::Sm90EVT<Nodes...>;
  using RowScale = cutlass::epilogue::fusion::Sm90ColBroadcast<0, TileShape, float>;
  using ColumnScale = cutlass::epilogue::fusion::Sm90RowBroadcast<0, TileShape, float>;
  using Divisor = cutlass::epilogue::fusion::Sm90ScalarBroadcast<float>;
  using Sum = cutlass::epilogue::fusion::Sm90AccFetch;
  using Scaled =
      Tree<Compute<cutlass::multiplies, std::conditional_t<accumulate || bias, float, Out>>,
           Tree<Compute<cutlass::multiplies, float>, ColumnScale, Sum>,
           Tree<Compute<cutlass::multiplies, float>, RowScale, Divisor>>;
  using Before = std::conditional_t<accumulate, Out, void>;  // type of CUTLASS's C
  using Added =
      Tree<Compute<cutlass::plus, Out>, cutlass::epilogue::fusion::Sm90SrcFetch<Before>, Scaled>;
  using Bias = cutlass::epilogue::fusion::Sm90RowBroadcast<0, TileShape, float>;
  using Biased = Tree<Compute<cutlass::plus, Out>, Scaled, Bias>;
  using Fusion = std::conditional_t<accumulate, Added, std::conditional_t<bias, Biased, Scaled>>;

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
      cutlass::epilogue::collective::EpilogueTileAuto, std::int32_t, float, Before, Layout,
      out_alignment, Out, Layout, out_alignment, EpilogueSchedule, Fusion>::CollectiveOp;
  using Stages = cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
      sizeof(typename Epilogue::SharedStorage))>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, std::int8_t, cutlass::layout::RowMajor,
      16, std::int8_t, cutlass::layout::ColumnMajor, 16, std::int32_t, TileShape, ClusterShape,
      Stages, MainloopSchedule>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop,
                                                      Epilogue, Scheduler>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static constexpr bool stream_k = cute::is_same_v<Scheduler, cutlass::gemm::StreamKScheduler>;
  // All stream-K instances must agree here, so that one of them answers for all workspaces.
  static_assert(!stream_k || (Epilogue::get_store_pipe_increment(TileShape{}) == 4 &&
                              cute::size<0>(ClusterShape{}) == 2));

  // CUTLASS's arguments. Both scales are vectors: the caller repeats single ones.
  static typename Device::Arguments arguments(const Context& context, const GemmArgs& args,
                                              const Sm90Plan& plan, void* workspace) {
    const int m = static_cast<int>(args.m), n = static_cast<int>(args.n),
              k = static_cast<int>(args.k);
    const auto stride_a = cute::make_stride(args.lda, cute::Int<1>{}, std::int64_t{0});
    const auto stride_b = cute::make_stride(args.ldb, cute::Int<1>{}, std::int64_t{0});
    const auto stride_d = cute::make_stride(args.out.row_stride, cute::Int<1>{}, std::int64_t{0});
    auto* out = static_cast<Out*>(args.out.data);
    typename Device::Arguments all{cutlass::gemm::GemmUniversalMode::kGemm,
                                   {m, n, k, 1},
                                   {args.a, stride_a, args.b, stride_b},
                                   {{}, nullptr, stride_d, out, stride_d}};
    const typename Scaled::Arguments scaled{
        {{args.b_scale, 0.0F, {}}, {}, {}},
        {{args.a_scale, 0.0F, {}}, {{args.inv_divisor}, {nullptr}}, {}},
        {}};
    if constexpr (accumulate) {
      all.epilogue.ptr_C = out;
      all.epilogue.thread = {{}, scaled, {}};
    } else if constexpr (bias) {
      all.epilogue.thread = {scaled, {args.bias, 0.0F, {}}, {}};
    } else {
      all.epilogue.thread = scaled;
    }
    all.hw_info.device_id = context.device().index;
    all.hw_info.sm_count = plan.sm_count;
    using Order = cutlass::gemm::kernel::detail::RasterOrderOptions;
    all.scheduler.max_swizzle_size = plan.swizzle;
    all.scheduler.raster_order = plan.along_m ? Order::AlongM : Order::AlongN;
    if constexpr (stream_k) {
      all.scheduler.splits = plan.splits;
    } else {
      all.scheduler.counter = static_cast<std::uint32_t*>(workspace);
    }
    return all;
  }

  static std::size_t workspace(const Context& context, const GemmArgs& args, const Sm90Plan& plan) {
    return Device::get_workspace_size(arguments(context, args, plan, nullptr));
  }

  static void run(const Context& context, const GemmArgs& args, const Sm90Plan& plan,
                  void* workspace) {
    const typename Device::Arguments all = arguments(context, args, plan, workspace);
    typename Kernel::Params params = Kernel::to_underlying_arguments(all, workspace);
    if constexpr (stream_k) {
      check(Kernel::initialize_workspace(all, workspace, context.stream()), "initialize_workspace");
    }
    set_shared_limit("gemm", context, reinterpret_cast<const void*>(cutlass::device_kernel<Kernel>),
                     Kernel::SharedStorageSize);
    // Where kernels overlap, its producers wait for what is before, as begin_kernel does.
    const bool overlap = !stream_k && launch_facts(context, "gemm").overlap;
    check(Device::run(params, context.stream(), nullptr, overlap), "run");
  }

  static constexpr Sm90Instance instance() {
    constexpr Sm90Kernel kernel = stream_k        ? Sm90Kernel::stream_k
                                  : tile_n == 192 ? Sm90Kernel::tile_128x192
                                  : tile_n == 256 ? Sm90Kernel::tile_128x256
                                                  : Sm90Kernel::tile_128x128;
    constexpr DType out = cute::is_same_v<Out, float>             ? DType::f32
                          : cute::is_same_v<Out, cutlass::half_t> ? DType::f16
                                                                  : DType::bf16;
    return {kernel, out, output, run, workspace};
  }

  static void check(cutlass::Status status, const char* call) {
    if (status == cutlass::Status::kSuccess) return;
    throw Error(ErrorCode::cuda, std::string("gemm: CUTLASS ") + call +
                                     " failed: " + cutlassGetStatusString(status));
  }
};

using AlongM = cute::Shape<cute::_2, cute::_1, cute::_1>;
using AlongN = cute::Shape<cute::_1, cute::_2, cute::_1>;

}  // namespace hot::detail

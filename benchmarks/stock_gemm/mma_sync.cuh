// A stock tile of CUTLASS for sm_80: mma.sync on INT8, operands by cp.async, and both scales in the
// epilogue as a visitor tree. Any later GPU runs it, too.
#pragma once

// clang-format off: CUTLASS's visitors need what comes before them.
#include "cute/tensor.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/default_gemm_universal_with_visitor.h"
#include "cutlass/epilogue/threadblock/fusion/visitors.hpp"
// clang-format on

#include "stock_gemm.h"

namespace hot::stock {

// CUTLASS's order with the stripes' width as a number of the launch. (Its own takes it as a
// template argument: one instance for each.)
struct Stripes : cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<> {
  static inline thread_local int width = 1;

  CUTLASS_HOST_DEVICE static int get_log_tile(cutlass::gemm::GemmCoord tiles) {
    int log = 0;
#if !defined(__CUDA_ARCH__)
    while (2 << log <= width && 2 << log <= tiles.n()) ++log;
#endif
    return log;
  }
  CUTLASS_HOST_DEVICE static dim3 get_grid_shape(cutlass::gemm::GemmCoord tiles) {
    const int stripe = 1 << get_log_tile(tiles);
    return {static_cast<unsigned>(tiles.m() * stripe),
            static_cast<unsigned>((tiles.n() + stripe - 1) / stripe),
            static_cast<unsigned>(tiles.k())};
  }
};

template <int tile_m, int tile_n, int tile_k, int stages>
struct MmaSync {
  using Tile = cutlass::gemm::GemmShape<tile_m, tile_n, tile_k>;
  using Warp = cutlass::gemm::GemmShape<64, 64, tile_k>;
  using Out = cutlass::bfloat16_t;
  static constexpr int code_alignment = 16, out_alignment = 8;
  static constexpr auto round = cutlass::FloatRoundStyle::round_to_nearest;
  using None = cute::_0;
  using One = cute::_1;

  using Threads =
      cutlass::epilogue::threadblock::OutputTileThreadLayout<Tile, Warp, Out, out_alignment, 1>;
  template <class To>
  using Multiply =
      cutlass::epilogue::threadblock::VisitorCompute<cutlass::multiplies, To, float, round>;
  template <class... Nodes>
  using Tree = cutlass::epilogue::threadblock::Sm80EVT<Nodes...>;
  using RowScale =
      cutlass::epilogue::threadblock::VisitorColBroadcast<Threads, float,
                                                          cute::Stride<One, None, std::int32_t>>;
  using ColumnScale =
      cutlass::epilogue::threadblock::VisitorRowBroadcast<Threads, float,
                                                          cute::Stride<None, One, std::int32_t>>;
  using Sum = cutlass::epilogue::threadblock::VisitorAccFetch;
  using Scaled = Tree<Multiply<Out>, RowScale, Tree<Multiply<float>, ColumnScale, Sum>>;
  using Stored = Tree<cutlass::epilogue::threadblock::VisitorAuxStore<
                          Threads, Out, round, cute::Stride<std::int64_t, One, std::int64_t>>,
                      Scaled>;

  using Kernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
      std::int8_t, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, code_alignment,
      std::int8_t, cutlass::layout::ColumnMajor, cutlass::ComplexTransform::kNone, code_alignment,
      Out, cutlass::layout::RowMajor, out_alignment, std::int32_t, float,
      cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, Tile, Warp,
      cutlass::gemm::GemmShape<16, 8, 32>, Stored, Stripes, stages,
      cutlass::arch::OpMultiplyAddSaturate, 1>::GemmKernel;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static int run(const Problem& problem, Order order, cudaStream_t stream) {
    const auto [m, n, k, a, b, a_scale, b_scale, out] = problem;
    const auto batch = [](int rows, int columns) { return std::int64_t{rows} * columns; };
    const typename Stored::Arguments epilogue{
        {{a_scale, 0.0F, {}}, {{b_scale, 0.0F, {}}, {}, {}}, {}},
        {static_cast<Out*>(out), {n, One{}, batch(m, n)}}};
    const typename Device::Arguments all(cutlass::gemm::GemmUniversalMode::kGemm, {m, n, k}, 1,
                                         epilogue, a, b, nullptr, nullptr, batch(m, k), batch(n, k),
                                         0, 0, k, k, n, n);
    Stripes::width = order.swizzle;
    cutlass::Status status = Device::can_implement(all);
    Device gemm;
    if (status == cutlass::Status::kSuccess) status = gemm.initialize(all, nullptr, stream);
    if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
    return static_cast<int>(status);
  }
};

}  // namespace hot::stock

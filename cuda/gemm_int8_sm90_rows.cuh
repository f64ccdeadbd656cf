// The main loop of an sm_90a product whose a is [K, M]: g_w takes the rows of g_y's codes as they
// lie, without a transposed copy. wgmma takes INT8 with the contraction contiguous alone, so a's
// bytes are transposed on their way through registers:
//   * The TMA brings 128 features of a token as a line of shared memory, swizzled.
//   * A warpgroup takes all 128 features, as two operands of 64 x 32, and every other step of 32
//     tokens. A thread holds rows g and g + 8 of both operands, and 4 of each 16 tokens: it loads 4
//     words, 4 neighbouring features of a token each, and 8 byte permutations make 4 tokens of each
//     feature of them. So the rows of a tile are features in another order (product_row in
//     token_gradient.cu).
//   * Its 4 tokens of 16 are 2t, 2t + 1, 2t + 8, 2t + 9 (t = lane % 4), which lie in different
//   banks.
//     b has its tokens in that order (product_token in token_gradient.cu).
//   * In the end the warpgroups exchange halves of their sums through shared memory, each to have
//   64
//     rows of all tokens, as the epilogue expects.
// What a step needs is loaded beside the products of the steps before it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_mma.hpp"

namespace hot::detail {

// `Base`: CUTLASS's collective for an operand from registers, whose loads and pipeline these are.
template <class Base>
struct RowsMainloop : Base {
  using Pipeline = typename Base::MainloopPipeline;
  using State = typename Base::PipelineState;
  using TileShape = typename Base::TileShape;
  static constexpr int tile_k = cute::size<2>(TileShape{}), steps = tile_k / 64;  // of a warpgroup
  static constexpr int line = 128, stage = line * tile_k;                         // bytes
  static constexpr int group_threads = cutlass::NumThreadsPerWarpGroup;
  static constexpr int exchanged = 64;  // sums of a thread
  static constexpr int exchange_bytes = exchanged * group_threads * 4;
  static_assert(cute::is_same_v<typename Base::SmemLayoutAtomA,
                                cute::GMMA::Layout_MN_SW128_Atom<std::int8_t>>);
  static_assert(cute::size<0>(TileShape{}) == 128 && cute::size<1>(TileShape{}) == 128 &&
                cute::size(typename Base::TiledMma{}) == 2 * group_threads && tile_k == 128);

  struct SharedStorage {
    struct TensorStorage : Base::SharedStorage::TensorStorage {
      alignas(16) std::int32_t exchange[exchange_bytes / 4];
    } tensors;
    typename Base::PipelineStorage pipeline;
  };
  using TensorStorage = typename SharedStorage::TensorStorage;

  template <class Sums>
  CUTLASS_DEVICE void mma(Pipeline pipeline, State read, Sums& result, int k_tiles, int thread,
                          TensorStorage& shared, const typename Base::Params&) {
    using namespace cute;
    const int group = __shfl_sync(0xffffffffU, thread / group_threads, 0);
    const int local = thread % group_threads;
    auto mma = make_tiled_mma(typename Base::TiledMma::Atom{});  // one warpgroup, 64 rows
    const Tensor b = make_tensor(make_smem_ptr(shared.smem_B.data()), typename Base::SmemLayoutB{});
    const auto slice = mma.get_slice(0);
    const Tensor b_steps = slice.make_fragment_B(slice.partition_B(b));  // (MMA, N, steps, stages)
    const Tensor a = make_tensor(make_smem_ptr(shared.smem_A.data()), typename Base::SmemLayoutA{});
    // Four sets of registers, though a stage has two steps of this warpgroup.
    Tensor a_steps = mma.get_slice(local).partition_fragment_A(a(_, _, 0));  // (MMA, 2, 4)
    Tensor a_words = recast<std::uint32_t>(a_steps);                         // (4, 2, 4)
    Tensor sums = partition_fragment_C(mma, select<0, 1>(TileShape{}));      // (MMA, 2, 1)

    const int warp = local / 32, g = local % 32 / 4, t = local % 4;
    const auto chunk = static_cast<unsigned>(2 * warp + g / 4);
    const unsigned base = cast_smem_ptr_to_uint(shared.smem_A.data()) +
                          static_cast<unsigned>(32 * group * line + g % 4 * 4);
    unsigned from[2];  // of token 2t, of token 2t + 1
    for (int i = 0; i < 2; ++i) {
      const auto token = static_cast<unsigned>(2 * t + i);
      from[i] = base + token * line + (chunk ^ token) * 16;
    }
    const auto load = [&](int step, int stage_index, int to) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto at = static_cast<unsigned>(stage_index * stage + (64 * step + 16 * half) * line);
        const std::uint32_t w0 = load_word(from[0] + at), w1 = load_word(from[1] + at);
        const std::uint32_t w2 = load_word(from[0] + at + 8 * line);
        const std::uint32_t w3 = load_word(from[1] + at + 8 * line);
        const std::uint32_t ab = __byte_perm(w0, w1, 0x5140U), AB = __byte_perm(w0, w1, 0x7362U);
        const std::uint32_t cd = __byte_perm(w2, w3, 0x5140U), CD = __byte_perm(w2, w3, 0x7362U);
        a_words(2 * half, 0, to) = __byte_perm(ab, cd, 0x5410U);
        a_words(2 * half + 1, 0, to) = __byte_perm(ab, cd, 0x7632U);
        a_words(2 * half, 1, to) = __byte_perm(AB, CD, 0x5410U);
        a_words(2 * half + 1, 1, to) = __byte_perm(AB, CD, 0x7632U);
      }
    };

    State release = read;
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    pipeline.consumer_wait(read, pipeline.consumer_try_wait(read));
    load(0, read.index(), 0);
    warpgroup_fence_operand(sums);
    // A stage's two steps; `turn`: which half of the registers they have.
    const auto take = [&](auto turn, auto first, auto last) {
      const int at = read.index();
      ++read;
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        constexpr int set = 2 * decltype(turn)::value;
        if (step == 0) {
          load(1, at, set + 1);
        } else if (!last) {
          pipeline.consumer_wait(read, pipeline.consumer_try_wait(read));
          load(0, read.index(), set ^ 2);
        }
        warpgroup_arrive();
        gemm(mma, a_steps(_, _, set + step), b_steps(_, _, 2 * step + group, at), sums);
        mma.accumulate_ = GMMA::ScaleOut::One;
        warpgroup_commit_batch();
        warpgroup_wait<1>();
        if (step == 0 && !first) {
          pipeline.consumer_release(release);
          ++release;
        }
      }
    };
    using Yes = std::true_type;
    using No = std::false_type;
    using Even = std::integral_constant<int, 0>;
    using Odd = std::integral_constant<int, 1>;
    if (k_tiles == 1) {
      take(Even{}, Yes{}, Yes{});
    } else {
      take(Even{}, Yes{}, No{});
      int left = k_tiles - 2;
#pragma unroll 1
      for (; left > 1; left -= 2) {
        take(Odd{}, No{}, No{});
        take(Even{}, No{}, No{});
      }
      if (left == 1) {
        take(Odd{}, No{}, No{});
        take(Even{}, No{}, Yes{});
      } else {
        take(Odd{}, No{}, Yes{});
      }
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
    exchange(group, local, sums, result, shared.exchange);
  }

 private:
  CUTLASS_DEVICE static std::uint32_t load_word(unsigned address) {
    std::uint32_t word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
    return word;
  }

  static constexpr auto barrier = cutlass::arch::ReservedNamedBarriers::FirstUserBarrier;
  CUTLASS_DEVICE static void wait() { cutlass::arch::NamedBarrier::sync(2 * group_threads, 1U); }

  template <class Sums, class Result>
  CUTLASS_DEVICE static void exchange(int group, int local, const Sums& sums, Result& result,
                                      std::int32_t* memory) {
    using namespace cute;
    static_assert(size(Result{}.layout()) == exchanged && size(Sums{}.layout()) == 2 * exchanged);
    auto* const own = reinterpret_cast<int4*>(memory) + local;
    const auto give = [&](int rows) {
#pragma unroll
      for (int i = 0; i < exchanged; i += 4) {
        own[i / 4 * group_threads] = make_int4(sums(i, rows, 0), sums(i + 1, rows, 0),
                                               sums(i + 2, rows, 0), sums(i + 3, rows, 0));
      }
    };
    const auto take = [&](int rows) {
#pragma unroll
      for (int i = 0; i < exchanged; i += 4) {
        const int4 v = own[i / 4 * group_threads];
        result(i) = sums(i, rows, 0) + v.x;
        result(i + 1) = sums(i + 1, rows, 0) + v.y;
        result(i + 2) = sums(i + 2, rows, 0) + v.z;
        result(i + 3) = sums(i + 3, rows, 0) + v.w;
      }
    };
    if (group == 1) give(0);
    wait();
    if (group == 0) take(0);
    wait();
    if (group == 0) give(1);
    wait();
    if (group == 1) take(1);
  }
};

template <class TileShape, class ClusterShape, int epilogue_bytes, class Schedule>
struct RowsMainloopBuilder {
  using CollectiveOp = RowsMainloop<typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, std::int8_t,
      cutlass::layout::ColumnMajor, 16, std::int8_t, cutlass::layout::ColumnMajor, 16, std::int32_t,
      TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<epilogue_bytes + 64 * 128 * 4>,
      Schedule>::CollectiveOp>;
};

}  // namespace hot::detail

// A tile scheduler for CUTLASS's persistent kernels on sm_90 that hands out tiles while the kernel
// runs. CUTLASS's own scheduler gives every CTA its tiles before the start. If another kernel holds
// a CTA's SM, the product waits for all tiles of this CTA.
//
//   counter  One word in global memory, zero before the launch. A cluster draws the number of its
//            next pair of tiles by an atomic addition. The draws of a launch are known in number:
//            every tile once, and for each cluster one draw that finds none. So the last draw
//            resets the word for the next launch.
//   first    Thread 0 of the cluster draws first while the barriers of the kernel are set up. The
//            number reaches both CTAs through shared memory and a barrier of its own. A cluster
//            that starts late may find no tile; it exits.
//   next     Warp 1 of the cluster's first CTA draws a tile ahead of the loaders. It sends the
//            number to the shared memory of both CTAs (st.async, which completes a
//            transaction barrier there). Loaders and consumers wait on that barrier.
//
// The class follows the interface that the kernels of CUTLASS 4.2 have for schedulers with
// IsDynamicPersistent (made for cluster launch control on sm_120). Its users pass the arrivals of
// one CTA. The pipeline here counts the arrivals of all CTAs of a cluster, a warp at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cute/arch/cluster_sm90.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/grid_dependency_control.h"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "cutlass/pipeline/pipeline.hpp"

namespace hot::detail {

// Place where the kernel asks for its first tile: between the two halves of its cluster barrier (as
// pingpong does) or behind them.
enum class FirstTile { inside_barrier, after_barrier };

// Tag for cutlass::gemm::kernel::GemmUniversal.
template <FirstTile first>
struct DynamicTiles {};

template <class ClusterShape, FirstTile first>
class DynamicTileScheduler : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;
  static constexpr std::uint32_t cluster_size = cute::size(ClusterShape{});
  static constexpr std::uint32_t no_tile = 0xffffffff;

 public:
  static constexpr bool IsDynamicPersistent = true;
  static constexpr std::uint32_t stages = 4;

  // Number of a pair of tiles; no tile from the number of pairs on.
  using CLCResponse = std::uint32_t;

  struct Params : Base::Params {
    std::uint32_t* counter = nullptr;
  };
  struct Arguments : Base::Arguments {
    std::uint32_t* counter = nullptr;
  };
  using WorkTileInfo = Base::WorkTileInfo;

  // Barriers and numbers on their way. The last number is the cluster's first draw.
  struct PipelineStorage {
    cutlass::arch::ClusterTransactionBarrier full[stages];
    cutlass::arch::ClusterBarrier empty[stages];
    cutlass::arch::ClusterTransactionBarrier start;
    CLCResponse numbers[stages + 1];

    CUTLASS_DEVICE static PipelineStorage& of(CLCResponse* numbers) {
      return *reinterpret_cast<PipelineStorage*>(reinterpret_cast<char*>(numbers) -
                                                 offsetof(PipelineStorage, numbers));
    }
  };

  class Pipeline {
   public:
    static constexpr std::uint32_t Stages = stages;
    using PipelineState = cutlass::PipelineState<stages>;
    enum class ThreadCategory { NonParticipant, Producer, Consumer, ProducerConsumer };
    struct Params {
      std::uint32_t transaction_bytes = 0;
      ThreadCategory role = ThreadCategory::NonParticipant;
      std::uint32_t producer_blockid = 0, producer_arv_count = 0, consumer_arv_count = 0;
    };

    CUTLASS_DEVICE Pipeline(PipelineStorage& storage, const Params& params) : storage_(storage) {
      if (cutlass::canonical_warp_idx_sync() == 0) {
        const std::uint32_t warps = params.consumer_arv_count / cutlass::NumThreadsPerWarp;
        cutlass::arch::detail::initialize_barrier_array_pair_aligned<
            decltype(storage.full), decltype(storage.empty), stages>(storage.full, storage.empty, 1,
                                                                     warps * cluster_size);
        if (threadIdx.x == 0) storage.start.init(1);
      }
      cutlass::arch::fence_barrier_init();
    }

    // Waits until both CTAs have read the number of this stage, and expects the next one in both.
    CUTLASS_DEVICE void producer_acquire(PipelineState state) {
      if (cute::block_rank_in_cluster() != 0 || idle()) return;
      storage_.empty[state.index()].wait(state.phase());
      const auto lane = static_cast<std::uint32_t>(cutlass::canonical_lane_idx());
      storage_.full[state.index()].arrive_and_expect_tx(sizeof(CLCResponse), lane,
                                                        lane < cluster_size ? 1U : 0U);
    }
    // Pingpong's second consumer gets an end of the tiles of its own.
    CUTLASS_DEVICE void producer_commit(PipelineState state) {
      if (cute::block_rank_in_cluster() != 0 || idle()) return;
      send(state.index(), no_tile);
    }
    // The first CTA stays while the others may still arrive at its barriers.
    CUTLASS_DEVICE void producer_tail(PipelineState state) {
      if (cute::block_rank_in_cluster() != 0 || idle()) return;
      for (std::uint32_t i = 0; i < stages; ++i, ++state) {
        storage_.empty[state.index()].wait(state.phase());
      }
    }
    CUTLASS_DEVICE void consumer_wait(PipelineState state) {
      storage_.full[state.index()].wait(state.phase());
    }
    CUTLASS_DEVICE void consumer_release(PipelineState state) {
      __syncwarp();
      storage_.empty[state.index()].arrive(0, cutlass::canonical_lane_idx() == 0 ? 1U : 0U);
    }
    CUTLASS_DEVICE void send(std::uint32_t stage, CLCResponse number) {
      const auto lane = static_cast<std::uint32_t>(cutlass::canonical_lane_idx());
      if (lane >= cluster_size) return;
      cute::store_shared_remote(number, cute::cast_smem_ptr_to_uint(&storage_.numbers[stage]),
                                cute::cast_smem_ptr_to_uint(&storage_.full[stage]), lane);
    }

   private:
    // Whether the cluster's first draw found no tile: nobody sends or waits then.
    CUTLASS_DEVICE bool idle() const {
      return const_cast<const volatile CLCResponse&>(storage_.numbers[stages]) == no_tile;
    }
    PipelineStorage& storage_;
  };

  // CUTLASS passes the first CTA of the cluster as the one whose loader is throttled; every CTA
  // throttles its own.
  class ThrottlePipeline : public cutlass::PipelineAsync<stages> {
    using Async = cutlass::PipelineAsync<stages>;
    CUTLASS_DEVICE static typename Async::Params here(typename Async::Params params) {
      params.dst_blockid = cute::block_rank_in_cluster();
      return params;
    }

   public:
    CUTLASS_DEVICE ThrottlePipeline(typename Async::SharedStorage& storage,
                                    const typename Async::Params& params)
        : Async(storage, here(params)) {}
  };
  using ThrottlePipelineStorage = typename ThrottlePipeline::SharedStorage;

  class SharedStorage {
   public:
    CUTLASS_DEVICE PipelineStorage& pipeline() { return pipeline_; }
    CUTLASS_DEVICE ThrottlePipelineStorage& throttle_pipeline() { return throttle_; }
    CUTLASS_DEVICE CLCResponse* data() { return pipeline_.numbers; }

   private:
    alignas(16) PipelineStorage pipeline_;
    alignas(16) ThrottlePipelineStorage throttle_;
  };

  template <class ProblemShape, class TileShape, class Cluster>
  static Params to_underlying_arguments(const ProblemShape& problem, TileShape tile,
                                        Cluster cluster,
                                        const cutlass::KernelHardwareInfo& hardware,
                                        const Arguments& args, void* workspace = nullptr,
                                        std::uint32_t = 1, std::uint32_t = 1) {
    return {Base::to_underlying_arguments(problem, tile, cluster, hardware, args, workspace),
            args.counter};
  }

  CUTLASS_DEVICE explicit DynamicTileScheduler(const Params& params)
      : Base(params),
        counter_(params.counter),
        pairs_(static_cast<std::uint32_t>(params.blocks_per_problem_ / cluster_size)),
        clusters_(gridDim.x * gridDim.y / cluster_size) {
    if (draws_first()) {
      // An earlier kernel or memset has zeroed the counter.
      cutlass::arch::wait_on_dependent_grids();
      number_ = draw();
    }
  }

  CUTLASS_DEVICE void set_data_ptr(CLCResponse* numbers) { numbers_ = numbers; }

  // All threads of the cluster call this once, after the barriers of the pipeline are set up. The
  // first number has a barrier of its own: a release by all threads of the cluster takes longer.
  template <class Cluster>
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(Cluster) {
    if constexpr (first == FirstTile::inside_barrier) cute::cluster_wait();
    PipelineStorage& storage = PipelineStorage::of(numbers_);
    if (threadIdx.x == 0) storage.start.arrive_and_expect_tx(sizeof(CLCResponse));
    if (draws_first()) {
      for (std::uint32_t cta = 0; cta < cluster_size; ++cta) {
        cute::store_shared_remote(number_, cute::cast_smem_ptr_to_uint(&storage.numbers[stages]),
                                  cute::cast_smem_ptr_to_uint(&storage.start), cta);
      }
    }
    storage.start.wait(0);
    number_ = const_cast<const volatile CLCResponse&>(numbers_[stages]);
    idle_ = number_ == no_tile;
    if constexpr (first == FirstTile::inside_barrier) cute::cluster_arrive_relaxed();
    return tile();
  }

  // Called by warp 1 of each CTA.
  template <class State>
  CUTLASS_DEVICE State advance_to_next_work(Pipeline& pipeline, State state) const {
    pipeline.producer_acquire(state);
    if (cute::block_rank_in_cluster() == 0) {
      std::uint32_t number = 0;
      if (cutlass::canonical_lane_idx() == 0) number = draw();
      pipeline.send(state.index(), __shfl_sync(0xffffffff, number, 0));
    }
    ++state;
    return state;
  }
  // Pipeline::producer_commit sends it.
  template <class State>
  CUTLASS_DEVICE void store_invalid_response(State) const {}

  using Base::fetch_next_work;
  template <class SchedulerPipeline, class State>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo, SchedulerPipeline& pipeline, State state) {
    if (idle_) return cute::make_tuple(WorkTileInfo::invalid_work_tile(), true);
    pipeline.consumer_wait(state);
    number_ = const_cast<const volatile CLCResponse&>(numbers_[state.index()]);
    pipeline.consumer_release(state);
    return cute::make_tuple(tile(), true);
  }

  // Whether this consumer probably has no later tile: then the next kernel may start early. A
  // consumer takes every `count`-th tile of the cluster.
  CUTLASS_DEVICE bool is_last_tile(const WorkTileInfo&, std::uint32_t count = 1) const {
    return number_ + clusters_ * count >= pairs_;
  }

 private:
  CUTLASS_DEVICE static bool draws_first() {
    return threadIdx.x == 0 && cute::block_rank_in_cluster() == 0;
  }
  CUTLASS_DEVICE std::uint32_t draw() const {
    const std::uint32_t number = atomicAdd(counter_, 1U);
    if (number == pairs_ + clusters_ - 1) atomicExch(counter_, 0U);
    return number < pairs_ ? number : no_tile;
  }
  CUTLASS_DEVICE WorkTileInfo tile() const {
    if (number_ == no_tile) return WorkTileInfo::invalid_work_tile();
    return get_current_work_for_linear_idx(std::uint64_t{number_} * cluster_size +
                                           cute::block_rank_in_cluster());
  }

  std::uint32_t* counter_;
  std::uint32_t pairs_, clusters_;
  CLCResponse* numbers_ = nullptr;
  std::uint32_t number_ = no_tile;
  bool idle_ = true;  // the first draw found no tile
};

}  // namespace hot::detail

namespace cutlass::gemm::kernel::detail {

template <hot::detail::FirstTile first, class TileShape, class ClusterShape, uint32_t stages>
struct TileSchedulerSelector<hot::detail::DynamicTiles<first>, arch::Sm90, TileShape, ClusterShape,
                             stages> {
  using Scheduler = hot::detail::DynamicTileScheduler<ClusterShape, first>;
};

}  // namespace cutlass::gemm::kernel::detail

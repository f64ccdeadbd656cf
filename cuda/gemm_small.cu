// Stage: up to two independent INT8 products in one launch, for sizes that are bound by latency.
//
// gemm_small_kernel. The CTAs are divided between the products. The product with the longer
// contraction per CTA comes first.
//   * tile: 64 or 128 rows x 64 columns, 4 warps (2 x 2) of mma.m16n8k32, sums in registers.
//   * copies: Steps of 128 bytes of K by cp.async into a ring of up to 3 stages of 16 or 24 KB. All
//     stages are requested at once: most CTAs have no more steps. The 16-byte pieces of a row are
//     swizzled by row % 8, which avoids bank conflicts of cp.async and ldmatrix. Pieces of 32 k
//     beyond K are neither copied nor multiplied. Rows outside the matrix are not copied, and their
//     results are not stored.
//   * cluster: A cluster of S CTAs (sm_90) computes S / share tiles. The contraction of a tile is
//     divided among `share` CTAs. They exchange INT32 sums (exact in any order) through the
//     cluster's network. Each finishes 1 / share of the rows.
//   * output: Sums pass through swizzled shared memory. Rows are stored in pieces of 16 bytes if
//     aligned, otherwise element by element.
//   * traffic: A step of a tile reads tile_m + 64 rows of the operands from the L2 cache. The
//     output is written once.
// The division of the work is chosen by a model (TileCost, plan_gemm.cpp).
#include <cstdint>

#include "cuda/device/async_copy.cuh"
#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"

namespace hot::detail {
namespace {

using namespace small_gemm;

constexpr int mma_k = 32, step_mmas = step_k / mma_k;
constexpr int row_pieces = step_k / 16;             // 16-byte pieces of a row in a stage
constexpr int rows_at_once = threads / row_pieces;  // rows that all threads copy together
struct Product {
  GemmArgs gemm;
  unsigned tiles_n;
  int share, share_log2;
  bool vectors;  // rows of the output can be stored in pieces of 16 bytes
};

struct Args {
  Product product[2];
  unsigned second_block;  // first CTA of product 1, a multiple of the cluster size
  int stages;
};

// Position of a 16-byte piece of an operand's row in a stage.
__device__ inline unsigned operand_place(int row, int piece) {
  return static_cast<unsigned>(row * step_k + ((piece ^ (row & 7)) << 4));
}

// Position of a sum in its row of sums. The swizzle of 16-byte pieces avoids bank conflicts of two
// accesses. A half-warp that writes fragments accesses neighbouring pairs of four rows. A
// quarter-warp that reads for 16-bit outputs accesses every second of the 16 pieces of a row.
__device__ inline unsigned sum_place(int row, int column) {
  const int piece = (column / 4) ^ ((row & 3) << 1) ^ (column / 32);
  return static_cast<unsigned>(piece * 16 + column % 4 * static_cast<int>(sizeof(int)));
}

// Waits for the oldest of `stages` groups of copies.
__device__ inline void wait_oldest(int stages) {
  with_constant<1, max_stages>(stages, [](auto n) { wait_copies<decltype(n)::value - 1>(); });
}

// Work of one CTA: a range of K steps, and its rank among the CTAs that share the tile.
template <int TileM>
struct BlockWork {
  const Product& product;
  int m0, n0, rank;
  int k, first_step, steps;

  __device__ BlockWork(const Product& p, unsigned block) : product(p) {
    const unsigned tile = block >> product.share_log2;
    rank = static_cast<int>(block) & (product.share - 1);
    m0 = static_cast<int>(tile / product.tiles_n) * TileM;
    n0 = static_cast<int>(tile % product.tiles_n) * tile_n;
    k = static_cast<int>(product.gemm.k);
    const int all = none() ? 0 : (k + step_k - 1) / step_k;
    first_step = all * rank >> product.share_log2;
    steps = (all * (rank + 1) >> product.share_log2) - first_step;
  }
  // CTAs that only fill up the last cluster lie beyond the last row.
  __device__ bool none() const { return m0 >= product.gemm.m; }
  // Number of products of 32 k in a step.
  __device__ int mmas(int step) const {
    return min(step_mmas, (k - (first_step + step) * step_k + mma_k - 1) / mma_k);
  }
};

template <int TileM>
struct Scales {
  alignas(16) float a[TileM], b[tile_n];
};

// Copies of a thread from global memory: a 16-byte piece of every 16th row.
template <int TileM>
struct Copies {
  const BlockWork<TileM>& work;
  const GemmArgs& gemm;
  int row, piece;
  int rows_a, rows_b;
  const std::int8_t *a, *b;

  __device__ explicit Copies(const BlockWork<TileM>& w)
      : work(w),
        gemm(w.product.gemm),
        row(static_cast<int>(threadIdx.x / row_pieces)),
        piece(static_cast<int>(threadIdx.x % row_pieces)),
        rows_a(static_cast<int>(min(gemm.m - w.m0, std::int64_t{TileM}))),
        rows_b(static_cast<int>(min(gemm.n - w.n0, std::int64_t{tile_n}))) {
    const std::int64_t first_k = std::int64_t{w.first_step} * step_k + piece * 16;
    a = gemm.a + (w.m0 + row) * gemm.lda + first_k;
    b = gemm.b + (w.n0 + row) * gemm.ldb + first_k;
  }

  // Starts the copies of a step. Beyond the end of K, fills with zeros up to a multiple of 32.
  __device__ void load(int step, unsigned char* stage) const {
    const int left = work.k - (work.first_step + step) * step_k - piece * 16;
    unsigned char* const to = stage + operand_place(row, piece);
    const unsigned address = shared_address(to);
    const std::int8_t *const from_a = a + step * step_k, *const from_b = b + step * step_k;
    if (left >= 16) {
#pragma unroll
      for (int r = 0; r < TileM; r += rows_at_once) {
        copy_async_if(row + r < rows_a, address + r * step_k, from_a + r * gemm.lda);
      }
#pragma unroll
      for (int r = 0; r < tile_n; r += rows_at_once) {
        copy_async_if(row + r < rows_b, address + (TileM + r) * step_k, from_b + r * gemm.ldb);
      }
    } else if (left > 0) {
#pragma unroll 1
      for (int r = 0; r < TileM + tile_n; r += rows_at_once) {
        const bool of_a = r < TileM;
        if (row + r < (of_a ? rows_a : TileM + rows_b)) {
          copy_async(address + r * step_k,
                     of_a ? from_a + r * gemm.lda : from_b + (r - TileM) * gemm.ldb, left);
        }
      }
    } else if (piece < 2 * work.mmas(step)) {
#pragma unroll
      for (int r = 0; r < TileM + tile_n; r += rows_at_once) {
        *reinterpret_cast<int4*>(to + r * step_k) = int4{};
      }
    }
  }

  __device__ void load_scales(Scales<TileM>& scales) const {
    static_assert(TileM <= threads && tile_n <= threads);
    const auto t = static_cast<int>(threadIdx.x);
    if (t < rows_a) {
      copy_word_async(shared_address(&scales.a[t]),
                      gemm.a_scale + (work.m0 + t) * gemm.a_scale_step);
    }
    if (t < rows_b) {
      copy_word_async(shared_address(&scales.b[t]),
                      gemm.b_scale + (work.n0 + t) * gemm.b_scale_step);
    }
  }
};

// Part of a tile that a warp computes: rows x 32, in fragments of 16 x 8.
template <int TileM>
struct WarpTile {
  static constexpr int fragments_m = TileM / 32, fragments_n = 4;
  int sum[fragments_m][fragments_n][4] = {};

  __device__ static int row() { return static_cast<int>(threadIdx.x / 64) * (TileM / 2); }
  __device__ static int column() { return static_cast<int>(threadIdx.x / 32 % 2) * 32; }

  // Adds the products of 32 k, number `k32` of a stage.
  __device__ void multiply(unsigned stage, int k32) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    unsigned a[fragments_m][4], b[2][4];
#pragma unroll
    for (int i = 0; i < fragments_m; ++i) {
      load_matrices(a[i], stage + operand_place(row() + i * 16 + lane % 16, k32 * 2 + lane / 16));
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // two n8 fragments: rows 0-7 bytes 0, 16, rows 8-15 bytes 0, 16
      load_matrices(b[j],
                    stage + operand_place(TileM + column() + j * 16 + lane % 8 + lane / 16 * 8,
                                          k32 * 2 + lane / 8 % 2));
    }
#pragma unroll
    for (int i = 0; i < fragments_m; ++i) {
#pragma unroll
      for (int j = 0; j < fragments_n; ++j) {
        MmaInt8::run(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }

  // Calls put(row, column, pair) for every pair of neighbouring sums.
  template <class Put>
  __device__ void for_pairs(const Put& put) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < fragments_m; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < fragments_n; ++j) {
          put(row() + i * 16 + half * 8 + lane / 4, column() + j * 8 + lane % 4 * 2,
              make_int2(sum[i][j][2 * half], sum[i][j][2 * half + 1]));
        }
      }
    }
  }
};

// Dequantises and stores this CTA's share of the rows of a tile.
template <int TileM, class Tag>
__device__ void finish_rows(const BlockWork<TileM>& work, const unsigned char* sums,
                            const Scales<TileM>& scales) {
  constexpr int columns = 16 / Tag::size, row_threads = tile_n / columns;
  const Product& product = work.product;
  const GemmArgs& gemm = product.gemm;
  const int m0 = work.m0, n0 = work.n0, rank = work.rank;
  const int rows = TileM >> product.share_log2;
  const int column = static_cast<int>(threadIdx.x % row_threads) * columns;
  const int live = static_cast<int>(min(gemm.n - n0 - column, std::int64_t{columns}));
  if (live <= 0) return;
  const int end = static_cast<int>(min(std::int64_t{(rank + 1) * rows}, gemm.m - m0));
  for (int row = rank * rows + static_cast<int>(threadIdx.x / row_threads); row < end;
       row += threads / row_threads) {
    const unsigned char* const own_sums = sums + (row & (rows - 1)) * sum_row_bytes;
    int sum[columns] = {};
#pragma unroll 2
    for (int peer = 0; peer < product.share; ++peer) {
#pragma unroll
      for (int c = 0; c < columns; c += 4) {
        const int4 v = *reinterpret_cast<const int4*>(own_sums + peer * rows * sum_row_bytes +
                                                      sum_place(row, column + c));
        sum[c] += v.x, sum[c + 1] += v.y, sum[c + 2] += v.z, sum[c + 3] += v.w;
      }
    }
    float v[columns];
#pragma unroll
    for (int c = 0; c < columns; ++c) {
      v[c] = dequantised(static_cast<float>(sum[c]), scales.a[row], scales.b[column + c],
                         gemm.inv_divisor);
    }
    if (gemm.bias != nullptr) {
      const float* const bias = gemm.bias + n0 + column;
#pragma unroll
      for (int c = 0; c < columns; ++c) v[c] += bias[min(c, live - 1)];
    }
    const std::int64_t first = std::int64_t{m0 + row} * gemm.out.row_stride +
                               std::int64_t{n0 + column} * gemm.out.col_stride;
    if (product.vectors && live == columns) {
      void* const to = static_cast<char*>(gemm.out.data) + first * Tag::size;
      unsigned words[4];
      if (gemm.accumulate) {
        float old[columns];
        load_words(to, words);
        Tag::unpack(words, old);
#pragma unroll
        for (int c = 0; c < columns; ++c) v[c] = old[c] + v[c];
      }
      Tag::pack(v, words);
      store_words(words, to);
    } else {
#pragma unroll
      for (int c = 0; c < columns; ++c) {
        if (c >= live) break;
        const std::int64_t i = first + c * gemm.out.col_stride;
        if (gemm.accumulate) v[c] = Tag::load(gemm.out.data, i) + v[c];
        Tag::store(gemm.out.data, i, v[c]);
      }
    }
  }
}

// Multiplies and adds up this CTA's steps. Their first copies have been started.
template <int TileM>
__device__ void multiply_steps(const BlockWork<TileM>& work, const Copies<TileM>& copies,
                               unsigned char* ring, int stages, WarpTile<TileM>& tile) {
  unsigned char* stage = ring;
  for (int step = 0; step < work.steps; ++step) {
    wait_oldest(stages);
    __syncthreads();
    const int mmas = work.mmas(step);
    if (mmas == step_mmas) {  // registers hold fragments of two products (64 rows: four)
#pragma unroll(TileM == 64 ? step_mmas : 2)
      for (int k32 = 0; k32 < step_mmas; ++k32) tile.multiply(shared_address(stage), k32);
    } else {
#pragma unroll 1
      for (int k32 = 0; k32 < mmas; ++k32) tile.multiply(shared_address(stage), k32);
    }
    if (step + stages < work.steps) {
      __syncthreads();  // no thread uses the stage any more
      copies.load(step + stages, stage);
    }
    commit_copies();
    stage += stage_bytes(TileM);
    if (stage == ring + stages * stage_bytes(TileM)) stage = ring;
  }
}

// Sends every row of sums to the CTA that finishes it. That CTA stores the rows of rank 0 first,
// then those of rank 1, and so on.
template <int TileM>
__device__ void send_sums(const BlockWork<TileM>& work, const WarpTile<TileM>& tile,
                          unsigned char* sums, std::uint64_t* arrived) {
  const int rows_log2 = (TileM == 64 ? 6 : 7) - work.product.share_log2;
  const unsigned group = cluster_rank() - static_cast<unsigned>(work.rank);
  tile.for_pairs([&](int row, int column, int2 pair) {
    const unsigned to = group + static_cast<unsigned>(row >> rows_log2);
    const int place = (work.rank << rows_log2) + (row & ((1 << rows_log2) - 1));
    send_async(
        cluster_address(shared_address(sums), to) + place * sum_row_bytes + sum_place(row, column),
        pair, cluster_address(shared_address(arrived), to));
  });
}

template <int TileM>
__global__ void __launch_bounds__(threads, TileM == 64 ? 5 : 4)
    gemm_small_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ Scales<TileM> scales;
  __shared__ std::uint64_t arrived;  // barrier that counts the sums from the cluster
  const bool second = blockIdx.x >= args.second_block;
  const BlockWork<TileM> work(args.product[second ? 1 : 0],
                              second ? blockIdx.x - args.second_block : blockIdx.x);
  const bool shared_tile = work.product.share > 1;
  if (work.none() && !shared_tile) return;  // in a shared tile others wait for its zero sums
  if (shared_tile) {
    if (threadIdx.x == 0) expect_bytes(shared_address(&arrived), TileM * sum_row_bytes);
    arrive_cluster();
  }
  const Copies<TileM> copies(work);
  begin_kernel();

  for (int s = 0; s < args.stages; ++s) {
    if (s < work.steps) copies.load(s, ring + s * stage_bytes(TileM));
    if (s == 0) copies.load_scales(scales);
    commit_copies();
  }
  if (shared_tile) wait_cluster();
  WarpTile<TileM> tile;
  multiply_steps(work, copies, ring, args.stages, tile);

  unsigned char* const sums = shared_tile ? ring + args.stages * stage_bytes(TileM) : ring;
  if (shared_tile) send_sums(work, tile, sums, &arrived);
  wait_copies<0>();
  __syncthreads();  // the scales have arrived, and no thread uses the ring
  if (shared_tile) {
    wait_bytes(shared_address(&arrived));
  } else {
    tile.for_pairs([&](int row, int column, int2 pair) {
      *reinterpret_cast<int2*>(sums + row * sum_row_bytes + sum_place(row, column)) = pair;
    });
    __syncthreads();
  }
  with_dtype(work.product.gemm.out.dtype,
             [&](auto tag) { finish_rows<TileM, decltype(tag)>(work, sums, scales); });
}

}  // namespace

// Launches the products in the plan's order.
void launch_small_gemms(const Context& context, const plan::Step& step, const Work& work) {
  const auto& part = step.as<plan::SmallGemmStep>();
  const GemmArgs* products[2] = {};
  int count = 0;
  for (const WorkProduct& product : work.products) {
    if (product.multiplies()) products[count++] = &product.args;
  }
  Args args{};
  args.second_block = part.second_block;
  args.stages = part.stages;
  for (int place = 0; place < count; ++place) {
    const int p = part.swapped ? 1 - place : place;
    const GemmArgs& gemm = *products[p];
    Product& product = args.product[place];
    product.gemm = gemm;
    product.tiles_n = static_cast<unsigned>(ceil_div(gemm.n, tile_n));
    product.share = part.plan.share[p];
    product.share_log2 = log2_ceil(product.share);
    const plan::OutFacts out = plan::out_facts(gemm.out);
    product.vectors = out.dense_rows && out.rows_aligned;
  }
  launch("gemm", context, part.plan.tile_m == 64 ? gemm_small_kernel<64> : gemm_small_kernel<128>,
         step.shape, args);
}

}  // namespace hot::detail

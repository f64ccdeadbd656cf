// Plan of a CUDA call: a value that lists its kernels in order, with their launch shapes. This is
// host code without a CUDA header and part of every build. Plans can therefore be made, printed
// (hot/explain.h) and tested without a GPU. cuda/launchers.cpp executes a plan. The files of
// kernels contain kernels and launches, but no decisions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <variant>

#include "plan/gemm_sm80_plan.h"
#include "plan/kernels.def"
#include "work.h"

namespace hot::detail {

// ---- shapes of kernels, shared by device code and plans ----------------------------------------

// Shape of a kernel launch.
struct LaunchShape {
  std::int64_t blocks = 0;
  int threads = 0;
  std::size_t shared_bytes = 0;
  int cluster = 1;  // CTAs per cluster; above 1 only from sm_90 on
  int rows = 1;     // blockDim.y
  // May start before the previous kernel ends (launch.h). CTAs that do are packed on the SMs that
  // are free first, so a long kernel of few CTAs must not.
  bool early = true;
};

// Passes of a quantiser over its source: both at once, or the largest values, then the codes.
enum class Pass { both, amax, codes };

// A lane of rows16_kernel holds 2 to 6 blocks of 16 values, at most 96 registers.
inline constexpr int rows16_min_blocks = 2, rows16_max_blocks = 6;
inline constexpr int rows16_max_lanes = 512;
// Blocks with an instance of rows16_kernel: g_y's, and that of the forward pass.
inline constexpr int gradient_block = 16, forward_block = 64;
constexpr Rounding rows16_rounding(int block) {
  return block == gradient_block ? Rounding::stochastic : Rounding::nearest;
}
constexpr bool rows16_can(int block, Rounding rounding) {
  return (block == gradient_block || block == forward_block) && rounding == rows16_rounding(block);
}

// rows_groups_kernel: rows of x in INT8 for the forward product, and x in INT4, from one read.
namespace rows_groups {
// Threads per CTA, at most, if each lane holds `lane_blocks` blocks of 16.
constexpr int max_threads(int lane_blocks) { return lane_blocks <= 3 ? 256 : rows16_max_lanes; }
}  // namespace rows_groups

namespace columns {

// Transform of 16 tokens: none, a 16-point FWHT, its 8 kept rows, or a power of two per token.
enum class ColumnTransform { full, hadamard, projected, factored };
// Rounding of a transform's instances. `hadamard` is the transform of w, which rounds to nearest.
constexpr Rounding rounding_of(ColumnTransform transform) {
  return transform == ColumnTransform::hadamard ? Rounding::nearest : Rounding::stochastic;
}

// A column tile has 64 bytes of every token. A token tile, for a warp, has 128 of its tokens.
constexpr int tile_row_bytes = 64, tile_tokens = 128, tile_bytes = tile_tokens * tile_row_bytes;
constexpr int tile_blocks = tile_tokens / 16;
// A k16 is 16 consecutive k of a column. A lane takes a k16 of 2 columns, a warp 4 of 16 columns.
constexpr int k16 = 16, warp_k16s = 4, warp_columns = 16;
constexpr int max_tile_columns = tile_row_bytes / 2;
// Maximum warps per CTA, and minimum warps per SM (128 registers per thread).
constexpr int max_warps = 8, min_sm_warps = 16;
// CTAs of a cluster at most. Larger clusters need an opt-in, and they find no place while another
// kernel holds some SMs of each group.
constexpr int max_cluster = 8;
// A CTA of two passes takes 512 tokens; a ColumnSum's workspace has room for CTAs of 128.
constexpr int two_pass_warps = 4;

// Tokens that yield a k16.
constexpr int k16_tokens(ColumnTransform transform) {
  return transform == ColumnTransform::projected ? 32 : 16;
}
// Bytes of a warp's notes on a token tile: a fold per block, or a factor (bf16) per token.
constexpr int tile_notes(ColumnTransform transform) {
  return transform == ColumnTransform::factored ? 2 * tile_tokens : tile_blocks;
}
// Steps of a warp through a token tile, 4 k16 each.
constexpr int tile_steps(ColumnTransform transform) {
  return tile_tokens / (warp_k16s * k16_tokens(transform));
}

// Rows that `lowpass` keeps of a 16-point FWHT. The other bases of `projected` (`sketch`,
// `sequency`) keep a subgroup of rows. They fold each block first (token t is added to token t ^
// a), then apply an 8-point FWHT.
constexpr int lowpass_row(int i) {
  constexpr int rows[8] = {0, 1, 2, 3, 4, 8, 10, 12};
  return rows[i];
}
// Fold of `sequency`, which keeps the 8 even rows.
inline constexpr int sequency_fold = 1;

inline std::int64_t token_tiles(const Projection& p, ColumnTransform transform) {
  return ceil_div(p.k_padded, k16 * warp_k16s * tile_steps(transform));
}
inline std::int64_t column_tiles(std::int64_t cols, DType dtype) {
  return ceil_div(cols, tile_row_bytes / static_cast<int>(dtype_size(dtype)));
}

// Whether the values of a k16 in fp32 take as many bytes as its 32 tokens.
constexpr bool fits_in_place(ColumnTransform transform, int dtype_size) {
  return k16_tokens(transform) == 2 * k16 && dtype_size == 2;
}

// Target CTAs per SM: the limit of shared memory (6, or 3 for the one-pass kernel), unless too many
// registers would spill. Stochastic rounding needs more registers.
constexpr int sm_ctas(ColumnTransform transform, int dtype_size, Pass pass) {
  const bool nearest = rounding_of(transform) == Rounding::nearest;
  if (pass == Pass::both) {
    const bool few = fits_in_place(transform, dtype_size) ||
                     (transform == ColumnTransform::full && dtype_size == 2);
    return nearest || few ? 3 : 2;
  }
  return pass == Pass::amax || nearest ? 6 : 5;
}

// Bytes of the largest values and sums of a column tile, per warp or CTA.
constexpr int partials_bytes = max_tile_columns * (8 + 4);

constexpr std::size_t shared_bytes(ColumnTransform transform, int token_tiles, int warps,
                                   int cluster) {
  return static_cast<std::size_t>(token_tiles) * tile_bytes +
         static_cast<std::size_t>(warps * (partials_bytes + tile_notes(transform))) +
         static_cast<std::size_t>(cluster > 1 ? cluster : 1) * partials_bytes;
}

}  // namespace columns

namespace rows_column_amax {

constexpr int threads = 512, token_block = 16, barrier_bytes = 8;
// Tiles of a unit at most, and units that a CTA takes on average where there are so many.
constexpr unsigned max_unit_tiles = 32, cta_units = 6;
// Blocks of 16 rows in a tile of rows of at most 32 lanes.
constexpr int token_blocks(int lanes) { return lanes > 32 ? 1 : threads / lanes / token_block; }

// Shared memory: two tiles, largest values and sums of the columns, the drawn units. Each tile has
// a barrier and the offsets that a sketch folds by.
struct Layout {
  int row_bytes, tile_bytes, slots, fold_words;
  constexpr Layout(std::int64_t columns, int token_blocks)
      : row_bytes(static_cast<int>(columns) * 2),
        tile_bytes(token_blocks * token_block * row_bytes),
        slots(token_blocks * static_cast<int>(columns)),
        fold_words(token_blocks * token_block) {}
  constexpr int largest() const { return 2 * tile_bytes; }
  constexpr int sums() const { return largest() + slots * static_cast<int>(sizeof(std::uint32_t)); }
  constexpr int folds() const { return sums() + slots * static_cast<int>(sizeof(float)); }
  constexpr int barriers() const {
    return folds() + 2 * fold_words * static_cast<int>(sizeof(int));
  }
  constexpr int units() const { return barriers() + 2 * barrier_bytes; }
  constexpr int bytes() const { return units() + 3 * static_cast<int>(sizeof(unsigned)); }
};

}  // namespace rows_column_amax

namespace grouped {

constexpr int threads = 32 * columns::max_warps;
// Warps per token tile, one for 16 columns. Column tiles of 16-bit types have 32 columns.
constexpr int tile_warps(int dtype_size) { return dtype_size == 2 ? 2 : 1; }
constexpr int row_blocks = 2;  // blocks of 16 values per lane
// Words of Operand::amax for a single scale: one per CTA of the first of two launches.
constexpr std::int64_t max_amax_slots = 1024;
// Token tiles per CTA.
constexpr int cta_tiles(int dtype_size) { return columns::max_warps / tile_warps(dtype_size); }

}  // namespace grouped

// Tokens per CTA of token_exponents_kernel, one per warp.
inline constexpr int exponent_rows = 8;

// partial_sum_kernel for g_b alone: a thread adds up 8 blocks of 16 tokens.
namespace bias {

constexpr int sum_threads = 128, sum_run = 8, final_warps = 32;

}  // namespace bias

// gemm_small_kernel: up to two products in one launch (gemm_small.cu).
namespace small_gemm {

constexpr int threads = 128, min_tile_m = 64, tile_n = 64, step_k = 128;
constexpr int max_cluster = 8;  // largest cluster of every sm_90
constexpr int max_stages = 3;   // allows 4 CTAs on an SM with 227 KB, 3 with tiles of 128 rows
constexpr int sum_row_bytes = tile_n * static_cast<int>(sizeof(int));
constexpr int stage_bytes(int tile_m) { return (tile_m + tile_n) * step_k; }

}  // namespace small_gemm

// token_kernel: square tiles of the result, steps of k.
namespace token_product {

constexpr int tile = 32, step = 128, threads = 64;

}  // namespace token_product

// Kernel of a wgmma product (cuda/gemm_int8_sm90.h) and the order of its tiles: along M or N, in
// stripes of `swizzle` tiles. `splits` is stream-K's number of shares of the contraction (1:
// CUTLASS decides).
enum class Sm90Kernel : std::uint8_t { tile_128x128, tile_128x192, tile_128x256, stream_k };
struct Sm90Plan {
  Sm90Kernel kernel;
  int sm_count;
  bool along_m;
  int swizzle, splits;
};

// Division of the work of gemm_small_kernel.
struct SmallPlan {
  int tile_m;    // rows of a tile (64 or 128); it has 64 columns
  int cluster;   // CTAs per cluster: 1, 2, 4 or 8; 1 before sm_90
  int share[2];  // CTAs that share the contraction of a tile, a power of two <= cluster
};

inline constexpr std::int64_t int32_safe_k4 = 33554431;  // for INT4: 64 K <= 2^31 - 1

namespace plan {

// Set of enumerators.
template <class E>
class Set {
 public:
  constexpr Set() = default;
  constexpr Set(E one) : bits_(std::uint64_t{1} << static_cast<unsigned>(one)) {}  // NOLINT: a set
  constexpr Set operator|(Set other) const { return other |= *this; }
  constexpr Set& operator|=(Set other) { return bits_ |= other.bits_, *this; }
  constexpr bool has(E one) const { return meets(one); }
  constexpr bool meets(Set other) const { return (bits_ & other.bits_) != 0; }

 private:
  std::uint64_t bits_ = 0;
};

// ---- the device --------------------------------------------------------------------------------

// Answered by CUTLASS for a device of this machine, by a model for any other
// (cpp/src/explain.cpp).
class DeviceQueries {
 public:
  virtual ~DeviceQueries() = default;
  // Bytes of stream-K's partial sums.
  virtual std::size_t stream_k_workspace(std::int64_t m, std::int64_t n, std::int64_t k,
                                         const Sm90Plan&) const = 0;
};

// Hardware features beyond sm_80 that kernels can use.
enum class Feature : std::uint8_t { clusters, dependent_launch, bulk_copy, wgmma, tcgen05 };
inline constexpr int feature_count = static_cast<int>(Feature::tcgen05) + 1;
const char* feature_name(Feature feature);

using Features = Set<Feature>;

struct DeviceFacts {
  int arch = 0;  // compute capability times 10
  int sm_count = 0;
  std::int64_t shared_bytes = 0;  // maximum per CTA
  Features hardware{};            // features of the device
  Features kernels{};             // features that kernels of this build use on it
  bool int4_units = false;        // INT4 mma.sync at full speed
  const DeviceQueries* queries = nullptr;
};

// Fills both sets for `arch`. `sm90`: the build has kernels of sm_90; `wgmma`: also its products.
// Without this call only kernels of sm_80 are used, as in a context restricted to them.
void set_features(DeviceFacts&, bool sm90, bool wgmma);

// ---- steps -------------------------------------------------------------------------------------

#define HOT_ENUMERATOR(name, ...) name,
enum class Kernel : std::uint8_t { HOT_KERNELS(HOT_ENUMERATOR) };
inline constexpr int kernel_count = static_cast<int>(Kernel::token) + 1;
static_assert(static_cast<int>(Kernel::mma_fixup) - static_cast<int>(Kernel::mma_128x256x128) ==
              mma_tile_count);

struct KernelInfo {
  const char* name;  // name of the __global__ function
  const char* file;
  // True if the kernel may start before the previous one finishes (programmatic dependent launch,
  // launch.h). It then waits before it exits.
  bool can_overlap;
};
const KernelInfo& info(Kernel kernel);

// Arrays of the caller and ranges of the workspace that steps read and write.
enum class Buffer : std::uint8_t { HOT_BUFFERS(HOT_ENUMERATOR) };
#undef HOT_ENUMERATOR
inline constexpr int buffer_count = static_cast<int>(Buffer::wide_bias) + 1;
static_assert(buffer_count <= 64);  // bits in a Set
const char* buffer_name(Buffer buffer);

using Buffers = Set<Buffer>;
constexpr Buffers operator|(Buffer a, Buffer b) { return Buffers(a) | Buffers(b); }

// ---- reasons -----------------------------------------------------------------------------------

// Reason why a kernel cannot do a call's work or is not the fastest. In its text hot::explain
// replaces %n by `number` and %s by `name`. It also inserts names from the step: %a array, %f
// length of the array's rows, %k contraction, %t type.
struct Reason {
  const char* why = nullptr;  // null: no reason against the kernel
  std::int64_t number = 0;
  const char* name = "";
  explicit operator bool() const { return why != nullptr; }
};

// A kernel that was passed over, its cost (text as in Reason; null if the next kernel is as fast)
// and the reason. A step's own kernel in the list stands for its loads of 16 bytes.
struct Refusal {
  Kernel kernel{};
  const char* cost = nullptr;
  Reason reason{};
};
struct Refusals {
  const Refusal *first, *last;
  const Refusal* begin() const { return first; }
  const Refusal* end() const { return last; }
};

// Buffers of an operand: its matrix, its codes, its largest values.
constexpr Buffer matrix_buffer(Source source) {
  return source == Source::gy ? Buffer::gy : source == Source::w ? Buffer::w : Buffer::x;
}
Buffer codes_buffer(const Operand&);
Buffer amax_buffer(const Operand&);
constexpr Buffer buffer_of(Result result) {
  return result == Result::gx ? Buffer::gx : result == Result::gw ? Buffer::gw : Buffer::y;
}

struct RowsStep {
  Source of;
  Pass pass;
  int lane_blocks;  // rows16: blocks of 16 per lane
};
struct ColumnsStep {
  Source of;
  columns::ColumnTransform transform;
  Pass pass;
  int ctas;     // per column tile
  int cluster;  // CTAs that reduce to one scale: all, or 0 for none
};
struct GenericColumnsStep {
  Source of;
  std::int64_t run = 0;  // blocks per thread
};
struct RowsColumnAmaxStep {
  Source of;
  Pass pass;
  columns::ColumnTransform transform;
  int lanes, lane_blocks;  // of a row
  int token_blocks;        // of a tile
  unsigned tiles, unit_tiles;
  std::int64_t counter;  // word of the columns' largest values
};
struct RowsGroupsStep {
  int lane_blocks;            // blocks of 16 per lane
  int row_ctas, column_ctas;  // per 64 tokens
};
// Range of CTAs of quantize_grouped_kernel: whole clusters, in which the first `blocks` CTAs work.
struct GroupedRange {
  unsigned blocks = 0, end = 0;
};
struct GroupedOperand {
  GroupedRange range;
  Pass pass;
  int ctas;     // per column tile; 0 for rows
  int cluster;  // CTAs that reduce to one scale
};
struct GroupedStep {
  columns::ColumnTransform transform;  // transform of the gradient's columns
  GroupedOperand weight, gradient, rows;
  GroupedRange groups;
  int row_lanes_log2;
};
struct SumsStep {
  std::int64_t runs;  // partial sums per column
};
struct ZeroStep {
  std::size_t bytes;
};
// Step of an operand of a product.
struct OperandStep {
  int product;
  bool of_b;
};
struct SmallGemmStep {
  SmallPlan plan;
  int stages;
  bool swapped;  // the second product's CTAs come first
  unsigned second_block;
};
// Step of one of up to two products.
struct ProductStep {
  int product;
  Sm90Plan wgmma{};   // for wgmma kernels
  MmaPlan mma{};      // for mma.sync kernels
  bool int4 = false;  // mma.sync: INT4 operands
};

// Arguments of a kernel apart from its launch shape.
using StepWork = std::variant<std::monostate, RowsStep, ColumnsStep, GenericColumnsStep,
                              RowsColumnAmaxStep, RowsGroupsStep, GroupedStep, SumsStep, ZeroStep,
                              OperandStep, SmallGemmStep, ProductStep>;

struct Step {
  Kernel kernel{};
  LaunchShape shape{};
  Buffers reads{}, writes{};
  StepWork work{};
  DType dtype{};  // type of the input, or of a product's result
  // No data dependency on a kernel that may still run when this one starts (derived).
  bool independent = false;
  std::uint8_t first_passed = 0, end_passed = 0;  // Plan::passed

  template <class T>
  const T& as() const {
    return *std::get_if<T>(&work);
  }
};

// Steps of a call in launch order.
class Plan {
 public:
  const Step* begin() const { return steps_.at; }
  const Step* end() const { return steps_.at + count_; }
  int size() const { return count_; }
  const Step& operator[](int i) const { return steps_.at[i]; }
  void add(Kernel kernel, const LaunchShape& shape, Buffers reads, Buffers writes,
           const StepWork& work = {}, DType dtype = {});
  // Makes a step before the next one zero the counter of tiles. This is a memset in front if no
  // step of the call can. A product leaves the counter zero for the next product.
  void zero_counter();

  ScratchSizes scratch{};  // needs of the steps

  // Kernels that were tried before the step's kernel.
  Refusals passed(const Step& step) const {
    return {passed_.at + step.first_passed, passed_.at + step.end_passed};
  }
  // Returns the first kernel of a list (in order of priority) without a reason against it. The last
  // kernel must have none. The next step records the kernels passed over.
  Kernel choose(std::initializer_list<Refusal> list);
  // Returns true if there is no reason against a kernel. Otherwise the next step records it.
  bool takes(const Refusal& kernel);
  // Makes the next step record the same kernels as the last step.
  void passed_as_before() {
    if (count_ > 0) first_passed_ = steps_.at[count_ - 1].first_passed;
  }

 private:
  // zero 1, rows 2, columns 3, weight 3, requantize 1, products 6, fill_zero 2, sums 2
  static constexpr int max_steps = 20, max_passed = 60;
  template <class T, int count>
  union Slots {  // not initialised, because every call makes a plan
    Slots() {}
    T at[count];
  };
  Slots<Step, max_steps> steps_;
  Slots<Refusal, max_passed> passed_;
  int count_ = 0;
  std::uint8_t first_passed_ = 0, end_passed_ = 0;  // for the next step
  int last_waiting_ = -1;
};

// ---- plans -------------------------------------------------------------------------------------

// Whether an array's rows are contiguous and start at multiples of 16 bytes.
bool rows_aligned(const MatrixIn& x);
// Whether an array's rows consist of whole, aligned groups of 4 contiguous elements.
bool quads_aligned(const MatrixIn& x);

struct OutFacts {
  DType dtype = DType::bf16;
  bool dense_rows = true;    // contiguous rows
  bool rows_aligned = true;  // rows that start at multiples of 16 bytes
};
OutFacts out_facts(const MatrixOut& out);

// Plan of a call: quantisers of all operands, products, g_b. Its `scratch` does not depend on
// addresses, so that the size of a workspace can be asked for without arrays.
Plan plan_of(const DeviceFacts&, const Work&);

// A single product.
struct ProductShape {
  std::int64_t m = 0, n = 0, k = 0;
  bool rows_aligned = true;  // both operands, to 16 bytes
  bool rows_near = true;     // row strides below 2^32 bytes
  bool scaled = true;        // false: unscaled INT32 sums
  bool one_scale_a = false, one_scale_b = false;
  bool accumulate = false;
  bool bias = false;
  OutFacts out{};
};
ProductShape product_shape(const GemmArgs&);
// Input of the choice of a tile. `shape.k` counts values, also for packed INT4.
MmaProduct mma_product(const ProductShape& shape, bool int4);
// Steps count rows, columns and tiles in 32 bits. Throws std::invalid_argument for more.
void check_counts(const char* call, std::initializer_list<std::int64_t> counts);
void check_counts(const char* call, std::int64_t m, std::int64_t n, std::int64_t k);
Plan plan_gemm(const DeviceFacts&, const ProductShape&);
// Plan for packed INT4 operands. `shape` describes the unpacked operands.
Plan plan_gemm_int4(const DeviceFacts&, const ProductShape&, bool packed_aligned);

// Reason why one launch cannot compute the products, and the division of work with the least
// predicted time. Neither tells if one launch is faster.
Reason why_not_small_gemms(const ProductShape* products, int count);
SmallPlan small_plan(const DeviceFacts&, const ProductShape* products, int count);
// Adds the step for a division.
void add_small_gemms(Plan&, const ProductShape* products, int count, const SmallPlan&,
                     Buffers reads, Buffers writes);

// Division of columns in generic_columns_kernel and hla_kernel.
struct GenericGrid {
  std::int64_t run, blocks;
  int threads;
  std::size_t shared_bytes;
};
GenericGrid generic_grid(const Projection&, std::int64_t cols, int extra);

// ---- workspaces --------------------------------------------------------------------------------

// Scratch of a product, and the workspace of a product alone: that and a counter of tiles.
std::size_t product_scratch(const DeviceFacts&, std::int64_t m, std::int64_t n, std::int64_t k);
std::size_t gemm_workspace(const DeviceFacts&, std::int64_t m, std::int64_t n, std::int64_t k);

}  // namespace plan
}  // namespace hot::detail

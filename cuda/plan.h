// Which kernels a call runs on CUDA, in which order and shape: the plan, a value. Pure host code
// without a CUDA header, part of every build, so that plans are made, printed (hot/explain.h) and
// tested where there is no GPU. cuda/backend.cpp executes a plan; the kernels' files hold kernels
// and their launches and decide nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <variant>

#include "backward_work.h"
#include "checks.h"
#include "cuda/gemm_int8_sm90.h"
#include "cuda/gemm_sm80_plan.h"
#include "cuda/launch_shape.h"
#include "cuda/plan_names.h"
#include "forward_work.h"
#include "kernels.h"

namespace hot::detail {

// ---- the shapes of kernels: what their device code and their plans share -----------------------

enum class RowsPass { row_scales, amax, codes };  // codes: `amax` is known

// A lane of rows16_kernel holds 2 to 6 blocks of 16: at most 96 registers.
inline constexpr int rows16_min_blocks = 2, rows16_max_blocks = 6;
inline constexpr int rows16_max_lanes = 512;
// The transforms that it has instances of: g_y's, and the forward pass's of x and w.
inline constexpr int gradient_block = 16, forward_block = 64;
constexpr Rounding rows16_rounding(int block) {
  return block == gradient_block ? Rounding::stochastic : Rounding::nearest;
}
constexpr bool rows16_can(int block, Rounding rounding) {
  return (block == gradient_block || block == forward_block) && rounding == rows16_rounding(block);
}

// Rows of x in INT8, transformed in the forward pass's blocks, and x in INT4 from one read.
namespace rows_groups {
// Largest CTA when each lane holds this many blocks of 16.
constexpr int max_threads(int lane_blocks) { return lane_blocks <= 3 ? 256 : rows16_max_lanes; }
}  // namespace rows_groups

namespace columns {

// Transform of each group of 16 tokens in a column: none, a 16-point FWHT, the 8 rows of it that a
// basis keeps, or a power of two for each token.
enum class ColumnTransform { full, hadamard, projected, factored };
enum class Pass { both, amax, codes };
// The rounding that a transform has instances of: w's is to nearest.
constexpr Rounding rounding_of(ColumnTransform transform) {
  return transform == ColumnTransform::hadamard ? Rounding::nearest : Rounding::stochastic;
}

// A column tile is 64 bytes of every token. A warp takes a token tile of it, 128 tokens.
constexpr int tile_row_bytes = 64, tile_tokens = 128, tile_bytes = tile_tokens * tile_row_bytes;
constexpr int tile_blocks = tile_tokens / 16;
// A lane takes 16 consecutive k (a k16) of two columns at a time; a warp takes 4 k16 of 16 columns.
constexpr int k16 = 16, warp_k16s = 4, warp_columns = 16;
constexpr int max_tile_columns = tile_row_bytes / 2;
// Warps of a CTA at most, and on an SM at least (128 registers a thread).
constexpr int max_warps = 8, min_sm_warps = 16;
// CTAs of a cluster at most. Larger clusters need an opt-in, and they find no place while another
// kernel holds some SMs of each group.
constexpr int max_cluster = 8;
// A CTA of two passes takes 512 tokens; a ColumnSum's workspace has room for CTAs of 128.
constexpr int two_pass_warps = 4;

// Tokens that a k16 is made from.
constexpr int k16_tokens(ColumnTransform transform) {
  return transform == ColumnTransform::projected ? 32 : 16;
}
// Bytes of a warp's notes on a token tile: the fold of each block, or a factor (bf16) of each
// token.
constexpr int tile_notes(ColumnTransform transform) {
  return transform == ColumnTransform::factored ? 2 * tile_tokens : tile_blocks;
}
// Steps of a warp through a token tile, 4 k16 each.
constexpr int tile_steps(ColumnTransform transform) {
  return tile_tokens / (warp_k16s * k16_tokens(transform));
}

// How `projected` makes its 8 rows. Bases whose rows are a subgroup (`sketch`, `sequency`) fold
// each block first: token t is added to token t ^ a, then an 8-point FWHT follows. `lowpass` takes
// a 16-point FWHT and keeps these of its rows.
constexpr int lowpass_row(int i) {
  constexpr int rows[8] = {0, 1, 2, 3, 4, 8, 10, 12};
  return rows[i];
}
// The fold of `sequency`, whose 8 rows are the even ones.
inline constexpr int sequency_fold = 1;

inline std::int64_t token_tiles(const Projection& p, ColumnTransform transform) {
  return ceil_div(p.k_padded, k16 * warp_k16s * tile_steps(transform));
}
inline std::int64_t column_tiles(std::int64_t cols, DType dtype) {
  return ceil_div(cols, tile_row_bytes / static_cast<int>(dtype_size(dtype)));
}

// Whether the 16 k of two columns take as many bytes as the 32 tokens that they are made from.
constexpr bool fits_in_place(ColumnTransform transform, int dtype_size) {
  return k16_tokens(transform) == 2 * k16 && dtype_size == 2;
}

// Target CTAs per SM: what shared memory allows (6, or 3 for the one-pass kernel) if few registers
// spill. Stochastic rounding spills earlier.
constexpr int sm_ctas(ColumnTransform transform, int dtype_size, Pass pass) {
  const bool nearest = rounding_of(transform) == Rounding::nearest;
  if (pass == Pass::both) {
    const bool few = fits_in_place(transform, dtype_size) ||
                     (transform == ColumnTransform::full && dtype_size == 2);
    return nearest || few ? 3 : 2;
  }
  return pass == Pass::amax || nearest ? 6 : 5;
}

// Largest values and sums of a column tile, of one warp or one CTA.
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

// Shared memory: two tiles; largest values and sums of the columns; for each tile the offsets that
// a sketch folds by, and a barrier; the drawn units.
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
// Warps of a token tile, one for 16 columns: column tiles of 16-bit types have 32.
constexpr int tile_warps(int dtype_size) { return dtype_size == 2 ? 2 : 1; }
constexpr int row_blocks = 2;  // blocks of 16 of a lane
// Words of an Operand::amax with one scale for all: one for each CTA of the first of two launches.
constexpr std::int64_t max_amax_slots = 1024;
// Token tiles of a CTA.
constexpr int cta_tiles(int dtype_size) { return columns::max_warps / tile_warps(dtype_size); }

}  // namespace grouped

// token_exponents_kernel: tokens of a CTA, a warp each.
inline constexpr int exponent_rows = 8;

// Partial sums of g_b on its own: a thread adds up 8 blocks of 16 tokens.
namespace bias {

constexpr int sum_threads = 128, sum_run = 8;

}  // namespace bias

// Up to two products in one launch (gemm_small.cu).
namespace small_gemm {

constexpr int threads = 128, min_tile_m = 64, tile_n = 64, step_k = 128;
constexpr int max_cluster = 8;  // the largest that every sm_90 runs
constexpr int max_stages = 3;   // 4 CTAs on an SM of 227 KB, or 3 with 128 rows
constexpr int sum_row_bytes = tile_n * static_cast<int>(sizeof(int));
constexpr int stage_bytes(int tile_m) { return (tile_m + tile_n) * step_k; }

}  // namespace small_gemm

// How such a launch divides its work.
struct SmallPlan {
  int tile_m;    // rows of a tile, 64 or 128 (it has 64 columns)
  int cluster;   // CTAs of a cluster: 1, 2, 4 or 8; 1 before sm_90
  int share[2];  // of them that divide the contraction of one tile; a power of two, <= cluster
};

inline constexpr std::int64_t int32_safe_k4 = 33554431;  // of INT4: 64 K <= 2^31 - 1

namespace plan {

template <class E>  // an enumeration
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

// What devices have beyond sm_80, as far as kernels may use it.
enum class Feature : std::uint8_t { clusters, dependent_launch, bulk_copy, wgmma, tcgen05 };
inline constexpr int feature_count = static_cast<int>(Feature::tcgen05) + 1;
const char* feature_name(Feature feature);

using Features = Set<Feature>;

struct DeviceFacts {
  int arch = 0;  // compute capability times 10
  int sm_count = 0;
  std::int64_t shared_bytes = 0;  // of a CTA, at most
  Features hardware{};            // of the device,
  Features kernels{};             // and those of them that kernels of this build use on it
  bool int4_units = false;        // mma.sync of INT4 at full speed
  const DeviceQueries* queries = nullptr;
};

// Fills both sets for `arch`. The build has kernels of sm_90: `sm90`, and `wgmma` its products.
// Without this call kernels of sm_80 serve, as in a context that is restricted to them.
void set_features(DeviceFacts&, bool sm90, bool wgmma);

// ---- steps -------------------------------------------------------------------------------------

#define HOT_ENUMERATOR(name, ...) name,
enum class Kernel : std::uint8_t { HOT_KERNELS(HOT_ENUMERATOR) };
inline constexpr int kernel_count = static_cast<int>(Kernel::token) + 1;
static_assert(static_cast<int>(Kernel::mma_fixup) - static_cast<int>(Kernel::mma_128x256x128) ==
              mma_tile_count);

struct KernelInfo {
  const char* name;  // of the __global__ function
  const char* file;
  // Whether it can start before the previous kernel has ended (launch.h): it waits at its end.
  bool can_overlap;
};
const KernelInfo& info(Kernel kernel);

// What steps read and write: arrays of the caller, and ranges of the workspace.
enum class Buffer : std::uint8_t { HOT_BUFFERS(HOT_ENUMERATOR) };
#undef HOT_ENUMERATOR
inline constexpr int buffer_count = static_cast<int>(Buffer::wide_bias) + 1;
static_assert(buffer_count <= 64);  // bits of a Set
const char* buffer_name(Buffer buffer);

using Buffers = Set<Buffer>;
constexpr Buffers operator|(Buffer a, Buffer b) { return Buffers(a) | Buffers(b); }

// ---- reasons -----------------------------------------------------------------------------------

// Why a kernel cannot do a call's work, or is not the fastest one for it. Words, in which explain
// puts for %n `number`, for %s `name`, and of the step: for %a its array, for %f that array's row
// length by name, for %k the contraction's, for %t the type.
struct Reason {
  const char* why = nullptr;  // null: it can
  std::int64_t number = 0;
  const char* name = "";
  explicit operator bool() const { return why != nullptr; }
};

// A kernel that was passed over, and what that costs, in such words; null: nothing, the next one is
// as fast. The step's own kernel: its loads of 16 bytes.
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

// The matrix that an operand is made of.
enum class Source : std::uint8_t { gy, w, x };
constexpr Buffer buffer_of(Source source) {
  return source == Source::gy ? Buffer::gy : source == Source::w ? Buffer::w : Buffer::x;
}

struct RowsStep {
  Source of;
  RowsPass pass;
  int lane_blocks;  // rows16: blocks of 16 of a lane
};
struct ColumnsStep {
  Source of;
  columns::ColumnTransform transform;
  columns::Pass pass;
  int ctas;     // of a column tile
  int cluster;  // of them that reduce to one scale: all, or 0 for none
};
struct GenericColumnsStep {
  Source of;
  std::int64_t run = 0;  // blocks of one thread
};
struct RowsColumnAmaxStep {
  Source of;
  RowsPass pass;
  columns::ColumnTransform transform;
  int lanes, lane_blocks;  // of a row
  int token_blocks;        // of a tile
  unsigned tiles, unit_tiles;
  std::int64_t counter;  // word of the columns' largest values
};
struct RowsGroupsStep {
  int lane_blocks;            // of a row
  int row_ctas, column_ctas;  // of 64 tokens
};
// A range of the CTAs of quantize_grouped_kernel: whole clusters, `blocks` of which work.
struct GroupedRange {
  unsigned blocks = 0, end = 0;
};
struct GroupedColumns {
  GroupedRange range;
  columns::Pass pass;
  int ctas;     // of a column tile
  int cluster;  // of them that reduce to one scale
};
struct GroupedStep {
  columns::ColumnTransform transform;  // of the gradient's columns
  GroupedColumns weight, gradient;
  GroupedRange rows, groups;
  RowsPass rows_pass;
  int row_lanes_log2;
};
struct SumsStep {
  std::int64_t runs;  // partial sums of a column
};
struct ZeroStep {
  std::size_t bytes;
};
struct BroadcastScaleStep {
  int product;
  bool of_b;
};
struct UnpackStep {
  bool of_b;
};
struct SmallGemmStep {
  SmallPlan plan;
  int stages;
  bool swapped;  // the second product's CTAs come first
  unsigned second_block;
};
// One of up to two products.
struct ProductStep {
  int product;
  Sm90Plan wgmma{};   // of the wgmma kernels
  MmaPlan mma{};      // of the mma.sync kernels
  bool int4 = false;  // their operands
};

// Arguments of a kernel beside the shape of its launch.
using StepWork = std::variant<std::monostate, RowsStep, ColumnsStep, GenericColumnsStep,
                              RowsColumnAmaxStep, RowsGroupsStep, GroupedStep, SumsStep, ZeroStep,
                              BroadcastScaleStep, UnpackStep, SmallGemmStep, ProductStep>;

struct Step {
  Kernel kernel{};
  LaunchShape shape{};
  Buffers reads{}, writes{};
  StepWork work{};
  DType dtype{};  // of what is read, or of a product's result
  // No data dependency on any kernel that may still run when it starts (derived).
  bool independent = false;
  std::uint8_t first_passed = 0, end_passed = 0;  // Plan::passed

  template <class T>
  const T& as() const {
    return *std::get_if<T>(&work);
  }
};

// The steps of a call, in the order of their launches.
class Plan {
 public:
  const Step* begin() const { return steps_.at; }
  const Step* end() const { return steps_.at + count_; }
  int size() const { return count_; }
  const Step& operator[](int i) const { return steps_.at[i]; }
  void add(Kernel kernel, const LaunchShape& shape, Buffers reads, Buffers writes,
           const StepWork& work = {}, DType dtype = {});

  // The kernels before a step's in its operand's list.
  Refusals passed(const Step& step) const {
    return {passed_.at + step.first_passed, passed_.at + step.end_passed};
  }
  // The first kernel of a list, which is in order of priority, without a reason against it; the
  // last one has none. The next step keeps those passed over.
  Kernel choose(std::initializer_list<Refusal> list);
  // Whether there is no reason against this one; otherwise the next step keeps it.
  bool takes(const Refusal& kernel);
  // The next step keeps the same as the last one.
  void passed_as_before() {
    if (count_ > 0) first_passed_ = steps_.at[count_ - 1].first_passed;
  }

 private:
  // zero; rows 2; columns 3; weight 3; requantize; products 2 of 3; fill_zero 2; sums 2
  static constexpr int max_steps = 20, max_passed = 60;
  template <class T, int count>
  union Slots {  // not initialised: a plan is made for every call
    Slots() {}
    T at[count];
  };
  Slots<Step, max_steps> steps_;
  Slots<Refusal, max_passed> passed_;
  int count_ = 0;
  std::uint8_t first_passed_ = 0, end_passed_ = 0;  // of the next step
  int last_waiting_ = -1;
};

// ---- plans -------------------------------------------------------------------------------------

// Properties of an array, beside its shape, that a plan depends on.
struct ArrayFacts {
  DType dtype = DType::bf16;
  bool rows_aligned = true;   // rows of neighbouring elements that start on 16 bytes
  bool quads_aligned = true;  // of whole aligned fours
};
ArrayFacts array_facts(const MatrixIn& x);

struct OutFacts {
  DType dtype = DType::bf16;
  bool dense_rows = true;    // neighbouring elements
  bool rows_aligned = true;  // that start on 16 bytes
};
OutFacts out_facts(const MatrixOut& out);

struct BackwardArrays {
  ArrayFacts gy{}, w{};
  OutFacts gx{}, gw{};
};

// A backward: quantisers of all operands, products, g_b.
Plan plan_backward(const DeviceFacts&, const BackwardWork&, const BackwardArrays&);

// x [rows, cols] that is kept for backward.
struct CompressShape {
  ArrayFacts x;
  std::int64_t rows, cols;
  const Projection& p;
  const BackwardLinearSpec& spec;
};
// compress_activation: the sizes of the tokens where those are equalised, then x.
Plan plan_compress(const DeviceFacts&, const CompressShape&);
// quantize_weight.
Plan plan_weight(const DeviceFacts&, const ArrayFacts& w, std::int64_t cols, const Projection&,
                 const OperandQuant&, std::int64_t scales);

struct ForwardArrays {
  ArrayFacts x{}, w{};
  OutFacts y{};
};
// forward_linear: quantisers of x and w, the product.
Plan plan_forward(const DeviceFacts&, const ForwardWork&, const ForwardArrays&);
// quantize_forward_input; `kept`: null, or the same x to be kept.
Plan plan_forward_input(const DeviceFacts&, const ArrayFacts& x, std::int64_t rows,
                        std::int64_t cols, const ForwardLinearSpec&, const CompressShape* kept);
// quantize_forward_weight.
Plan plan_forward_weight(const ArrayFacts& w, std::int64_t rows, std::int64_t cols,
                         int hadamard_block);

// A product on its own.
struct ProductShape {
  std::int64_t m = 0, n = 0, k = 0;
  bool rows_aligned = true;  // of both operands, to 16 bytes
  bool rows_near = true;     // less than 2^32 bytes apart
  bool scaled = true;        // or bare INT32 sums
  bool one_scale_a = false, one_scale_b = false;
  bool accumulate = false;
  bool bias = false;
  OutFacts out{};
};
ProductShape product_shape(const GemmArgs&);
// What the choice of a tile depends on; `shape.k` counts values, of packed INT4 as well.
MmaProduct mma_product(const ProductShape& shape, bool int4);
Plan plan_gemm(const DeviceFacts&, const ProductShape&);
// Of packed INT4 operands; `packed`: rows of theirs are aligned (`shape`: of unpacked ones).
Plan plan_gemm_int4(const DeviceFacts&, const ProductShape&, bool packed_aligned);

// Why one launch cannot compute the products, and the division of work with the least predicted
// time; neither says whether one launch is the faster way.
Reason why_not_small_gemms(const ProductShape* products, int count);
SmallPlan small_plan(const DeviceFacts&, const ProductShape* products, int count);
// The step for any such division.
void add_small_gemms(Plan&, const ProductShape* products, int count, const SmallPlan&,
                     Buffers reads, Buffers writes);

// The division of columns that generic_columns_kernel and hla_kernel follow.
struct GenericGrid {
  std::int64_t run, blocks;
  int threads;
  std::size_t shared_bytes;
};
GenericGrid generic_grid(const Projection&, std::int64_t cols, int extra);

// ---- workspaces --------------------------------------------------------------------------------

std::int64_t columns_amax_words(const DeviceFacts&, std::int64_t cols, const Projection&,
                                const OperandQuant&);
std::size_t gemm_workspace(const DeviceFacts&, std::int64_t m, std::int64_t n, std::int64_t k);

// Gives the size (without memory) and the pointers, so they cannot disagree.
BackwardScratch take_scratch(const DeviceFacts&, const BackwardWork&, void* workspace);
ForwardScratch take_scratch(const DeviceFacts&, const ForwardWork&, void* workspace);

}  // namespace plan
}  // namespace hot::detail

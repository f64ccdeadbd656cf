// Which kernels a call runs on CUDA, in which order and shape: the plan, a value. Pure host code
// without a CUDA header, part of every build, so that plans are made, printed (hot/explain.h) and
// tested where there is no GPU. cuda/backend.cu executes a plan; the kernels' files hold kernels
// and their launches and decide nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>

#include "backward_work.h"
#include "checks.h"
#include "cuda/gemm_int8_sm90.h"
#include "cuda/gemm_sm80_plan.h"
#include "cuda/launch_shape.h"
#include "forward_work.h"
#include "kernels.h"

namespace hot::detail {

// ---- the shapes of kernels: what their device code and their plans share -----------------------

enum class RowsPass { row_scales, amax, codes };  // codes: `amax` is known

// A lane of rows16_kernel holds at most 6 blocks of 16: 96 registers.
inline constexpr int rows16_most_blocks = 6;
inline constexpr int rows16_most_lanes = 512;

namespace resident {

enum class Kind { full, whole, sketch8, lowpass8, sequency8 };
enum class Pass { both, amax, codes, any };  // any: as a template argument, args.pass

constexpr int strip_bytes = 64, unit_tokens = 128, unit_bytes = unit_tokens * strip_bytes;
constexpr int unit_blocks = unit_tokens / 16;
constexpr int group_k = 16, lane_groups = 4, warp_columns = 16;
constexpr int most_strip_columns = strip_bytes / 2;
// Warps of a thread block at most, and on an SM at least (128 registers a thread).
constexpr int most_warps = 8, sm_warps = 16, most_parts = 8;
// Thread blocks of a cluster at most: 8 surely fit every device (most_parts); 16, for 16,384
// tokens, have to be asked for.
constexpr int large_parts = 16;
// Parts for two passes hold 512 tokens; a ColumnSum's workspace has room for parts of 128.
constexpr int two_pass_warps = 4;

constexpr int group_tokens(Kind kind) {
  return kind == Kind::full || kind == Kind::whole ? 16 : 32;
}
// Steps of four groups in a unit.
constexpr int unit_steps(Kind kind) { return unit_tokens / (lane_groups * group_tokens(kind)); }

// Row i of those that a basis keeps at rank 8, ascending; kind_of compares them with the caller's.
constexpr int kept_row(Kind kind, int i) {
  constexpr int lowpass[8] = {0, 2, 3, 8, 10, 11, 12, 14};
  return kind == Kind::lowpass8 ? lowpass[i] : 2 * i;
}

inline std::int64_t unit_count(const Projection& p, Kind kind) {
  return ceil_div(p.k_padded, group_k * lane_groups * unit_steps(kind));
}
inline std::int64_t strip_count(std::int64_t cols, DType dtype) {
  return ceil_div(cols, strip_bytes / static_cast<int>(dtype_size(dtype)));
}

// Whether the 16 k of two columns take as many bytes as the 32 tokens that they are made of.
constexpr bool in_place(Kind kind, int dtype_size) {
  return group_tokens(kind) == 2 * group_k && dtype_size == 2;
}

// Thread blocks on an SM: as many as its shared memory has room for (6; of the only pass 3) where
// hardly a register spills for it; random numbers take more.
constexpr int sm_blocks(Kind kind, int dtype_size, Pass pass, Rounding rounding) {
  const bool nearest = rounding == Rounding::nearest;
  if (pass == Pass::both) {
    return nearest || in_place(kind, dtype_size) || (kind == Kind::full && dtype_size == 2) ? 3 : 2;
  }
  return pass == Pass::amax || nearest ? 6 : 5;
}

// A thread block's message to the others of its cluster: a sum and a largest value a column.
constexpr int exchange_bytes = most_strip_columns * (8 + 4);

constexpr std::size_t shared_bytes(int units, int warps, int cluster) {
  return static_cast<std::size_t>(units) * unit_bytes +
         static_cast<std::size_t>(warps) * (exchange_bytes + unit_blocks) +
         2 * static_cast<std::size_t>(cluster > 1 ? cluster : 1) * exchange_bytes;
}

}  // namespace resident

namespace gradient {

constexpr int threads = 512, token_block = 16, barrier_bytes = 8;
constexpr unsigned tiles_a_sum = 32;

// Shared memory: two tiles, then what a thread keeps of its columns, then of two tiles the folds
// and the barriers that count their bytes.
struct Layout {
  int row_bytes, tile_bytes, slots, fold_words;
  HOT_HOST_DEVICE Layout(std::int64_t columns, int token_blocks)
      : row_bytes(static_cast<int>(columns) * 2),
        tile_bytes(token_blocks * token_block * row_bytes),
        slots(token_blocks * static_cast<int>(columns)),
        fold_words(token_blocks * token_block) {}
  HOT_HOST_DEVICE int largest() const { return 2 * tile_bytes; }
  HOT_HOST_DEVICE int sums() const {
    return largest() + slots * static_cast<int>(sizeof(std::uint32_t));
  }
  HOT_HOST_DEVICE int folds() const { return sums() + slots * static_cast<int>(sizeof(float)); }
  HOT_HOST_DEVICE int barriers() const {
    return folds() + 2 * fold_words * static_cast<int>(sizeof(int));
  }
  HOT_HOST_DEVICE int bytes() const { return barriers() + 2 * barrier_bytes; }
};

}  // namespace gradient

namespace small_quantize {

constexpr int threads = 32 * resident::most_warps;
// Warps of a unit, one for 16 columns: strips of 16-bit types have 32.
constexpr int unit_warps(int dtype_size) { return dtype_size == 2 ? 2 : 1; }
constexpr int row_blocks = 2;  // blocks of 16 of a lane
// Words that two launches use of an Operand::amax with one scale for all: the most thread blocks of
// an operand.
constexpr std::int64_t slots = 1024;
// Units that a thread block holds.
constexpr int block_units(int dtype_size) { return resident::most_warps / unit_warps(dtype_size); }

}  // namespace small_quantize

namespace strip {

constexpr int group = 16;
// Partial sums of g_b on its own: a thread adds up 8 blocks of 16 tokens.
constexpr int sum_threads = 128, sum_run = 8;

}  // namespace strip

// Up to two products in one launch (gemm_small.cu).
namespace small_gemm {

constexpr int threads = 128, min_tile_m = 64, tile_n = 64, step_k = 128;
constexpr int max_cluster = 8;  // the largest that every sm_90 runs
constexpr int max_stages = 3;   // 4 thread blocks on an SM of 227 KB, or 3 with 128 rows
constexpr int sum_row_bytes = tile_n * static_cast<int>(sizeof(int));
constexpr int stage_bytes(int tile_m) { return (tile_m + tile_n) * step_k; }

}  // namespace small_gemm

// How such a launch divides its work.
struct SmallPlan {
  int tile_m;    // rows of a tile, 64 or 128 (it has 64 columns)
  int cluster;   // thread blocks of a cluster: 1, 2, 4 or 8; 1 before sm_90
  int share[2];  // of them that divide the contraction of one tile; a power of two, <= cluster
};

inline constexpr std::int64_t int32_safe_k4 = 43826196;  // of INT4: 49 K <= 2^31 - 1

namespace plan {

// ---- the device --------------------------------------------------------------------------------

// An instance of a kernel whose grid depends on how much of it a device runs at once.
struct WideRows {
  Rounding rounding;
  int hadamard;
  int lane_blocks;
  DType dtype;
  int buffers;
};
struct ColumnClusters {
  resident::Kind kind;
  Rounding rounding;
  DType dtype;
};

// What a device is asked for one shape at a time: the CUDA runtime and CUTLASS answer for a device
// that is there, a model for one that is not (cpp/src/explain.cpp).
class DeviceQueries {
 public:
  virtual ~DeviceQueries() = default;
  // Thread blocks or clusters that run at the same time, 1 at least.
  virtual std::int64_t at_once(const WideRows&, const LaunchShape&) const = 0;
  virtual std::int64_t at_once(const ColumnClusters&, const LaunchShape&) const = 0;
  // Bytes that stream-K adds up in.
  virtual std::size_t stream_k_workspace(std::int64_t m, std::int64_t n, std::int64_t k,
                                         const Sm90Plan&) const = 0;
};

struct DeviceFacts {
  int arch = 0;  // compute capability times 10
  int sm_count = 0;
  std::int64_t shared_bytes = 0;  // of a thread block, at most
  // Whether code of sm_90 runs: clusters, bulk copies, kernels that overlap. Never where a context
  // is restricted to the kernels of sm_80.
  bool hopper = false;
  bool wgmma_built = false;  // products by wgmma: in the build,
  bool wgmma = false;        // and usable here
  bool int4_units = false;   // mma.sync of INT4 at full speed
  const DeviceQueries* queries = nullptr;
};

// ---- steps -------------------------------------------------------------------------------------

enum class Kernel : std::uint8_t {
  zero,  // a memset
  // rows of g_y, x and w, and what goes with them
  rows16,
  wide_rows,
  rows,
  gradient,  // rows, and the largest values of columns
  // columns of P g_y and of w
  column_clusters,
  column_amax,
  column_codes,
  strip_amax,
  strip_codes,
  finish_scales,
  // all operands of a small layer
  small_amax,
  small_codes,
  // x
  groups,
  group_pairs,
  requantize,
  // g_b
  partial_sum,
  final_sum,
  // products
  fill_zero,
  spread,
  widen,  // a bias
  unpack,
  gemm_small,
  wgmma_128x128,
  wgmma_128x192,
  wgmma_stream_k,
  mma_128x256x128,  // mma.sync: the tiles of gemm_sm80_plan.h, in their order
  mma_256x128x128,
  mma_128x256x64,
  mma_128x128x64,
  mma_64x64x64,
  mma_any,
  mma_fixup,  // adds up the sums of tiles that thread blocks have shared
  token,
};
inline constexpr int kernel_count = static_cast<int>(Kernel::token) + 1;
static_assert(static_cast<int>(Kernel::mma_fixup) - static_cast<int>(Kernel::mma_128x256x128) ==
              mma_tile_count);

struct KernelInfo {
  const char* name;  // of the __global__ function
  const char* file;
  // Whether it can start before the kernel before it has ended (launch.h): it waits at its end.
  bool can_overlap;
};
const KernelInfo& info(Kernel kernel);

// What steps read and write: arrays of the caller, and parts of the workspace.
enum class Buffer : std::uint8_t {
  gy,
  w,
  x,
  saved,        // x as it was kept
  quantized_w,  // w as quantize_weight kept it
  gx,
  gw,
  gb,
  a,  // operands and result of a product on its own
  b,
  out,
  rows,        // codes and scales of g_y for g_x,
  columns,     // of P g_y for g_w,
  weight,      // of w for g_x,
  activation,  // of x for g_w, where it was kept in INT4
  rows_amax,   // largest values, between two kernels
  columns_amax,
  weight_amax,
  sums,         // partial sums of g_b
  all_scratch,  // the same on their own, from the start of the workspace
  spread_a,     // scales as vectors
  spread_b,
  stream_k,    // sums of tiles that thread blocks share: stream-K's, and those of mma.sync
  unpacked_a,  // INT4 operands as INT8
  unpacked_b,
  bias,  // of the forward product
  y,
  x_rows,       // codes and scales of x and
  weight_rows,  // of w for it;
  forward_w,    // w as quantize_forward_weight kept it
  wide_bias,    // the bias as fp32
};
inline constexpr int buffer_count = static_cast<int>(Buffer::wide_bias) + 1;
static_assert(buffer_count <= 32);  // bits of a Buffers
const char* buffer_name(Buffer buffer);

class Buffers {
 public:
  constexpr Buffers() = default;
  constexpr Buffers(Buffer buffer)  // NOLINT: one buffer is a set of one
      : bits_(std::uint32_t{1} << static_cast<unsigned>(buffer)) {}
  constexpr Buffers operator|(Buffers other) const { return from(bits_ | other.bits_); }
  Buffers& operator|=(Buffers other) { return *this = *this | other; }
  constexpr bool has(Buffer buffer) const { return (bits_ & Buffers(buffer).bits_) != 0; }
  constexpr bool empty() const { return bits_ == 0; }
  // Whether both hold the same memory somewhere.
  bool meets(Buffers other) const;

 private:
  static constexpr Buffers from(std::uint32_t bits) {
    Buffers set;
    set.bits_ = bits;
    return set;
  }
  std::uint32_t bits_ = 0;
};
constexpr Buffers operator|(Buffer a, Buffer b) { return Buffers(a) | Buffers(b); }

// The operand that a step makes.
enum class Job : std::uint8_t { gradient_columns, weight, activation };

// What rows are made of.
enum class RowsOf : std::uint8_t { gy, x, weight };

struct RowsStep {
  RowsOf of;
  RowsPass pass;
  int lanes, lane_blocks;  // rows16, wide_rows: of a row; blocks of 16 of a lane
  int buffers;             // wide_rows: rows on their way
};
struct ColumnsStep {
  Job job;
  resident::Kind kind;
  resident::Pass pass;
  int parts;    // thread blocks of a strip
  int cluster;  // of them that tell each other: all, or 0 for none
};
struct StripStep {
  Job job;
  std::int64_t run;  // blocks of one thread
};
struct FinishStep {
  Job job;
};
struct GradientStep {
  RowsPass pass;
  resident::Kind kind;
  int lanes, lane_blocks;  // of a row
  int token_blocks;        // of a tile
  unsigned tiles, sums;    // sums: partial sums of a column
};
// A range of the thread blocks of quantize_small_kernel: whole clusters, `blocks` of which work.
struct SmallRange {
  unsigned blocks = 0, end = 0;
};
struct SmallStep {
  resident::Kind kind;
  SmallRange weight, gradient, rows, groups;
  resident::Pass weight_pass, gradient_pass;
  RowsPass rows_pass;
  int weight_parts, gradient_parts;      // thread blocks of a strip
  int weight_cluster, gradient_cluster;  // of them that tell each other
  int weight_slots, gradient_slots;      // words that the launch before left
  int row_lanes_log2;
};
struct SumsStep {
  std::int64_t runs;  // partial sums of a column
};
struct ZeroStep {
  std::size_t bytes;
};
struct SpreadStep {
  int product;
  bool of_b;
};
struct UnpackStep {
  bool of_b;
};
struct SmallGemmStep {
  SmallPlan plan;
  int stages;
  bool swapped;  // the second product's thread blocks come first
  unsigned second_block;
};
// One of up to two products.
struct ProductStep {
  int product;
  Sm90Plan wgmma{};   // of the wgmma kernels
  MmaPlan mma{};      // of the mma.sync kernels
  bool int4 = false;  // their operands
};

struct Step {
  Kernel kernel{};
  LaunchShape shape{};
  Buffers reads{}, writes{};
  // Touches nothing that kernels write which may still run when it starts (derived).
  bool independent = false;
  DType dtype{};        // of what is read, or of a product's result
  Rounding rounding{};  // of the kernel's instance
  std::variant<std::monostate, RowsStep, ColumnsStep, StripStep, FinishStep, GradientStep,
               SmallStep, SumsStep, ZeroStep, SpreadStep, UnpackStep, SmallGemmStep, ProductStep>
      work{};

  template <class T>
  const T& as() const {
    return *std::get_if<T>(&work);
  }
};

// The steps of a call, in the order of their launches.
class Plan {
 public:
  const Step* begin() const { return slots_.steps; }
  const Step* end() const { return slots_.steps + count_; }
  int size() const { return count_; }
  const Step& operator[](int i) const { return slots_.steps[i]; }
  Step& add(Kernel kernel, const LaunchShape& shape, Buffers reads, Buffers writes);

 private:
  // zero; rows 2; columns 3; weight 3; requantize; products 2 of 3; fill_zero 2; sums 2
  static constexpr int most_steps = 20;
  union Slots {  // made when they are filled: a plan is made for every call
    Slots() {}
    Step steps[most_steps];
  };
  Slots slots_;
  int count_ = 0;
  int last_waiting_ = -1;
};

// ---- plans -------------------------------------------------------------------------------------

// What a plan has to know of an array beside its shape.
struct ArrayFacts {
  DType dtype = DType::bf16;
  bool rows_aligned = true;   // rows of neighbouring elements that start on 16 bytes
  bool pairs_aligned = true;  // of whole aligned pairs
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
// compress_activation with INT8 storage, and with INT4.
Plan plan_compress(const DeviceFacts&, const ArrayFacts& x, std::int64_t cols, const Projection&,
                   const OperandQuant&, std::int64_t scales);
Plan plan_groups(const ArrayFacts& x, std::int64_t rows, std::int64_t cols, Rounding);
// quantize_weight.
Plan plan_weight(const DeviceFacts&, const ArrayFacts& w, std::int64_t cols, const Projection&,
                 const OperandQuant&, std::int64_t scales);

struct ForwardArrays {
  ArrayFacts x{}, w{};
  OutFacts y{};
};
// forward_linear: quantisers of x and w, the product.
Plan plan_forward(const DeviceFacts&, const ForwardWork&, const ForwardArrays&);
// quantize_forward_weight.
Plan plan_forward_weight(const DeviceFacts&, const ArrayFacts& w, std::int64_t rows,
                         std::int64_t cols, int hadamard_block);

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

// Whether products can be computed in one launch, and the division of work that takes least; says
// nothing about profit.
bool small_gemms_can(const ProductShape* products, int count);
SmallPlan small_plan(const DeviceFacts&, const ProductShape* products, int count);
// The step for any such division.
void add_small_gemms(Plan&, const ProductShape* products, int count, const SmallPlan&,
                     Buffers reads, Buffers writes);

// The division of columns that strip_kernel and hla_kernel follow.
struct StripGrid {
  std::int64_t run, blocks;
  int threads;
  std::size_t shared_bytes;
};
StripGrid strip_grid(const Projection&, std::int64_t cols, int extra);

// ---- workspaces --------------------------------------------------------------------------------

// Largest values, to be zeroed before kernels find them.
struct Zeroed {
  std::uint32_t* words = nullptr;
  std::size_t bytes = 0;
};
Zeroed take_zeroed(WorkspaceCursor&, std::int64_t words);

std::int64_t columns_amax_words(const DeviceFacts&, std::int64_t cols, const Projection&,
                                const OperandQuant&);
std::size_t gemm_workspace(const DeviceFacts&, std::int64_t m, std::int64_t n, std::int64_t k);

// What a backward takes of its workspace.
struct Scratch {
  Operand gradient_rows{}, weight{};         // for g_x
  Operand gradient_columns{}, activation{};  // for g_w; activation: from INT4
  char *gx_gemm = nullptr, *gw_gemm = nullptr, *sums = nullptr;
  Zeroed zeroed{};  // every Operand::amax
};
// One order for the size (a cursor without memory) and the pointers.
Scratch take_scratch(WorkspaceCursor&, const DeviceFacts&, const BackwardWork&);
// Partial sums of g_b on its own: nothing else is alive then.
char* take_sums(WorkspaceCursor&, const DeviceFacts&, const LinearShape&);
std::size_t backward_workspace(const DeviceFacts&, const BackwardWork&);

// What a forward product takes of its workspace; one order, as above.
struct ForwardScratch {
  Operand x{}, weight{};
  float* bias = nullptr;
  char* gemm = nullptr;
};
ForwardScratch take_forward_scratch(WorkspaceCursor&, const DeviceFacts&, const ForwardWork&);

}  // namespace plan
}  // namespace hot::detail

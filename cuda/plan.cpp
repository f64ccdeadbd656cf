#include "cuda/plan.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <new>
#include <type_traits>

#include "hot/error.h"

namespace hot::detail::plan {
namespace {

// ---- thresholds: every number that was measured, by device -------------------------------------

// Cycles of gemm_small_kernel, fitted to the times of every division of the paper's 16 layers at
// both ranks on an H200 (in a CUDA graph). The divisions that it chooses take 1.02 times those of
// the best, in geometric mean, and 1.21 at most.
struct TileCost {
  int tile_m;
  double block;          // of an SM, for a thread block: start, output
  double step;           // of an SM, for 128 k of a tile
  double wait;           // what those 128 k take a thread block that is alone
  double exchange;       // of an SM, for a thread block's sums, where a tile is shared
  double exchange_wait;  // what that takes a thread block that is alone
};

struct Thresholds {
  // Rows of more lanes are wide: fewer lanes find all that they copy soon enough.
  // H200: rows of 14,336 and 28,672 by bulk copies 115 -> 93 and 248 -> 174 us.
  int narrow_lanes;
  // A cluster's strip by a model of an SM's cycles: a unit takes `unit_cycles`, but no less than
  // `latency_cycles` pass from its copies to its codes (H200, at 2 and 16 warps on an SM); the
  // exchange in a cluster takes `exchange_cycles`.
  std::int64_t unit_cycles, latency_cycles, exchange_cycles;
  // A g_y of more tokens than a portable cluster holds, and so many columns, is better left to
  // gradient_kernel, which makes the rows' codes on the way; wider ones do not fit there.
  // H200, `default`, 12608 x 3072 x 768: 190 us, by clusters of 16 204.
  std::int64_t least_gradient_columns, most_gradient_columns;
  // More waves of thread blocks than this hide a launch by themselves: no quantize_small_kernel.
  // H200, the paper's layers.
  int small_waves;
  // Above this many multiply-adds the kernels for large products are as fast as gemm_small_kernel,
  // launch by launch. H200.
  std::int64_t small_gemm_work;
  TileCost tile_costs[2];
  // wgmma products; H200, a sweep of 14 kernels in 8 orders (docs: "Products, TOPS").
  std::int64_t stream_k_least_k;  // shorter contractions are not shared out
  int most_splits;                // of a contraction in equal parts
  std::int64_t narrow_tiles;      // an operand of fewer is narrow, where a wider tile may gain
  int wide_gain, wide_gain_of;    // a wider tile's time for the same work, of the usual one's
  int most_swizzle;               // tiles of a stripe
  int stripe_waste;               // tiles added by rounding to whole stripes, in percent
};

constexpr Thresholds h200 = {64,
                             900,
                             6000,
                             1500,
                             2048,
                             3072,
                             4,
                             std::int64_t{1} << 30,
                             {{64, 1190, 400, 300, 1260, 140}, {128, 2240, 530, 730, 2520, 700}},
                             4096,
                             6,
                             32,
                             94,
                             100,
                             8,
                             3};

struct Measured {
  int arch;
  Thresholds thresholds;
};
constexpr Measured measured[] = {{90, h200}};  // docs: one H200

// An architecture that was not measured takes the first one's.
const Thresholds& thresholds(const DeviceFacts& facts) {
  for (const Measured& of : measured) {
    if (of.arch == facts.arch) return of.thresholds;
  }
  return measured[0].thresholds;
}

// ---- names -------------------------------------------------------------------------------------

constexpr KernelInfo kernels[kernel_count] = {
    {"memset", "backend.cu", false},
    {"rows16_kernel", "quantize.cu", false},
    {"wide_rows_kernel", "quantize.cu", false},
    {"rows_kernel", "quantize.cu", false},
    {"gradient_kernel", "quantize_gradient.cu", false},
    {"resident_kernel", "lowrank_resident.cu", true},
    {"resident_kernel, largest values", "lowrank_resident.cu", true},
    {"resident_kernel, codes", "lowrank_resident.cu", true},
    {"strip_kernel, largest values", "lowrank.cu", false},
    {"strip_kernel, codes", "lowrank.cu", false},
    {"finish_scales_kernel", "quantize.cu", false},
    {"quantize_small_kernel, largest values", "quantize_small.cu", false},
    {"quantize_small_kernel", "quantize_small.cu", false},
    {"groups_kernel", "quantize.cu", false},
    {"group_pairs_kernel", "quantize.cu", false},
    {"requantize_kernel", "quantize.cu", true},
    {"partial_sum_kernel", "lowrank.cu", false},
    {"final_sum_kernel", "lowrank.cu", true},
    {"fill_zero_kernel", "lowrank.cu", false},
    {"spread_kernel", "gemm.cu", false},
    {"unpack_kernel", "pack.cu", false},
    {"gemm_small_kernel", "gemm_small.cu", false},
    {"wgmma 128x128", "gemm_int8_sm90.cuh", false},
    {"wgmma 128x192", "gemm_int8_sm90.cuh", false},
    {"wgmma stream-K", "gemm_int8_sm90.cuh", false},
    {"tile_kernel 128x256x128", "gemm_sm80.cuh", false},
    {"tile_kernel 256x128x128", "gemm_sm80.cuh", false},
    {"tile_kernel 128x256x64", "gemm_sm80.cuh", false},
    {"tile_kernel 128x128x64", "gemm_sm80.cuh", false},
    {"tile_kernel 64x64x64", "gemm_sm80.cuh", false},
    {"tile_kernel any", "gemm_sm80.cuh", false},
    {"fixup_kernel", "gemm_sm80.cuh", false},
    {"token_kernel", "gemm_sm80.cu", false},
};

constexpr const char* buffer_names[buffer_count] = {
    "g_y",
    "w",
    "x",
    "saved x",
    "quantised w",
    "g_x",
    "g_w",
    "g_b",
    "a",
    "b",
    "out",
    "g_y codes (rows)",
    "g_y codes (columns)",
    "w codes",
    "x codes",
    "largest of rows",
    "largest of columns",
    "largest of w",
    "partial sums",
    "partial sums",
    "scales of a",
    "scales of b",
    "sums of shared tiles",
    "a as INT8",
    "b as INT8",
};

constexpr Buffers scratch = Buffer::rows | Buffer::columns | Buffer::weight | Buffer::activation |
                            Buffer::rows_amax | Buffer::columns_amax | Buffer::weight_amax |
                            Buffer::sums | Buffer::spread_a | Buffer::spread_b | Buffer::stream_k;

}  // namespace

const KernelInfo& info(Kernel kernel) { return kernels[static_cast<std::size_t>(kernel)]; }
const char* buffer_name(Buffer buffer) { return buffer_names[static_cast<std::size_t>(buffer)]; }

// ---- dependencies ------------------------------------------------------------------------------

bool Buffers::meets(Buffers other) const {
  if ((bits_ & other.bits_) != 0) return true;
  const auto overlaps = [](Buffers all, Buffers part) {
    return all.has(Buffer::all_scratch) && (part.bits_ & scratch.bits_) != 0;
  };
  return overlaps(*this, other) || overlaps(other, *this);
}

static_assert(std::is_trivially_copyable_v<Step>);  // as Plan's slots are

// A step that waits starts when all before it has ended, and one that does not starts when every
// thread block of the one before has started. So what may still run is the last one that waited and
// all since; the first step of a call knows nothing of what is before it.
Step& Plan::add(Kernel kernel, const LaunchShape& shape, Buffers reads, Buffers writes) {
  if (count_ == most_steps) {
    throw Error(ErrorCode::unsupported, "plan: more steps than a plan has");
  }
  Step& step = *::new (&slots_.steps[count_]) Step{};
  step.kernel = kernel;
  step.shape = shape;
  step.reads = reads;
  step.writes = writes;
  if (shape.blocks == 0 && kernel != Kernel::zero)
    return step;  // no work: the next takes its place
  step.independent = info(kernel).can_overlap && last_waiting_ >= 0;
  for (int i = last_waiting_; step.independent && i < count_; ++i) {
    const Step& before = (*this)[i];
    step.independent =
        !before.writes.meets(reads) && !before.writes.meets(writes) && !before.reads.meets(writes);
  }
  if (!step.independent && kernel != Kernel::zero) last_waiting_ = count_;
  ++count_;
  return step;
}

// ---- rows --------------------------------------------------------------------------------------

namespace {

using resident::Kind;
using resident::Pass;
using resident::strip_count;
using resident::unit_count;

struct RowShare {
  int lanes, blocks;  // of a row; of 16 elements of a lane. No lanes: too long
};

// No more idle lanes than 1 in 8 where that can be (the others' loads then hide the latency), a row
// within a warp before a row across warps.
RowShare row_share(std::int64_t blocks) {
  RowShare best{};
  std::int64_t best_cost = 0;
  for (int per_lane = 1; per_lane <= rows16_most_blocks; ++per_lane) {
    std::int64_t lanes = ceil_div(blocks, per_lane);
    if (lanes > rows16_most_lanes || (per_lane > 1 && lanes < 8)) continue;
    if (lanes > 32) {
      lanes = round_up(lanes, 32);
    } else {
      std::int64_t power = 1;
      while (power < lanes) power *= 2;
      lanes = power;
    }
    // Slots that stand for time: idle ones, and an eighth more where warps wait for each other.
    const std::int64_t slots = 8 * lanes * per_lane;
    const std::int64_t cost = lanes > 32 ? slots + slots / 8 : slots;
    if (best.lanes == 0 || cost <= best_cost) {
      best = {static_cast<int>(lanes), per_lane};
      best_cost = cost;
    }
  }
  return best;
}

struct RowsShape {
  ArrayFacts x;
  std::int64_t rows, cols;
  int hadamard_block;
  OperandQuant quant;
  std::int64_t k_padded;
};

void add_rows_pass(Plan& plan, const DeviceFacts& facts, const RowsShape& job, RowsPass pass) {
  const RowShare share = row_share(job.k_padded / 16);
  const Rounding rounding = pass == RowsPass::amax ? Rounding::nearest : job.quant.rounding;
  Buffers reads = Buffer::gy, writes = Buffer::rows;
  if (pass == RowsPass::amax) {
    reads |= Buffer::rows_amax;  // raised by atomics
    writes = Buffer::rows_amax;
  } else if (pass == RowsPass::codes) {
    reads |= Buffer::rows_amax;
  }
  const auto add = [&](Kernel kernel, const LaunchShape& shape, int buffers) {
    Step& step = plan.add(kernel, shape, reads, writes);
    step.dtype = job.x.dtype;
    step.rounding = rounding;
    step.work = RowsStep{pass, share.lanes, share.blocks, buffers};
  };
  if (job.hadamard_block != 16 || share.lanes == 0) {
    return add(Kernel::rows, {job.rows, 256}, 0);
  }
  const bool aligned = job.x.rows_aligned && job.cols % 16 == 0;
  const auto size = static_cast<std::int64_t>(dtype_size(job.x.dtype));
  if (size == 2 && rounding != Rounding::pseudo_stochastic && pass == RowsPass::row_scales &&
      aligned && share.lanes > thresholds(facts).narrow_lanes && facts.hopper) {
    LaunchShape shape{1, share.lanes};
    std::int64_t at_once = 0;
    int buffers = 0;
    do {  // two rows on their way where only one thread block fits an SM
      ++buffers;
      shape.shared_bytes = static_cast<std::size_t>(job.k_padded * size * buffers);
      at_once =
          facts.queries->at_once(WideRows{rounding, share.blocks, job.x.dtype, buffers}, shape);
    } while (buffers == 1 && at_once <= facts.sm_count);
    shape.blocks = std::min(job.rows, at_once);
    return add(Kernel::wide_rows, shape, buffers);
  }
  const int rows = share.lanes > 32 ? 1 : 128 / share.lanes;
  add(Kernel::rows16, {ceil_div(job.rows, rows), share.lanes, 0, 1, rows}, 0);
}

void add_rows(Plan& plan, const DeviceFacts& facts, const RowsShape& job) {
  if (!job.quant.per_tensor) return add_rows_pass(plan, facts, job, RowsPass::row_scales);
  add_rows_pass(plan, facts, job, RowsPass::amax);
  add_rows_pass(plan, facts, job, RowsPass::codes);
}

// ---- columns -----------------------------------------------------------------------------------

struct ColumnsShape {
  Job job;
  ArrayFacts x;
  Buffer from;
  Buffer codes, amax;
  std::int64_t cols;
  const Projection& p;
  OperandQuant quant;
  std::int64_t scales;
  bool sum = false, accumulate = false;  // g_b
};

bool keeps_rows(const Projection& p, Kind kind) {
  if (p.rows.size() != 8) return false;
  for (int i = 0; i < 8; ++i) {
    if (p.rows[static_cast<std::size_t>(i)] != resident::kept_row(kind, i)) return false;
  }
  return true;
}

// Whether there is a resident kernel for a projection, and which.
bool kind_of(const Projection& p, Kind& kind) {
  if (p.basis == Basis::full) {
    kind = Kind::full;
    return true;
  }
  if (p.block != 16) return false;
  if (p.basis == Basis::sketch) {
    kind = Kind::sketch8;
    return p.rank == 8;
  }
  if (p.rank == 16) {
    kind = Kind::whole;
    return true;
  }
  kind = keeps_rows(p, Kind::lowpass8) ? Kind::lowpass8 : Kind::sequency8;
  return keeps_rows(p, kind);
}

bool resident_can(const Projection& p, const OperandQuant& quant, Kind& kind) {
  return kind_of(p, kind) && !quant.per_k && p.order.prefix_rows() == 0 &&
         quant.rounding != Rounding::pseudo_stochastic;
}

// Whether a cluster holds a strip, and surely runs.
bool one_pass_can(const DeviceFacts& facts, std::int64_t cols, std::int64_t units,
                  const OperandQuant& quant) {
  const Thresholds& t = thresholds(facts);
  const bool left = quant.purpose == Purpose::gradient_columns &&
                    cols >= t.least_gradient_columns && cols <= t.most_gradient_columns;
  return !quant.per_tensor &&
         units <= (left ? resident::most_parts : resident::large_parts) * resident::most_warps &&
         facts.hopper;
}

bool one_pass(const DeviceFacts& facts, std::int64_t cols, const Projection& p,
              const OperandQuant& quant) {
  Kind kind{};
  return resident_can(p, quant, kind) && one_pass_can(facts, cols, unit_count(p, kind), quant);
}

// How a strip is shared out: the division that should take least.
struct Parts {
  int parts = 0, warps = 0;
};

Parts cluster_parts(const DeviceFacts& facts, std::int64_t units, std::int64_t strips,
                    std::int64_t warps_on_sm) {
  const Thresholds& t = thresholds(facts);
  const std::int64_t sm_count = facts.sm_count;
  Parts best;
  std::int64_t best_cycles = 0;
  for (int parts = 1; parts <= (best.parts == 0 ? resident::large_parts : resident::most_parts);
       ++parts) {
    const std::int64_t warps = ceil_div(units, parts);
    if (warps > resident::most_warps) continue;
    const std::int64_t at_once =
        std::max<std::int64_t>(1, std::min(strips, sm_count * (warps_on_sm / warps) / parts));
    const std::int64_t warps_per_sm = ceil_div(at_once * parts, sm_count) * warps;
    const std::int64_t cycles =
        ceil_div(strips, at_once) *
        (std::max<std::int64_t>(t.latency_cycles, warps_per_sm * t.unit_cycles) +
         (parts > 1 ? t.exchange_cycles : 0));
    if (best.parts == 0 || cycles < best_cycles) {
      best = {parts, static_cast<int>(warps)};
      best_cycles = cycles;
    }
  }
  return best;
}

LaunchShape column_shape(std::int64_t strips, const Parts& parts, int cluster) {
  return {strips * parts.parts, 32 * parts.warps,
          resident::shared_bytes(parts.warps, parts.warps, cluster), std::max(1, cluster)};
}

Buffers sum_reads(bool accumulate) { return accumulate ? Buffers(Buffer::gb) : Buffers(); }

void add_final_sum(Plan& plan, std::int64_t runs, std::int64_t cols, bool accumulate, Buffer sums) {
  Buffers reads = sum_reads(accumulate);
  if (runs > 0) reads |= sums;
  plan.add(Kernel::final_sum, {ceil_div(cols, 32), 256}, reads, Buffer::gb).work = SumsStep{runs};
}

void add_column_clusters(Plan& plan, const DeviceFacts& facts, const ColumnsShape& job, Kind kind) {
  const auto size = static_cast<int>(dtype_size(job.x.dtype));
  const std::int64_t strips = strip_count(job.cols, job.x.dtype);
  const Parts parts = cluster_parts(
      facts, unit_count(job.p, kind), strips,
      resident::most_warps * resident::sm_blocks(kind, size, Pass::both, job.quant.rounding));
  LaunchShape shape = column_shape(strips, parts, parts.parts);
  // Half of the SMs surely take what few strips there are: no need to ask.
  if (2 * shape.blocks > facts.sm_count) {
    const ColumnClusters instance{kind, job.quant.rounding, job.x.dtype};
    shape.blocks = std::min(strips, facts.queries->at_once(instance, shape)) * parts.parts;
  }
  Buffers reads = job.from, writes = job.codes;
  if (job.sum) {
    reads |= sum_reads(job.accumulate);
    writes |= Buffer::gb;
  }
  Step& step = plan.add(Kernel::column_clusters, shape, reads, writes);
  step.dtype = job.x.dtype;
  step.rounding = job.quant.rounding;
  step.work = ColumnsStep{job.job, kind, Pass::both, parts.parts, parts.parts};
}

// One of the two passes where a cluster cannot hold a strip.
int add_column_pass(Plan& plan, const ColumnsShape& job, Kind kind, Pass pass) {
  const Parts parts{static_cast<int>(ceil_div(unit_count(job.p, kind), resident::two_pass_warps)),
                    resident::two_pass_warps};
  const LaunchShape shape = column_shape(strip_count(job.cols, job.x.dtype), parts, 0);
  const bool amax = pass == Pass::amax;
  Buffers writes = amax ? job.amax : job.codes;
  if (amax && job.sum) writes |= Buffer::sums;
  Step& step = plan.add(amax ? Kernel::column_amax : Kernel::column_codes, shape,
                        job.from | job.amax, writes);
  step.dtype = job.x.dtype;
  step.rounding = amax ? Rounding::nearest : job.quant.rounding;  // amax has none
  step.work = ColumnsStep{job.job, kind, pass, parts.parts, 0};
  return parts.parts;
}

void add_finish_scales(Plan& plan, const ColumnsShape& job) {
  plan.add(Kernel::finish_scales, {ceil_div(job.scales, 256), 256}, job.amax, job.codes).work =
      FinishStep{job.job};
}

void add_strips(Plan& plan, const ColumnsShape& job) {
  const StripGrid grid = strip_grid(job.p, job.cols, strip::group);
  const LaunchShape shape{grid.blocks, grid.threads, grid.shared_bytes};
  for (const bool amax : {true, false}) {
    Step& step = plan.add(amax ? Kernel::strip_amax : Kernel::strip_codes, shape,
                          job.from | job.amax, amax ? job.amax : job.codes);
    step.rounding = amax ? Rounding::nearest : job.quant.rounding;
    step.work = StripStep{job.job, grid.run};
  }
  add_finish_scales(plan, job);
}

// Whether the sum was done on the way.
bool add_columns(Plan& plan, const DeviceFacts& facts, const ColumnsShape& job) {
  Kind kind{};
  if (job.cols == 0 || job.p.k_padded == 0) {  // no codes; a scale, where there is one, is 0
    if (job.scales > 0) add_finish_scales(plan, job);
    return false;
  }
  if (!resident_can(job.p, job.quant, kind)) {
    add_strips(plan, job);
    return false;
  }
  if (one_pass_can(facts, job.cols, unit_count(job.p, kind), job.quant)) {
    add_column_clusters(plan, facts, job, kind);
    return job.sum;
  }
  const int runs = add_column_pass(plan, job, kind, Pass::amax);
  add_column_pass(plan, job, kind, Pass::codes);
  if (job.sum) add_final_sum(plan, runs, job.cols, job.accumulate, Buffer::sums);
  return job.sum;
}

// ---- g_y in one read for rows and largest values of columns ------------------------------------

bool add_gradient(Plan& plan, const DeviceFacts& facts, const RowsShape& rows,
                  const ColumnsShape& columns) {
  Kind kind{};
  const bool rounds = rows.quant.per_tensor || rows.quant.rounding != Rounding::pseudo_stochastic;
  if (!facts.hopper || dtype_size(rows.x.dtype) != 2 || !rows.x.rows_aligned ||
      rows.cols % 16 != 0 || rows.cols == 0 || rows.rows == 0 || rows.hadamard_block != 16 ||
      !rounds || columns.p.order.samples != 0 || !resident_can(columns.p, columns.quant, kind) ||
      one_pass(facts, rows.cols, columns.p, columns.quant)) {
    return false;
  }
  const RowShare share = row_share(rows.k_padded / 16);
  if (share.lanes == 0 || share.lanes > 32) return false;
  GradientStep work{};
  work.pass = rows.quant.per_tensor ? RowsPass::amax : RowsPass::row_scales;
  work.kind = kind;
  work.lanes = share.lanes;
  work.lane_blocks = share.blocks;
  work.token_blocks = gradient::threads / share.lanes / gradient::token_block;
  work.tiles = static_cast<unsigned>(
      ceil_div(rows.rows, std::int64_t{work.token_blocks} * gradient::token_block));
  const std::int64_t grid = std::min<std::int64_t>(work.tiles, facts.sm_count);
  work.sums = static_cast<unsigned>(grid * ceil_div(work.tiles, grid * gradient::tiles_a_sum));
  const int bytes = gradient::Layout(rows.cols, work.token_blocks).bytes();
  if (bytes > facts.shared_bytes) return false;

  Buffers reads = Buffer::gy | Buffer::columns_amax, writes = Buffer::columns_amax;
  if (rows.quant.per_tensor) reads |= Buffer::rows_amax;
  writes |= rows.quant.per_tensor ? Buffer::rows_amax : Buffer::rows;
  if (columns.sum) writes |= Buffer::sums;
  Step& step = plan.add(Kernel::gradient,
                        {grid, gradient::threads, static_cast<std::size_t>(bytes)}, reads, writes);
  step.dtype = rows.x.dtype;
  step.rounding =
      rows.quant.rounding == Rounding::stochastic ? Rounding::stochastic : Rounding::nearest;
  step.work = work;
  if (rows.quant.per_tensor) add_rows_pass(plan, facts, rows, RowsPass::codes);
  add_column_pass(plan, columns, kind, Pass::codes);
  if (columns.sum) {
    add_final_sum(plan, work.sums, rows.cols, columns.accumulate, Buffer::sums);
  }
  return true;
}

// ---- all operands of a small layer in one launch or two ----------------------------------------

struct GroupsShape {
  std::int64_t channels, k_padded;
  Rounding rounding;
};

// Words of Operand::amax, to be zeroed.
struct AmaxWords {
  std::int64_t rows = 0, weight = 0, columns = 0;
  std::int64_t all() const { return rows + weight + columns; }
};

void add_zero(Plan& plan, const AmaxWords& words) {
  if (words.all() == 0) return;
  Buffers writes;
  if (words.rows > 0) writes |= Buffer::rows_amax;
  if (words.weight > 0) writes |= Buffer::weight_amax;
  if (words.columns > 0) writes |= Buffer::columns_amax;
  plan.add(Kernel::zero, {}, {}, writes).work =
      ZeroStep{static_cast<std::size_t>(words.all()) * sizeof(std::uint32_t)};
}

// Null: not wanted.
struct OperandShapes {
  const RowsShape* rows = nullptr;
  const ColumnsShape* columns = nullptr;
  const ColumnsShape* weight = nullptr;
  const GroupsShape* groups = nullptr;
  AmaxWords zeroed{};
};

// Whether all that has one has the same.
template <class T>
class Same {
 public:
  bool add(T value) {
    if (!known_) value_ = value;
    known_ = true;
    return value_ == value;
  }
  T or_else(T value) const { return known_ ? value_ : value; }

 private:
  T value_{};
  bool known_ = false;
};

class SmallOperands {
 public:
  SmallOperands(const DeviceFacts& facts, const OperandShapes& operands)
      : facts_(facts), of_(operands) {}

  // Whether the kernel can, and gains.
  bool can() {
    Kind weight_kind{};
    if (of_.weight != nullptr &&
        (!dtype_.add(of_.weight->x.dtype) || of_.weight->quant.rounding != Rounding::nearest ||
         !add(*of_.weight, weight_kind, weight_units_) || weight_kind != Kind::whole)) {
      return false;
    }
    if (of_.columns != nullptr &&
        (!dtype_.add(of_.columns->x.dtype) || !rounds(of_.columns->quant.rounding) ||
         !add(*of_.columns, kind_, gradient_units_))) {
      return false;
    }
    if (const RowsShape* job = of_.rows) {
      const std::int64_t groups = job->k_padded / 16;
      if (!dtype_.add(job->x.dtype) || !rounds(job->quant.rounding) || job->hadamard_block != 16 ||
          groups == 0 || groups > small_quantize::row_blocks * small_quantize::threads) {
        return false;
      }
      while ((small_quantize::row_blocks << lanes_log2_) < groups) ++lanes_log2_;
      rows_blocks_ = ceil_div(job->rows, small_quantize::threads >> lanes_log2_);
    }
    if (of_.groups != nullptr) {
      if (!rounds(of_.groups->rounding)) return false;
      groups_blocks_ = ceil_div(of_.groups->channels, small_quantize::threads / 32);
    }
    if (cluster_ > 1 && !facts_.hopper) return false;
    weight_parts_ = parts(of_.weight, weight_units_);
    gradient_parts_ = parts(of_.columns, gradient_units_);
    weight_blocks_ = strips(of_.weight) * weight_parts_;
    gradient_blocks_ = strips(of_.columns) * gradient_parts_;
    const std::int64_t most = std::int64_t{thresholds(facts_).small_waves} * resident::sm_warps /
                              resident::most_warps * facts_.sm_count;
    return weight_blocks_ <= small_quantize::slots && gradient_blocks_ <= small_quantize::slots &&
           rows_blocks_ <= small_quantize::slots &&
           weight_blocks_ + gradient_blocks_ + rows_blocks_ + groups_blocks_ <= most;
  }

  void add_to(Plan& plan) const {
    const auto per_tensor = [](const auto* job) { return job != nullptr && job->quant.per_tensor; };
    const bool weight = per_tensor(of_.weight), rows = per_tensor(of_.rows),
               gradient = per_tensor(of_.columns);
    const bool sum = of_.columns != nullptr && of_.columns->sum;
    const Buffers sum_read = sum ? sum_reads(of_.columns->accumulate) : Buffers();
    if (weight || rows || gradient) {
      const bool shares = gradient && sum && gradient_parts_ > 1;
      Launch launch(*this, shares ? cluster_ : 1);
      SmallStep& s = launch.step;
      s.weight_pass = s.gradient_pass = Pass::amax;
      s.rows_pass = RowsPass::amax;
      s.gradient_cluster = shares ? gradient_parts_ : 0;
      if (weight) launch.add(s.weight, weight_blocks_, Buffer::w, Buffer::weight_amax);
      if (gradient) launch.add(s.gradient, gradient_blocks_, Buffer::gy, Buffer::columns_amax);
      if (gradient && sum) launch.also(sum_read, Buffer::gb);
      if (rows) launch.add(s.rows, rows_blocks_, Buffer::gy, Buffer::rows_amax);
      launch.add_to(plan, Kernel::small_amax);
    }
    const bool shares = (weight_parts_ > 1 && !weight) || (gradient_parts_ > 1 && !gradient);
    Launch launch(*this, shares ? cluster_ : 1);
    SmallStep& s = launch.step;
    s.weight_pass = weight ? Pass::codes : Pass::both;
    s.gradient_pass = gradient ? Pass::codes : Pass::both;
    s.rows_pass = rows ? RowsPass::codes : RowsPass::row_scales;
    s.weight_slots = static_cast<int>(weight_blocks_);
    s.gradient_slots = static_cast<int>(gradient_blocks_);
    s.weight_cluster = weight ? 0 : weight_parts_;
    s.gradient_cluster = gradient ? 0 : gradient_parts_;
    if (of_.weight != nullptr) {
      launch.add(s.weight, weight_blocks_, of_.weight->from, of_.weight->codes);
      if (weight) launch.also(Buffer::weight_amax, {});
    }
    if (of_.columns != nullptr) {
      launch.add(s.gradient, gradient_blocks_, Buffer::gy, Buffer::columns);
      if (gradient) launch.also(Buffer::columns_amax, {});
      if (sum && !gradient) launch.also(sum_read, Buffer::gb);
    }
    if (of_.rows != nullptr) {
      launch.add(s.rows, rows_blocks_, Buffer::gy, Buffer::rows);
      if (rows) launch.also(Buffer::rows_amax, {});
    }
    if (of_.groups != nullptr) {
      launch.add(s.groups, groups_blocks_, Buffer::saved, Buffer::activation);
    }
    launch.add_to(plan, Kernel::small_codes);
  }

 private:
  // One launch: some of the operands, each in its pass. `cluster`: thread blocks of a strip that
  // tell each other what they find.
  class Launch {
   public:
    Launch(const SmallOperands& of, int cluster) : of_(of), cluster_(cluster) {
      step.kind = of.kind_;
      step.row_lanes_log2 = of.lanes_log2_;
      step.weight_parts = of.weight_parts_;
      step.gradient_parts = of.gradient_parts_;
    }

    SmallStep step{};

    void add(SmallRange& range, std::int64_t blocks, Buffers reads, Buffers writes) {
      range.blocks = static_cast<unsigned>(blocks);
      range.end = static_cast<unsigned>(round_up(blocks, cluster_));
      blocks_ += range.end;
      also(reads, writes);
    }
    void also(Buffers reads, Buffers writes) {
      reads_ |= reads;
      writes_ |= writes;
    }
    void add_to(Plan& plan, Kernel kernel) const {
      const DType dtype = of_.dtype_.or_else(DType::f32);
      const int units = small_quantize::block_units(static_cast<int>(dtype_size(dtype)));
      const LaunchShape shape{blocks_, small_quantize::threads,
                              resident::shared_bytes(units, resident::most_warps, cluster_),
                              cluster_};
      Step& added = plan.add(kernel, shape, reads_, writes_);
      added.dtype = dtype;
      added.rounding = of_.rounding_.or_else(Rounding::nearest);
      added.work = step;
    }

   private:
    const SmallOperands& of_;
    int cluster_;
    std::int64_t blocks_ = 0;
    Buffers reads_, writes_;
  };

  bool rounds(Rounding rounding) {
    return rounding != Rounding::pseudo_stochastic && rounding_.add(rounding);
  }
  static int units_of(const ColumnsShape& job) {
    return small_quantize::block_units(static_cast<int>(dtype_size(job.x.dtype)));
  }
  bool add(const ColumnsShape& job, Kind& kind, std::int64_t& units) {
    if (job.p.k_padded == 0 || !resident_can(job.p, job.quant, kind)) return false;
    units = unit_count(job.p, kind);
    const std::int64_t needed = ceil_div(units, units_of(job));
    if (needed > resident::most_parts) return false;
    cluster_ = std::max(cluster_, static_cast<int>(needed));
    return true;
  }
  // A strip that fits in one thread block keeps to it; another takes a cluster.
  int parts(const ColumnsShape* job, std::int64_t units) const {
    return job == nullptr ? 0 : units > units_of(*job) ? cluster_ : 1;
  }
  static std::int64_t strips(const ColumnsShape* job) {
    return job == nullptr ? 0 : strip_count(job->cols, job->x.dtype);
  }

  const DeviceFacts& facts_;
  const OperandShapes& of_;
  Same<DType> dtype_;
  Same<Rounding> rounding_;
  Kind kind_ = Kind::full;
  int cluster_ = 1, lanes_log2_ = 0;
  std::int64_t weight_units_ = 0, gradient_units_ = 0;
  int weight_parts_ = 0, gradient_parts_ = 0;
  std::int64_t weight_blocks_ = 0, gradient_blocks_ = 0, rows_blocks_ = 0, groups_blocks_ = 0;
};

// All operands of a backward. Returns whether g_b was done on the way.
bool add_operands(Plan& plan, const DeviceFacts& facts, const OperandShapes& operands) {
  const bool sum = operands.columns != nullptr && operands.columns->sum;
  SmallOperands small(facts, operands);
  if (small.can()) {
    small.add_to(plan);
    return sum;
  }
  add_zero(plan, operands.zeroed);
  bool summed = false;
  if (operands.rows != nullptr && operands.columns != nullptr &&
      add_gradient(plan, facts, *operands.rows, *operands.columns)) {
    summed = sum;
  } else {
    if (operands.rows != nullptr) add_rows(plan, facts, *operands.rows);
    if (operands.columns != nullptr) summed = add_columns(plan, facts, *operands.columns);
  }
  if (operands.weight != nullptr) add_columns(plan, facts, *operands.weight);
  if (const GroupsShape* job = operands.groups) {
    plan.add(Kernel::requantize, {job->channels, 256}, Buffer::saved, Buffer::activation).rounding =
        job->rounding;
  }
  return summed;
}

// ---- products ----------------------------------------------------------------------------------

constexpr std::int64_t wgmma_tile = 128, wgmma_wide_tile = 192;

bool wgmma_can(const DeviceFacts& facts, const ProductShape& p) {
  const auto size = static_cast<std::int64_t>(dtype_size(p.out.dtype));
  return facts.wgmma && p.scaled && p.k > 0 && p.k <= int32_safe_k && p.m < INT32_MAX &&
         p.n < INT32_MAX && p.out.dense_rows && p.rows_aligned && p.k % 16 == 0 &&
         p.out.rows_aligned && p.n * size % 16 == 0;
}

// Tiles per stripe: as many as the shorter side has use for twice over, where rounding both sides
// up to whole stripes (of clusters, two tiles along N) adds few tiles.
int swizzle_of(const Thresholds& t, std::int64_t tiles_m, std::int64_t tiles_n) {
  for (int swizzle = t.most_swizzle; swizzle > 1; swizzle /= 2) {
    const std::int64_t padded = round_up(tiles_m, swizzle) * round_up(tiles_n, 2 * swizzle);
    if (std::min(tiles_m, tiles_n) >= 2 * swizzle &&
        padded * 100 <= tiles_m * tiles_n * (100 + t.stripe_waste)) {
      return swizzle;
    }
  }
  return 1;
}

struct WgmmaChoice {
  Kernel kernel;
  Sm90Plan plan;
};

WgmmaChoice wgmma_choice(const DeviceFacts& facts, std::int64_t m, std::int64_t n, std::int64_t k,
                         bool has_wide) {
  const Thresholds& t = thresholds(facts);
  const int sm_count = facts.sm_count;
  const std::int64_t tiles_m = ceil_div(m, wgmma_tile), tiles_n = ceil_div(n, wgmma_tile);
  const std::int64_t tiles = tiles_m * tiles_n;
  // Fewer than two waves of tiles, but not nearly one, and a long contraction (g_w of a ViT): it is
  // shared out. With a third of a wave or less, equal parts beat CUTLASS's own division.
  const bool nearly_a_wave = tiles * 4 >= std::int64_t{3} * sm_count && tiles <= sm_count;
  if (k >= t.stream_k_least_k && tiles < std::int64_t{2} * sm_count && !nearly_a_wave) {
    const int splits =
        tiles * 3 <= sm_count
            ? static_cast<int>(std::min<std::int64_t>(sm_count / tiles, t.most_splits))
            : 1;
    return {Kernel::wgmma_stream_k, {sm_count, splits == 1, 1, splits}};
  }
  // One operand is narrow (g_x of a ViT): stripes gain nothing, a wider tile does, where it does
  // not cost more waves than its gain makes good. Clusters are whole: two tiles along N, or along
  // M.
  const auto waves = [&](std::int64_t count) { return ceil_div(count, sm_count); };
  const std::int64_t usual = waves(tiles_m * round_up(tiles_n, 2)) * wgmma_tile;
  const std::int64_t wide =
      waves(round_up(tiles_m, 2) * ceil_div(n, wgmma_wide_tile)) * wgmma_wide_tile;
  if (has_wide && std::min(tiles_m, tiles_n) < t.narrow_tiles && m >= n &&
      wide * t.wide_gain <= usual * t.wide_gain_of) {
    return {Kernel::wgmma_128x192, {sm_count, false, 1, 1}};
  }
  const int swizzle = swizzle_of(t, tiles_m, tiles_n);
  return {Kernel::wgmma_128x128, {sm_count, swizzle > 1 || n > m, swizzle, 1}};
}

// Wide tiles for what g_x is, stream-K for what g_w is; fp16 ones are rare, with autocast they are
// fp32.
bool has_wide(const ProductShape& p) { return p.out.dtype != DType::f16 && !p.accumulate; }
bool has_stream_k(const ProductShape& p) { return p.out.dtype != DType::f16; }

WgmmaChoice wgmma_choice(const DeviceFacts& facts, const ProductShape& p) {
  const WgmmaChoice choice = wgmma_choice(facts, p.m, p.n, p.k, has_wide(p));
  // Its plan is for stream-K, but the tiles go as it says.
  if (choice.kernel == Kernel::wgmma_stream_k && !has_stream_k(p)) {
    return {Kernel::wgmma_128x128, choice.plan};
  }
  return choice;
}

struct ProductBuffers {
  Buffers a, b;
  Buffer out;
};

MmaDevice mma_device(const DeviceFacts& facts) { return {facts.sm_count, facts.arch}; }

// A tile's kernel, and the sums of what its thread blocks share. They share where there is a
// workspace for that: not for what wgmma cannot do beside it.
void add_mma(Plan& plan, const DeviceFacts& facts, const ProductShape& p, int index, bool int4,
             Buffers reads, Buffers writes) {
  const bool may_share = !int4 && !facts.wgmma && p.m < INT32_MAX && p.n < INT32_MAX;
  ProductStep work{index, {}, mma_choose(mma_device(facts), mma_product(p, int4), may_share), int4};
  const MmaTileFacts& tile = mma_tiles[work.mma.tile];
  const bool shared = work.mma.shared > 0;
  const auto add = [&](Kernel kernel, const LaunchShape& shape, Buffers from, Buffers to) {
    Step& step = plan.add(kernel, shape, from, to);
    step.dtype = p.out.dtype;
    step.work = work;
  };
  const auto kernel =
      static_cast<Kernel>(static_cast<int>(Kernel::mma_128x256x128) + work.mma.tile);
  add(kernel, {work.mma.blocks, tile.threads, static_cast<std::size_t>(tile.shared_bytes)}, reads,
      shared ? writes | Buffer::stream_k : writes);
  if (!shared) return;
  Buffers sums = Buffer::stream_k;  // and scales, which have been there since before the tiles
  if (p.accumulate) sums |= writes;
  add(Kernel::mma_fixup, {mma_fixup_blocks(work.mma), mma_fixup_threads}, sums, writes);
}

// Number `index` of a call's products.
void add_product(Plan& plan, const DeviceFacts& facts, const ProductShape& p, int index,
                 const ProductBuffers& buffers) {
  if (p.m == 0 || p.n == 0) return;
  Buffers reads = buffers.a | buffers.b;
  Buffers writes = buffers.out;
  if (p.accumulate) reads |= buffers.out;
  ProductStep work{index, {}};
  const auto add = [&](Kernel kernel, const LaunchShape& shape) {
    Step& step = plan.add(kernel, shape, reads, writes);
    step.dtype = p.out.dtype;
    step.work = work;
  };
  if (wgmma_can(facts, p)) {
    if (p.one_scale_a) {
      plan.add(Kernel::spread, {ceil_div(p.m, 256), 256}, buffers.a, Buffer::spread_a).work =
          SpreadStep{index, false};
      reads |= Buffer::spread_a;
    }
    if (p.one_scale_b) {
      plan.add(Kernel::spread, {ceil_div(p.n, 256), 256}, buffers.b, Buffer::spread_b).work =
          SpreadStep{index, true};
      reads |= Buffer::spread_b;
    }
    const WgmmaChoice choice = wgmma_choice(facts, p);
    work.wgmma = choice.plan;
    if (choice.kernel == Kernel::wgmma_stream_k) writes |= Buffer::stream_k;
    // A persistent grid: three warp groups a thread block, one on an SM (CUTLASS has its own
    // shape).
    return add(choice.kernel, {facts.sm_count, 384, 0, 2});
  }
  add_mma(plan, facts, p, index, false, reads, writes);
}

std::int64_t small_tiles(const ProductShape& p, int tile_m) {
  return ceil_div(p.m, tile_m) * ceil_div(p.n, small_gemm::tile_n);
}

// A block takes what its tile takes: longest block plus the mean load of an SM (the bound of list
// scheduling). Products meet in both sums, so that each one's share is chosen beside the other's.
double cost_of(const ProductShape* products, int count, const SmallPlan& plan, const TileCost& cost,
               int sm_count) {
  double work = 0, longest = 0;
  for (int p = 0; p < count; ++p) {
    const int share = plan.share[p];
    const double steps = static_cast<double>(products[p].k) / small_gemm::step_k;
    const double tiles = static_cast<double>(small_tiles(products[p], cost.tile_m));
    const bool shared = share > 1;
    work += tiles * (share * (cost.block + (shared ? cost.exchange : 0.0)) + steps * cost.step);
    longest = std::max(longest,
                       std::ceil(steps / share) * cost.wait + (shared ? cost.exchange_wait : 0.0));
  }
  return longest + work / sm_count;
}

}  // namespace

bool small_gemms_can(const ProductShape* products, int count) {
  if (count < 1 || count > 2) return false;
  std::int64_t blocks = 0;
  for (int i = 0; i < count; ++i) {
    const ProductShape& p = products[i];
    if (p.m <= 0 || p.n <= 0 || p.k <= 0 || p.k > int32_safe_k || p.m > 1 << 30 || p.n > 1 << 30 ||
        !p.scaled || !p.rows_aligned) {
      return false;
    }
    blocks += (small_tiles(p, small_gemm::min_tile_m) + 1) * small_gemm::max_cluster;
  }
  return blocks <= INT32_MAX;
}

SmallPlan small_plan(const DeviceFacts& facts, const ProductShape* products, int count) {
  // More than one for each step of the contraction only adds work.
  const auto most_share = [&](const ProductShape& p) {
    int share = 1;
    while (facts.hopper && share < small_gemm::max_cluster &&
           std::int64_t{share} * small_gemm::step_k < p.k) {
      share *= 2;
    }
    return share;
  };
  const int most[2] = {most_share(products[0]), count == 2 ? most_share(products[1]) : 1};
  SmallPlan best{};
  double least = 0;
  for (const TileCost& cost : thresholds(facts).tile_costs) {
    for (int first = 1; first <= most[0]; first *= 2) {
      for (int second = 1; second <= most[1]; second *= 2) {
        const SmallPlan plan{cost.tile_m, std::max(first, second), {first, second}};
        const double time = cost_of(products, count, plan, cost, facts.sm_count);
        if (best.tile_m == 0 || time < least) {
          best = plan;
          least = time;
        }
      }
    }
  }
  return best;
}

void add_small_gemms(Plan& plan, const ProductShape* products, int count, const SmallPlan& by,
                     Buffers reads, Buffers writes) {
  const auto block_k = [&](int p) { return products[p].k / by.share[p]; };
  SmallGemmStep work{by, 0, count == 2 && block_k(1) > block_k(0), UINT_MAX};
  std::int64_t steps = 1, blocks = 0;
  bool shares = false;
  for (int place = 0; place < count; ++place) {
    if (place == 1) work.second_block = static_cast<unsigned>(blocks);
    const int p = work.swapped ? 1 - place : place;
    const int share = by.share[p];
    blocks += round_up(small_tiles(products[p], by.tile_m) * share, by.cluster);
    steps = std::max(steps, ceil_div(ceil_div(products[p].k, small_gemm::step_k), share));
    shares = shares || share > 1;
  }
  work.stages = static_cast<int>(std::min<std::int64_t>(steps, small_gemm::max_stages));
  const int ring = work.stages * small_gemm::stage_bytes(by.tile_m);
  const int sums = by.tile_m * small_gemm::sum_row_bytes;
  const auto shared = static_cast<std::size_t>(shares ? ring + sums : std::max(ring, sums));
  Step& step = plan.add(Kernel::gemm_small, {blocks, small_gemm::threads, shared, by.cluster},
                        reads, writes);
  step.dtype = products[0].out.dtype;
  step.work = work;
}

namespace {

// Up to two products that do not depend on each other.
void add_products(Plan& plan, const DeviceFacts& facts, const ProductShape* products,
                  const ProductBuffers* buffers, const int* index, int count) {
  std::int64_t work = 0;
  for (int i = 0; i < count; ++i) work += products[i].m * products[i].n * products[i].k;
  if (work <= thresholds(facts).small_gemm_work && small_gemms_can(products, count)) {
    Buffers reads, writes;
    for (int i = 0; i < count; ++i) {
      reads |= buffers[i].a | buffers[i].b;
      writes |= buffers[i].out;
      if (products[i].accumulate) reads |= buffers[i].out;
    }
    return add_small_gemms(plan, products, count, small_plan(facts, products, count), reads,
                           writes);
  }
  for (int i = 0; i < count; ++i) add_product(plan, facts, products[i], index[i], buffers[i]);
}

std::int64_t sum_runs(std::int64_t rows) { return ceil_div(rows, 16 * strip::sum_run); }

// Partial sums of a column that gradient_kernel leaves, at most.
std::int64_t gradient_sums(const DeviceFacts& facts, std::int64_t rows) {
  return ceil_div(rows, std::int64_t{gradient::token_block} * gradient::tiles_a_sum) +
         facts.sm_count;
}

std::int64_t rows_amax_words(const OperandQuant& quant) {
  return quant.per_tensor ? small_quantize::slots : 0;
}

AmaxWords amax_words(const DeviceFacts& facts, const BackwardWork& work) {
  AmaxWords words;
  if (work.gx) words.rows = rows_amax_words(gradient_rows_quant(work.spec));
  if (work.weight) {
    words.weight = columns_amax_words(facts, work.shape.in_features, work.out_features,
                                      weight_quant(work.spec));
  }
  if (work.gw) {
    words.columns = columns_amax_words(facts, work.shape.out_features, work.tokens,
                                       gradient_columns_quant(work.spec));
  }
  return words;
}

ColumnsShape weight_shape(const ArrayFacts& w, std::int64_t cols, const Projection& p,
                          const OperandQuant& quant, std::int64_t scales, Buffer codes) {
  return {Job::weight, w, Buffer::w, codes, Buffer::weight_amax, cols, p, quant, scales};
}

}  // namespace

// ---- whole calls -------------------------------------------------------------------------------

Plan plan_backward(const DeviceFacts& facts, const BackwardWork& work,
                   const BackwardArrays& arrays) {
  const BackwardLinearSpec& spec = work.spec;
  const LinearShape& shape = work.shape;
  const std::int64_t kx = work.out_features.k_padded, kw = work.tokens.k_padded;
  const bool from_int4 = work.gw && spec.storage == Storage::int4;
  const bool by_token = spec.gw_scale == GradScale::token;
  Plan plan;

  // Both operands of both products are quantised first, so that g_y is read again while a cache may
  // still hold it and kernels overlap; then the products.
  const RowsShape rows{
      arrays.gy, shape.tokens, shape.out_features, spec.hadamard_block, gradient_rows_quant(spec),
      kx};
  const OperandQuant columns_quant = gradient_columns_quant(spec);
  const ColumnsShape columns{Job::gradient_columns,
                             arrays.gy,
                             Buffer::gy,
                             Buffer::columns,
                             Buffer::columns_amax,
                             shape.out_features,
                             work.tokens,
                             columns_quant,
                             by_token ? kw : shape.out_features,
                             work.gb,
                             work.accumulate};
  const ColumnsShape weight = weight_shape(arrays.w, shape.in_features, work.out_features,
                                           weight_quant(spec), shape.in_features, Buffer::weight);
  const GroupsShape groups{shape.in_features, kw, requantize_rounding(spec)};
  OperandShapes operands;
  if (work.gx) operands.rows = &rows;
  if (work.gw) operands.columns = &columns;
  if (work.weight) operands.weight = &weight;
  if (from_int4) operands.groups = &groups;
  operands.zeroed = amax_words(facts, work);
  const bool summed = add_operands(plan, facts, operands);

  ProductShape products[2];
  ProductBuffers buffers[2];
  int index[2];
  int count = 0;
  if (work.gx) {
    index[count] = 0;
    buffers[count] = {Buffer::rows, work.weight ? Buffer::weight : Buffer::quantized_w, Buffer::gx};
    ProductShape& p = products[count++];
    p.m = shape.tokens;
    p.n = shape.in_features;
    p.k = kx;
    p.one_scale_a = shape.tokens == 1;
    p.one_scale_b = shape.in_features == 1;
    p.out = arrays.gx;
  } else if (work.clear_gx) {
    plan.add(Kernel::fill_zero, {ceil_div(shape.tokens * shape.in_features, 256), 256}, {},
             Buffer::gx)
        .work = ProductStep{0, {}};
  }
  const Buffer x = from_int4 ? Buffer::activation : Buffer::saved;
  if (work.gw && !by_token) {
    index[count] = 1;
    buffers[count] = {Buffer::columns, x, Buffer::gw};
    ProductShape& p = products[count++];
    p.m = shape.out_features;
    p.n = shape.in_features;
    p.k = kw;
    p.one_scale_a = shape.out_features == 1;
    p.one_scale_b = shape.in_features == 1 || (!from_int4 && spec.x_scale == Granularity::tensor);
    p.accumulate = work.accumulate;
    p.out = arrays.gw;
  }
  if (count > 0) add_products(plan, facts, products, buffers, index, count);
  if (work.gw && by_token) {
    Buffers reads = Buffer::columns | x;
    if (work.accumulate) reads |= Buffer::gw;
    Step& step =
        plan.add(Kernel::token, {ceil_div(shape.out_features * shape.in_features, 256), 256}, reads,
                 Buffer::gw);
    step.dtype = arrays.gw.dtype;
    step.work = ProductStep{1, {}};
  } else if (!work.gw && work.clear_gw) {
    plan.add(Kernel::fill_zero, {ceil_div(shape.out_features * shape.in_features, 256), 256}, {},
             Buffer::gw)
        .work = ProductStep{1, {}};
  }
  if (work.gb && !summed && shape.out_features > 0) {
    const std::int64_t runs = sum_runs(shape.tokens);
    Step& step =
        plan.add(Kernel::partial_sum,
                 {runs * ceil_div(shape.out_features, strip::sum_threads), strip::sum_threads},
                 Buffer::gy, Buffer::all_scratch);
    step.dtype = arrays.gy.dtype;
    step.work = SumsStep{runs};
    add_final_sum(plan, runs, shape.out_features, work.accumulate, Buffer::all_scratch);
  }
  return plan;
}

Plan plan_compress(const DeviceFacts& facts, const ArrayFacts& x, std::int64_t cols,
                   const Projection& p, const OperandQuant& quant, std::int64_t scales) {
  Plan plan;
  add_zero(plan, {0, 0, columns_amax_words(facts, cols, p, quant)});
  add_columns(
      plan, facts,
      {Job::activation, x, Buffer::x, Buffer::saved, Buffer::columns_amax, cols, p, quant, scales});
  return plan;
}

Plan plan_groups(const ArrayFacts& x, std::int64_t rows, std::int64_t cols, Rounding rounding) {
  Plan plan;
  const bool pairs = dtype_size(x.dtype) == 2 && x.pairs_aligned;
  const std::int64_t blocks = ceil_div(cols, 128) * ceil_div(rows, int4_group);
  Step& step = plan.add(pairs ? Kernel::group_pairs : Kernel::groups, {blocks, 128}, Buffer::x,
                        Buffer::saved);
  step.dtype = x.dtype;
  step.rounding = rounding;
  return plan;
}

Plan plan_weight(const DeviceFacts& facts, const ArrayFacts& w, std::int64_t cols,
                 const Projection& p, const OperandQuant& quant, std::int64_t scales) {
  Plan plan;
  const ColumnsShape weight = weight_shape(w, cols, p, quant, scales, Buffer::quantized_w);
  OperandShapes operands;
  operands.weight = &weight;
  operands.zeroed.weight = columns_amax_words(facts, cols, p, quant);
  add_operands(plan, facts, operands);
  return plan;
}

Plan plan_gemm(const DeviceFacts& facts, const ProductShape& shape) {
  Plan plan;
  add_product(plan, facts, shape, 0, {Buffer::a, Buffer::b, Buffer::out});
  return plan;
}

Plan plan_gemm_int4(const DeviceFacts& facts, const ProductShape& shape, bool packed_aligned) {
  Plan plan;
  const std::int64_t m = shape.m, n = shape.n, k = shape.k;
  if (m == 0 || n == 0) return plan;
  if (facts.int4_units && k % 2 == 0 && k <= int32_safe_k4 && packed_aligned) {
    Buffers reads = Buffer::a | Buffer::b;
    if (shape.accumulate) reads |= Buffer::out;
    add_mma(plan, facts, shape, 0, true, reads, Buffer::out);
    return plan;
  }
  plan.add(Kernel::unpack, {ceil_div(m * k, 256), 256}, Buffer::a, Buffer::unpacked_a).work =
      UnpackStep{false};
  plan.add(Kernel::unpack, {ceil_div(n * k, 256), 256}, Buffer::b, Buffer::unpacked_b).work =
      UnpackStep{true};
  // With the scales of a and b.
  add_product(plan, facts, shape, 0,
              {Buffer::a | Buffer::unpacked_a, Buffer::b | Buffer::unpacked_b, Buffer::out});
  return plan;
}

StripGrid strip_grid(const Projection& p, std::int64_t cols, int extra) {
  StripGrid grid{};
  grid.threads = p.block <= 64 ? 128 : 32;
  grid.shared_bytes = static_cast<std::size_t>((p.block + extra) * grid.threads) * sizeof(float);
  const std::int64_t cut = blocks_per_cut(p.rank);
  grid.run = round_up(std::max<std::int64_t>(1, 64 / p.block), cut);
  grid.blocks =
      ceil_div(cols, grid.threads) * std::max<std::int64_t>(1, ceil_div(p.blocks, grid.run));
  return grid;
}

// ---- what plans know of arrays -----------------------------------------------------------------

namespace {

bool aligned(const void* data, std::int64_t stride_bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride_bytes % 16 == 0;
}

}  // namespace

ArrayFacts array_facts(const MatrixIn& x) {
  const auto size = static_cast<std::int64_t>(dtype_size(x.dtype));
  const auto address = reinterpret_cast<std::uintptr_t>(x.data);
  const bool dense = x.col_stride == 1;
  return {x.dtype, dense && aligned(x.data, x.row_stride * size),
          dense && x.cols % 2 == 0 && x.row_stride % 2 == 0 &&
              address % static_cast<std::uintptr_t>(2 * size) == 0};
}

OutFacts out_facts(const MatrixOut& out) {
  const auto size = static_cast<std::int64_t>(dtype_size(out.dtype));
  return {out.dtype, out.col_stride == 1, aligned(out.data, out.row_stride * size)};
}

ProductShape product_shape(const GemmArgs& args) {
  ProductShape p;
  p.m = args.m;
  p.n = args.n;
  p.k = args.k;
  p.rows_aligned = aligned(args.a, args.lda) && aligned(args.b, args.ldb);
  p.rows_near = args.lda < UINT32_MAX && args.ldb < UINT32_MAX;
  p.scaled = args.a_scale != nullptr && args.b_scale != nullptr;
  p.one_scale_a = args.a_scale_step == 0;
  p.one_scale_b = args.b_scale_step == 0;
  p.accumulate = args.accumulate;
  p.out = out_facts(args.out);
  return p;
}

MmaProduct mma_product(const ProductShape& p, bool int4) {
  const auto size = static_cast<std::int64_t>(dtype_size(p.out.dtype));
  const bool aligned = p.rows_aligned && p.rows_near && p.out.dense_rows && p.out.rows_aligned &&
                       p.n * size % 16 == 0;
  return {p.m, p.n, int4 ? ceil_div(p.k, 2) : p.k, aligned, !int4 && p.k > int32_safe_k, int4};
}

// ---- workspaces --------------------------------------------------------------------------------

Zeroed take_zeroed(WorkspaceCursor& cursor, std::int64_t words) {
  auto* const at = cursor.take<std::uint32_t>(words);
  return {at, static_cast<std::size_t>(words) * sizeof *at};
}

std::int64_t columns_amax_words(const DeviceFacts& facts, std::int64_t cols, const Projection& p,
                                const OperandQuant& quant) {
  if (p.k_padded > 0 && one_pass(facts, cols, p, quant)) return 0;
  return quant.per_tensor ? small_quantize::slots : quant.per_k ? p.k_padded : cols;
}

// wgmma: the scales as vectors, where they are single numbers, and what stream-K adds up in.
// mma.sync: the sums of tiles that thread blocks share.
std::size_t gemm_workspace(const DeviceFacts& facts, std::int64_t m, std::int64_t n,
                           std::int64_t k) {
  if (!facts.wgmma) {
    if (m <= 0 || n <= 0 || m >= INT32_MAX || n >= INT32_MAX || k > int32_safe_k) return 0;
    return mma_workspace(mma_choose(mma_device(facts), {m, n, k, true, false}, true));
  }
  std::size_t bytes = static_cast<std::size_t>(round_up(m, 64) + round_up(n, 64)) * sizeof(float);
  if (facts.wgmma_built && m > 0 && n > 0 && m < INT32_MAX && n < INT32_MAX && k <= int32_safe_k) {
    const WgmmaChoice choice = wgmma_choice(facts, m, n, k, false);
    if (choice.kernel == Kernel::wgmma_stream_k) {
      bytes += facts.queries->stream_k_workspace(m, n, k, choice.plan);
    }
  }
  return bytes;
}

Scratch take_scratch(WorkspaceCursor& cursor, const DeviceFacts& facts, const BackwardWork& work) {
  const BackwardLinearSpec& spec = work.spec;
  const LinearShape& shape = work.shape;
  const auto take_gemm = [&](std::int64_t m, std::int64_t n, std::int64_t k) {
    return cursor.take<char>(static_cast<std::int64_t>(gemm_workspace(facts, m, n, k)));
  };
  const auto take = [&](Operand& operand, std::int64_t rows, std::int64_t k, std::int64_t scales) {
    operand.rows = rows;
    operand.k_padded = k;
    operand.scales = scales;
    operand.codes = cursor.take<std::int8_t>(rows * k);
    operand.scale = cursor.take<float>(scales);
  };
  Scratch s;
  const AmaxWords words = amax_words(facts, work);
  s.zeroed = take_zeroed(cursor, words.all());
  if (work.gx) {
    const std::int64_t k = work.out_features.k_padded;
    take(s.gradient_rows, shape.tokens, k, shape.tokens);
    if (work.weight) take(s.weight, shape.in_features, k, shape.in_features);
    s.gx_gemm = take_gemm(shape.tokens, shape.in_features, k);
  }
  if (work.gw) {
    const std::int64_t k = work.tokens.k_padded;
    take(s.gradient_columns, shape.out_features, k,
         spec.gw_scale == GradScale::token ? k : shape.out_features);
    if (spec.storage == Storage::int4) take(s.activation, shape.in_features, k, shape.in_features);
    s.gw_gemm = take_gemm(shape.out_features, shape.in_features, k);
    s.sums = take_sums(cursor, facts, shape);
  }
  if (s.zeroed.words != nullptr) {
    s.gradient_rows.amax = s.zeroed.words;
    s.weight.amax = s.gradient_rows.amax + words.rows;
    s.gradient_columns.amax = s.weight.amax + words.weight;
  }
  return s;
}

// A partial sum for every 128 tokens, or those of gradient_kernel.
char* take_sums(WorkspaceCursor& cursor, const DeviceFacts& facts, const LinearShape& shape) {
  const std::int64_t runs = std::max(sum_runs(shape.tokens), gradient_sums(facts, shape.tokens));
  return cursor.take<char>(runs * shape.out_features * static_cast<std::int64_t>(sizeof(float)));
}

std::size_t backward_workspace(const DeviceFacts& facts, const BackwardWork& work) {
  WorkspaceCursor cursor, for_sums;
  take_scratch(cursor, facts, work);
  if (work.gb) take_sums(for_sums, facts, work.shape);
  return std::max(cursor.bytes(), for_sums.bytes());
}

}  // namespace hot::detail::plan

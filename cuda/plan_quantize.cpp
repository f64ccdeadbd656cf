// Which kernels quantise the operands of a call.
#include <algorithm>
#include <cstdint>

#include "cuda/plan_steps.h"

namespace hot::detail::plan {

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

// Transforms that rows16_kernel and wide_rows_kernel have instances of.
bool rows16_can(int hadamard_block, Rounding rounding) {
  return hadamard_block == 16 ||
         (rounding == Rounding::nearest && (hadamard_block == 64 || hadamard_block == 128));
}

void add_rows_pass(Plan& plan, const DeviceFacts& facts, const RowsShape& job, RowsPass pass) {
  const RowShare share = row_share(job.k_padded / 16);
  const Rounding rounding = pass == RowsPass::amax ? Rounding::nearest : job.quant.rounding;
  Buffers reads = job.from, writes = job.codes;
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
    step.work = RowsStep{job.of, pass, share.lanes, share.blocks, buffers};
  };
  if (!rows16_can(job.hadamard_block, rounding) || share.lanes == 0) {
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
      at_once = facts.queries->at_once(
          WideRows{rounding, job.hadamard_block, share.blocks, job.x.dtype, buffers}, shape);
    } while (buffers == 1 && at_once <= facts.sm_count);
    shape.blocks = std::min(job.rows, at_once);
    return add(Kernel::wide_rows, shape, buffers);
  }
  const int rows = share.lanes > 32 ? 1 : 128 / share.lanes;
  add(Kernel::rows16, {ceil_div(job.rows, rows), share.lanes, 0, 1, rows}, 0);
}

}  // namespace

void add_rows(Plan& plan, const DeviceFacts& facts, const RowsShape& job) {
  if (!job.quant.per_tensor) return add_rows_pass(plan, facts, job, RowsPass::row_scales);
  add_rows_pass(plan, facts, job, RowsPass::amax);
  add_rows_pass(plan, facts, job, RowsPass::codes);
}

namespace {

// ---- columns -----------------------------------------------------------------------------------

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

}  // namespace

void add_final_sum(Plan& plan, std::int64_t runs, std::int64_t cols, bool accumulate, Buffer sums) {
  Buffers reads = sum_reads(accumulate);
  if (runs > 0) reads |= sums;
  plan.add(Kernel::final_sum, {ceil_div(cols, 32), 256}, reads, Buffer::gb).work = SumsStep{runs};
}

namespace {

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

}  // namespace

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

namespace {

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

}  // namespace

void add_zero(Plan& plan, const AmaxWords& words) {
  if (words.all() == 0) return;
  Buffers writes;
  if (words.rows > 0) writes |= Buffer::rows_amax;
  if (words.weight > 0) writes |= Buffer::weight_amax;
  if (words.columns > 0) writes |= Buffer::columns_amax;
  plan.add(Kernel::zero, {}, {}, writes).work =
      ZeroStep{static_cast<std::size_t>(words.all()) * sizeof(std::uint32_t)};
}

namespace {

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

}  // namespace

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

std::int64_t sum_runs(std::int64_t rows) { return ceil_div(rows, 16 * strip::sum_run); }

std::int64_t gradient_sums(const DeviceFacts& facts, std::int64_t rows) {
  return ceil_div(rows, std::int64_t{gradient::token_block} * gradient::tiles_a_sum) +
         facts.sm_count;
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

std::int64_t columns_amax_words(const DeviceFacts& facts, std::int64_t cols, const Projection& p,
                                const OperandQuant& quant) {
  if (p.k_padded > 0 && one_pass(facts, cols, p, quant)) return 0;
  return quant.per_tensor ? small_quantize::slots : quant.per_k ? p.k_padded : cols;
}

}  // namespace hot::detail::plan

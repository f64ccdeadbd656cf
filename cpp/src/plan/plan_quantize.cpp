// Choice of the kernels that quantise the operands of a call.
#include <algorithm>
#include <cstdint>
#include <optional>

#include "plan/steps.h"

namespace hot::detail::plan {

// ---- rows --------------------------------------------------------------------------------------

// Chooses the lanes per row. Prefers at most 1 idle lane in 8 (the loads of the others then hide
// the latency), and a row within a warp.
RowShare row_share(std::int64_t blocks, int most_per_lane) {
  RowShare best{};
  std::int64_t best_cost = 0;
  for (int per_lane = rows16_min_blocks; per_lane <= most_per_lane; ++per_lane) {
    std::int64_t lanes = ceil_div(blocks, per_lane);
    if (lanes > rows16_max_lanes || (per_lane > rows16_min_blocks && lanes < 8)) continue;
    if (lanes > 32) {
      lanes = round_up(lanes, 32);
    } else {
      std::int64_t power = 4;  // a block of 64 takes 4 lanes
      while (power < lanes) power *= 2;
      lanes = power;
    }
    // Slots, idle ones included, model the time: an eighth more if warps wait for each other.
    const std::int64_t slots = 8 * lanes * per_lane;
    const std::int64_t cost = lanes > 32 ? slots + slots / 8 : slots;
    if (best.lanes == 0 || cost <= best_cost) {
      best = {static_cast<int>(lanes), per_lane};
      best_cost = cost;
    }
  }
  return best;
}

namespace {

using columns::column_tiles;
using columns::ColumnTransform;
using columns::Pass;
using columns::token_tiles;

constexpr Reason one_scale{"it has one scale"}, empty{"it is empty"},
    token_grid{"tokens lie in a token_grid"}, fits_cluster{"its columns fit in a cluster"},
    dtypes{"operands of several types"}, all_rows{"the transform keeps all rows"};

Reason other_rounding(const OperandQuant& quant) {
  return {"rounding is %s", 0, rounding_name(quant.rounding)};
}

const char* block_name(const RowsShape& job) {
  return job.of == Source::gy ? "hadamard_block" : "forward's hadamard_block";
}

// Reason against loads of 16 elements in rows16_kernel.
Reason not_16(const RowsShape& job) {
  if (job.x.rows_aligned && job.cols % 16 == 0) return {};
  return {"%f %n is not a multiple of 16", job.cols};
}

Reason why_not_rows16(const RowsShape& job) {
  const Rounding rounding = job.quant.rounding;
  if (!rows16_can(job.hadamard_block, rounding)) {
    if (rounding == Rounding::pseudo_stochastic) return pseudo_stochastic;
    return {rounding == Rounding::nearest
                ? "%s is %n, where 64 has a fast kernel that rounds to nearest"
                : "%s is %n, where 16 has a fast kernel",
            job.hadamard_block, block_name(job)};
  }
  return row_share(job.k_padded / 16).lanes > 0 ? Reason{} : too_long(job.cols);
}

void add_rows_pass(Plan& plan, const RowsShape& job, RowsPass pass) {
  const RowShare share = row_share(job.k_padded / 16);
  Buffers reads = buffer_of(job.of), writes = job.codes;
  if (pass == RowsPass::amax) {
    reads |= Buffer::rows_amax;  // read by atomicMax
    writes = Buffer::rows_amax;
  } else if (pass == RowsPass::codes) {
    reads |= Buffer::rows_amax;
  }
  const Kernel kernel =
      plan.choose({{Kernel::rows16, "a row goes through shared memory, twice", why_not_rows16(job)},
                   {Kernel::rows}});
  const int rows = share.lanes > 32 ? 1 : 128 / std::max(share.lanes, 1);  // per CTA
  LaunchShape shape{job.rows, 256};
  if (kernel == Kernel::rows16) {
    shape = {ceil_div(job.rows, rows), share.lanes, 0, 1, rows};
    note_loads(plan, kernel, not_16(job));
  }
  plan.add(kernel, shape, reads, writes, RowsStep{job.of, pass, share.blocks}, job.x.dtype);
}

// Adds the codes after a pass for the largest value.
void add_rows_codes(Plan& plan, const RowsShape& job) {
  plan.takes({Kernel::rows16, "%a is read first for its scale", one_scale});
  add_rows_pass(plan, job, RowsPass::codes);
}

}  // namespace

void add_rows(Plan& plan, const RowsShape& job) {
  if (!job.quant.per_tensor) return add_rows_pass(plan, job, RowsPass::row_scales);
  add_rows_pass(plan, job, RowsPass::amax);
  add_rows_codes(plan, job);
}

namespace {

// ---- columns -----------------------------------------------------------------------------------

// Whether ColumnTransform::projected can make a projection: a sketch, or one of its lists of rows.
bool projects(const Projection& p) {
  if (p.block != 16 || p.rank != 8) return false;
  if (p.basis == Basis::sketch) return true;
  const auto keeps = [&](auto row_at) {
    for (int i = 0; i < 8; ++i) {
      if (p.rows[static_cast<std::size_t>(i)] != row_at(i)) return false;
    }
    return p.rows.size() == 8;
  };
  return keeps(columns::lowpass_row) || keeps([](int i) { return 2 * i; });
}

// Reason why quantize_columns.cu has no kernels for a projection. If it has, sets the transform.
Reason why_not_block16(const Projection& p, const OperandQuant& quant, ColumnTransform& transform) {
  const bool full = p.basis == Basis::full;
  if (p.equalized && !full) {  // only `factored` applies token exponents
    return {"equalize_tokens with basis %s, where full has a fast kernel", 0, basis_name(p.basis)};
  }
  if (quant.per_contraction) return scales_by_token;
  if (p.order.prefix_rows() > 0) return {"there are prefix tokens"};
  if (full) {
    transform = p.equalized ? ColumnTransform::factored : ColumnTransform::full;
  } else if (p.block != 16) {
    return {"blocks of %n, where 16 has a fast kernel", p.block};
  } else if (p.rank == 16 && p.basis != Basis::sketch) {
    transform = ColumnTransform::hadamard;
  } else if (projects(p)) {
    transform = ColumnTransform::projected;
  } else {
    return {"basis %s keeps %n of 16 rows, where its own 8 have a fast kernel", p.rank,
            basis_name(p.basis)};
  }
  return {};
}

// why_not_block16, and the reason why there is no kernel with this rounding.
Reason why_not_columns(const Projection& p, const OperandQuant& quant, ColumnTransform& transform) {
  if (const Reason why = why_not_block16(p, quant, transform)) return why;
  return quant.rounding == columns::rounding_of(transform) ? Reason{} : other_rounding(quant);
}

// Why no cluster that the device can run holds a column tile.
Reason why_not_one_pass(const DeviceFacts& facts, const Projection& p, const OperandQuant& quant,
                        ColumnTransform& transform) {
  if (const Reason why = why_not_columns(p, quant, transform)) return why;
  if (quant.per_tensor) return one_scale;
  if (const Reason why = why_not(facts, Feature::clusters)) return why;
  if (token_tiles(p, transform) <= columns::max_cluster * columns::max_warps) return {};
  return {"a column of %n codes is too long for a cluster", p.k_padded};
}

// CTAs per column tile and warps per CTA, with the least predicted time.
struct ClusterSplit {
  int ctas = 0, warps = 0;
};

ClusterSplit cluster_split(const DeviceFacts& facts, std::int64_t token_tile_count,
                           std::int64_t tiles, std::int64_t warps_on_sm) {
  const Thresholds& t = thresholds;
  const std::int64_t sm_count = facts.sm_count;
  ClusterSplit best;
  std::int64_t best_cycles = 0;
  for (int ctas = 1; ctas <= columns::max_cluster; ++ctas) {
    const std::int64_t warps = ceil_div(token_tile_count, ctas);
    if (warps > columns::max_warps) continue;
    const std::int64_t at_once =
        std::max<std::int64_t>(1, std::min(tiles, sm_count * (warps_on_sm / warps) / ctas));
    const std::int64_t warps_per_sm = ceil_div(at_once * ctas, sm_count) * warps;
    const std::int64_t cycles =
        ceil_div(tiles, at_once) *
        (std::max<std::int64_t>(t.latency_cycles, warps_per_sm * t.tile_cycles) +
         (ctas > 1 ? t.reduce_cycles : 0));
    if (best.ctas == 0 || cycles < best_cycles) {
      best = {ctas, static_cast<int>(warps)};
      best_cycles = cycles;
    }
  }
  return best;
}

LaunchShape column_shape(ColumnTransform transform, std::int64_t tiles, const ClusterSplit& split,
                         int cluster) {
  return {tiles * split.ctas, 32 * split.warps,
          columns::shared_bytes(transform, split.warps, split.warps, cluster),
          std::max(1, cluster)};
}

// Buffers read by a column quantiser: the matrix, and token exponents if they were equalised.
Buffers columns_read(const ColumnsShape& job) {
  const Buffer from = buffer_of(job.of);
  return job.p.equalized ? from | Buffer::exponents : Buffers(from);
}

Buffers sum_reads(bool accumulate) { return accumulate ? Buffers(Buffer::gb) : Buffers(); }

}  // namespace

void add_final_sum(Plan& plan, std::int64_t runs, std::int64_t cols, bool accumulate, Buffer sums) {
  Buffers reads = sum_reads(accumulate);
  if (runs > 0) reads |= sums;
  plan.add(Kernel::final_sum, {ceil_div(cols, 32), 256}, reads, Buffer::gb, SumsStep{runs});
}

namespace {

void note_column_loads(Plan& plan, Kernel kernel, const ColumnsShape& job) {
  note_loads(plan, kernel,
             job.p.order.samples != 0 ? token_grid : not_vectors(job.x.rows_aligned, job.cols));
}

void add_columns_one_pass(Plan& plan, const DeviceFacts& facts, const ColumnsShape& job,
                          ColumnTransform transform) {
  const auto size = static_cast<int>(dtype_size(job.x.dtype));
  const std::int64_t tiles = column_tiles(job.cols, job.x.dtype);
  const ClusterSplit split =
      cluster_split(facts, token_tiles(job.p, transform), tiles,
                    columns::max_warps * columns::sm_ctas(transform, size, Pass::both));
  const LaunchShape shape = column_shape(transform, tiles, split, split.ctas);
  Buffers reads = columns_read(job), writes = job.codes;
  if (job.sum) {
    reads |= sum_reads(job.accumulate);
    writes |= Buffer::gb;
  }
  note_column_loads(plan, Kernel::columns_one_pass, job);
  plan.add(Kernel::columns_one_pass, shape, reads, writes,
           ColumnsStep{job.of, transform, Pass::both, split.ctas, split.ctas}, job.x.dtype);
}

// Adds one of two passes, for columns that do not fit a cluster.
int add_column_pass(Plan& plan, const ColumnsShape& job, ColumnTransform transform, Pass pass) {
  const ClusterSplit split{
      static_cast<int>(ceil_div(token_tiles(job.p, transform), columns::two_pass_warps)),
      columns::two_pass_warps};
  const LaunchShape shape = column_shape(transform, column_tiles(job.cols, job.x.dtype), split, 0);
  const bool amax = pass == Pass::amax;
  Buffers writes = amax ? job.amax() : job.codes;
  if (amax && job.sum) writes |= Buffer::sums;
  const Kernel kernel = amax ? Kernel::column_amax : Kernel::column_codes;
  note_column_loads(plan, kernel, job);
  plan.add(kernel, shape, columns_read(job) | job.amax(), writes,
           ColumnsStep{job.of, transform, pass, split.ctas, 0}, job.x.dtype);
  return split.ctas;
}

void add_finish_scales(Plan& plan, const ColumnsShape& job) {
  plan.add(Kernel::finish_scales, {ceil_div(job.scales, 256), 256}, job.amax(), job.codes,
           GenericColumnsStep{job.of});
}

void add_generic_columns(Plan& plan, const ColumnsShape& job) {
  const GenericGrid grid = generic_grid(job.p, job.cols, columns::k16);
  const LaunchShape shape{grid.blocks, grid.threads, grid.shared_bytes};
  for (const bool amax : {true, false}) {
    if (!amax) plan.passed_as_before();
    plan.add(amax ? Kernel::generic_amax : Kernel::generic_codes, shape,
             columns_read(job) | job.amax(), amax ? job.amax() : job.codes,
             GenericColumnsStep{job.of, grid.run});
  }
  add_finish_scales(plan, job);
}

}  // namespace

bool add_columns(Plan& plan, const DeviceFacts& facts, const ColumnsShape& job) {
  ColumnTransform transform{};
  if (job.cols == 0 || job.p.k_padded == 0) {  // no codes; scales, if any, are 0
    if (job.scales > 0) add_finish_scales(plan, job);
    return false;
  }
  switch (plan.choose({{Kernel::columns_one_pass, "%a is read twice for its columns",
                        why_not_one_pass(facts, job.p, job.quant, transform)},
                       {Kernel::column_amax, "%a is read twice for its columns, a thread a column",
                        why_not_columns(job.p, job.quant, transform)},
                       {Kernel::generic_amax}})) {
    case Kernel::generic_amax:
      add_generic_columns(plan, job);
      return false;
    case Kernel::columns_one_pass:
      add_columns_one_pass(plan, facts, job, transform);
      return job.sum;
    default:
      break;
  }
  const int runs = add_column_pass(plan, job, transform, Pass::amax);
  add_column_pass(plan, job, transform, Pass::codes);
  if (job.sum) add_final_sum(plan, runs, job.cols, job.accumulate, Buffer::sums);
  return job.sum;
}

// ---- rows and the largest values of columns in one read ----------------------------------------

namespace {

// Reason against rows_column_amax_kernel. Without a reason, fills `work` and `shape`.
Reason why_not_rows_column_amax(const DeviceFacts& facts, const RowsShape& rows,
                                const ColumnsShape& columns, RowsColumnAmaxStep& work,
                                LaunchShape& shape) {
  if (rows.cols == 0 || rows.rows == 0) return empty;
  if (const Reason why = why_not_columns(columns.p, columns.quant, work.transform)) {
    return why;
  }
  if (const Reason why = why_not(facts, Feature::bulk_copy)) return why;
  if (rows.x.dtype != DType::bf16) return of_dtype;
  if (!rows.x.rows_aligned) return not_vectors(false, rows.cols);
  if (rows.cols % rows.hadamard_block != 0) {
    return {"%f %n is not a multiple of the transform's blocks", rows.cols};
  }
  if (!rows16_can(rows.hadamard_block, rows.quant.rounding)) {
    return {"%s is %n, which does not come with columns", rows.hadamard_block, block_name(rows)};
  }
  if (rows.x.powers) return {"features have exponents"};
  if (columns.p.order.samples != 0) return token_grid;
  if (work.transform == ColumnTransform::factored) return equalized;
  if (work.transform == ColumnTransform::hadamard) return all_rows;
  const RowShare share = row_share(rows.k_padded / 16);
  if (share.lanes == 0 || share.lanes > 32) return too_long(rows.cols);
  work.of = rows.of;
  work.pass = rows.quant.per_tensor ? RowsPass::amax : RowsPass::row_scales;
  work.lanes = share.lanes;
  work.lane_blocks = share.blocks;
  work.token_blocks = rows_column_amax::threads / share.lanes / rows_column_amax::token_block;
  work.tiles = static_cast<unsigned>(
      ceil_div(rows.rows, std::int64_t{work.token_blocks} * rows_column_amax::token_block));
  const std::int64_t grid = std::min<std::int64_t>(work.tiles, facts.sm_count);
  // Units have a partial sum each for g_b. Without sums there is no reason for more than a tile.
  work.unit_tiles = 1;
  if (columns.sum) {
    const std::int64_t units = facts.sm_count * rows_column_amax::cta_units;
    work.unit_tiles = static_cast<unsigned>(
        std::min<std::int64_t>(ceil_div(work.tiles, units), rows_column_amax::max_unit_tiles));
  }
  work.counter = columns_amax_words(facts, columns.cols, columns.p, columns.quant) - 1;
  const int bytes = rows_column_amax::Layout(rows.cols, work.token_blocks).bytes();
  if (bytes > facts.shared_bytes) return {"it needs %n bytes of shared memory", bytes};
  shape = {grid, rows_column_amax::threads, static_cast<std::size_t>(bytes)};
  return {};
}

void add_rows_column_amax(Plan& plan, const RowsShape& rows, const ColumnsShape& columns,
                          const RowsColumnAmaxStep& work, const LaunchShape& shape) {
  Buffers reads = buffer_of(rows.of) | columns.amax(), writes = columns.amax();
  if (rows.quant.per_tensor) reads |= Buffer::rows_amax;
  writes |= rows.quant.per_tensor ? Buffer::rows_amax : rows.codes;
  if (columns.sum) writes |= Buffer::sums;
  plan.add(Kernel::rows_column_amax, shape, reads, writes, work, rows.x.dtype);
  if (rows.quant.per_tensor) add_rows_codes(plan, rows);
  add_column_pass(plan, columns, work.transform, Pass::codes);
  if (columns.sum) {
    add_final_sum(plan, ceil_div(work.tiles, work.unit_tiles), rows.cols, columns.accumulate,
                  Buffer::sums);
  }
}

}  // namespace

bool add_rows_and_columns(Plan& plan, const DeviceFacts& facts, const RowsShape& rows,
                          const ColumnsShape& columns) {
  RowsColumnAmaxStep work{};
  LaunchShape shape;
  const Reason apart = why_not_one_pass(facts, columns.p, columns.quant, work.transform);
  const Reason why =
      apart ? why_not_rows_column_amax(facts, rows, columns, work, shape) : fits_cluster;
  if (!why) {
    plan.takes({Kernel::columns_one_pass, nullptr, apart});  // no cost: it would read as much
    add_rows_column_amax(plan, rows, columns, work, shape);
    return columns.sum;
  }
  add_rows(plan, rows);
  const bool reads_more = why.why != fits_cluster.why && why.why != empty.why;
  plan.takes(
      {Kernel::rows_column_amax, reads_more ? "%a is read again for its rows" : nullptr, why});
  return add_columns(plan, facts, columns);
}

// ---- rows of x and x as INT4 in one read -------------------------------------------------------

// Preferred maximum of blocks per lane, and threads per CTA unless a row needs more.
constexpr int rows_groups_lane_blocks = 3, rows_groups_threads = 128;

Reason add_rows_groups(Plan& plan, const RowsShape& rows, const CompressShape& saved) {
  const auto fits = [](const RowShare& share) {
    return share.lanes > 0 && share.lanes <= rows_groups::max_threads(share.blocks);
  };
  RowShare share = row_share(rows.k_padded / 16, rows_groups_lane_blocks);
  if (!fits(share)) share = row_share(rows.k_padded / 16);
  if (saved.spec.storage != Storage::int4) {
    return {"storage is %s", 0, storage_name(saved.spec.storage)};
  }
  if (dtype_size(rows.x.dtype) != 2) return of_dtype;
  if (saved.spec.equalize_tokens) return equalized;
  if (rows.hadamard_block != forward_block) {
    return {"%s is %n, where 64 is read once", rows.hadamard_block, block_name(rows)};
  }
  if (!rows.x.quads_aligned) return not_fours(rows.cols);
  if (rows.rows == 0 || rows.cols == 0) return empty;
  if (!fits(share)) return too_long(rows.cols);
  const int cta_rows = std::max(1, rows_groups_threads / share.lanes);
  const RowsGroupsStep work{share.blocks, static_cast<int>(ceil_div(int4_group, cta_rows)),
                            static_cast<int>(ceil_div(rows.cols, share.lanes * cta_rows))};
  const std::int64_t chunks = ceil_div(rows.rows, int4_group);
  note_loads(plan, Kernel::rows_groups, not_16(rows));
  plan.add(Kernel::rows_groups,
           {chunks * (work.row_ctas + work.column_ctas), share.lanes, 0, 1, cta_rows},
           buffer_of(rows.of), rows.codes | Buffer::saved, work, rows.x.dtype);
  return {};
}

// ---- all operands of a small layer in one launch or two ----------------------------------------

void add_zero(Plan& plan, const AmaxWords& words) {
  if (words.all() == 0) return;
  Buffers writes;
  if (words.rows > 0) writes |= Buffer::rows_amax;
  if (words.weight > 0) writes |= Buffer::weight_amax;
  if (words.columns > 0) writes |= Buffer::columns_amax;
  plan.add(Kernel::zero, {}, {}, writes,
           ZeroStep{static_cast<std::size_t>(words.all()) * sizeof(std::uint32_t)});
}

namespace {

class GroupedOperands {
 public:
  GroupedOperands(const DeviceFacts& facts, const OperandShapes& operands)
      : facts_(facts), of_(operands) {}

  // Reason why the kernel cannot quantise these operands or is not faster.
  Reason why_not() {
    if (const ColumnsShape* job = of_.weight) {
      if (const Reason why = add(*job, weight_)) return why;
      if (weight_.transform != ColumnTransform::hadamard) {
        return {"hadamard_block is %n", job->p.block};
      }
    }
    if (const ColumnsShape* job = of_.columns) {
      if (const Reason why = add(*job, gradient_)) return why;
      if (gradient_.transform == ColumnTransform::hadamard) return all_rows;
      if (job->quant.rounding != Rounding::stochastic) return other_rounding(job->quant);
    }
    if (const RowsShape* job = of_.rows) {
      const std::int64_t groups = job->k_padded / 16;
      if (const Reason why = add(job->x.dtype)) return why;
      if (job->quant.rounding != Rounding::stochastic) return other_rounding(job->quant);
      if (job->hadamard_block != 16) return {"hadamard_block is %n", job->hadamard_block};
      if (groups == 0) return empty;
      if (groups > grouped::row_blocks * grouped::threads) return too_long(job->cols);
      while ((grouped::row_blocks << lanes_log2_) < groups) ++lanes_log2_;
      rows_blocks_ = ceil_div(job->rows, grouped::threads >> lanes_log2_);
    }
    groups_blocks_ = ceil_div(of_.packed_channels, grouped::threads / 32);
    if (cluster_ > 1) {
      if (const Reason why = plan::why_not(facts_, Feature::clusters)) return why;
    }
    for (Columns* columns : {&weight_, &gradient_}) {
      // A column tile takes one CTA if it fits, otherwise the whole cluster.
      columns->ctas = columns->needed_ctas > 1 ? cluster_ : columns->needed_ctas;
      columns->blocks = columns->tiles * columns->ctas;
    }
    const std::int64_t max_blocks = std::int64_t{thresholds.grouped_waves} * columns::min_sm_warps /
                                    columns::max_warps * facts_.sm_count;
    const std::int64_t blocks = weight_.blocks + gradient_.blocks + rows_blocks_ + groups_blocks_;
    if (std::max({weight_.blocks, gradient_.blocks, rows_blocks_}) <= grouped::max_amax_slots &&
        blocks <= max_blocks) {
      return {};
    }
    return {"%n blocks hide a launch each", blocks};
  }

  void add_to(Plan& plan) const {
    const auto per_tensor = [](const auto* job) { return job != nullptr && job->quant.per_tensor; };
    const bool weight = per_tensor(of_.weight), rows = per_tensor(of_.rows),
               gradient = per_tensor(of_.columns);
    const bool sum = of_.columns != nullptr && of_.columns->sum;
    const Buffers sum_read = sum ? sum_reads(of_.columns->accumulate) : Buffers();
    if (weight || rows || gradient) {
      const bool shares = gradient && sum && gradient_.ctas > 1;
      Launch launch(*this, RowsPass::amax, shares ? cluster_ : 1);
      GroupedStep& s = launch.step;
      if (weight) launch.add(s.weight, weight_, Pass::amax, 0, Buffer::w, Buffer::weight_amax);
      if (gradient) {
        launch.add(s.gradient, gradient_, Pass::amax, shares ? gradient_.ctas : 0, Buffer::gy,
                   Buffer::columns_amax);
        if (sum) launch.also(sum_read, Buffer::gb);
      }
      if (rows) launch.add(s.rows, rows_blocks_, Buffer::gy, Buffer::rows_amax);
      launch.add_to(plan, Kernel::grouped_amax);
      plan.takes({Kernel::grouped_codes, "%a is read first for its scale", one_scale});
    }
    const bool shares = (weight_.ctas > 1 && !weight) || (gradient_.ctas > 1 && !gradient);
    Launch launch(*this, rows ? RowsPass::codes : RowsPass::row_scales, shares ? cluster_ : 1);
    GroupedStep& s = launch.step;
    const auto add = [&](GroupedColumns& to, const Columns& columns, bool known, Buffers reads,
                         Buffers writes, Buffer amax) {
      launch.add(to, columns, known ? Pass::codes : Pass::both, known ? 0 : columns.ctas, reads,
                 writes);
      if (known) launch.also(amax, {});
    };
    if (of_.weight != nullptr) {
      add(s.weight, weight_, weight, Buffer::w, of_.weight->codes, Buffer::weight_amax);
    }
    if (of_.columns != nullptr) {
      add(s.gradient, gradient_, gradient, Buffer::gy, Buffer::columns, Buffer::columns_amax);
      if (sum && !gradient) launch.also(sum_read, Buffer::gb);
    }
    if (of_.rows != nullptr) {
      launch.add(s.rows, rows_blocks_, Buffer::gy, Buffer::gy_rows);
      if (rows) launch.also(Buffer::rows_amax, {});
    }
    if (groups_blocks_ > 0) {
      launch.add(s.groups, groups_blocks_, Buffer::saved, Buffer::activation);
    }
    launch.add_to(plan, Kernel::grouped_codes);
  }

 private:
  // Operand quantised by columns: its column tiles, and the CTAs per tile.
  struct Columns {
    ColumnTransform transform{};
    std::int64_t tiles = 0, blocks = 0;
    int needed_ctas = 0, ctas = 0;
  };

  // One launch with some of the operands. `cluster`: CTAs that reduce the longest column tile.
  class Launch {
   public:
    Launch(const GroupedOperands& operands, RowsPass rows_pass, int cluster)
        : dtype_(operands.dtype_.value_or(DType::f32)), cluster_(cluster) {
      step.transform = operands.gradient_.transform;
      step.row_lanes_log2 = operands.lanes_log2_;
      step.rows_pass = rows_pass;
    }

    GroupedStep step{};

    void add(GroupedRange& range, std::int64_t blocks, Buffers reads, Buffers writes) {
      range.blocks = static_cast<unsigned>(blocks);
      range.end = static_cast<unsigned>(round_up(blocks, cluster_));
      blocks_ += range.end;
      also(reads, writes);
    }
    void add(GroupedColumns& to, const Columns& columns, Pass pass, int cluster, Buffers reads,
             Buffers writes) {
      to.pass = pass;
      to.ctas = columns.ctas;
      to.cluster = cluster;
      add(to.range, columns.blocks, reads, writes);
    }
    void also(Buffers reads, Buffers writes) {
      reads_ |= reads;
      writes_ |= writes;
    }
    void add_to(Plan& plan, Kernel kernel) const {
      const int tiles = grouped::cta_tiles(static_cast<int>(dtype_size(dtype_)));
      const std::size_t shared =
          columns::shared_bytes(step.transform, tiles, columns::max_warps, cluster_);
      plan.add(kernel, {blocks_, grouped::threads, shared, cluster_}, reads_, writes_, step,
               dtype_);
    }

   private:
    DType dtype_;
    int cluster_;
    std::int64_t blocks_ = 0;
    Buffers reads_, writes_;
  };

  Reason add(DType dtype) {
    if (dtype_.value_or(dtype) != dtype) return dtypes;
    dtype_ = dtype;
    return dtype == DType::f16 ? of_dtype : Reason{};
  }
  Reason add(const ColumnsShape& job, Columns& columns) {
    if (const Reason why = add(job.x.dtype)) return why;
    if (job.p.k_padded == 0) return empty;
    if (const Reason why = why_not_block16(job.p, job.quant, columns.transform)) return why;
    if (columns.transform == ColumnTransform::factored) return equalized;
    const std::int64_t needed =
        ceil_div(token_tiles(job.p, columns.transform),
                 grouped::cta_tiles(static_cast<int>(dtype_size(job.x.dtype))));
    if (needed > columns::max_cluster) {
      return {"a column of %n codes is too long for a cluster", job.p.k_padded};
    }
    columns.needed_ctas = static_cast<int>(needed);
    columns.tiles = column_tiles(job.cols, job.x.dtype);
    cluster_ = std::max(cluster_, columns.needed_ctas);
    return {};
  }

  const DeviceFacts& facts_;
  const OperandShapes& of_;
  std::optional<DType> dtype_;
  Columns weight_, gradient_;
  int cluster_ = 1, lanes_log2_ = 0;
  std::int64_t rows_blocks_ = 0, groups_blocks_ = 0;
};

}  // namespace

bool add_operands(Plan& plan, const DeviceFacts& facts, const OperandShapes& operands) {
  const bool sum = operands.columns != nullptr && operands.columns->sum;
  GroupedOperands group(facts, operands);
  if (plan.takes({Kernel::grouped_codes, nullptr, group.why_not()})) {
    group.add_to(plan);
    return sum;
  }
  add_zero(plan, operands.zeroed);
  bool summed = false;
  if (operands.rows != nullptr && operands.columns != nullptr) {
    summed = add_rows_and_columns(plan, facts, *operands.rows, *operands.columns);
  } else if (operands.rows != nullptr) {
    add_rows(plan, *operands.rows);
  } else if (operands.columns != nullptr) {
    summed = add_columns(plan, facts, *operands.columns);
  }
  if (operands.weight != nullptr) add_columns(plan, facts, *operands.weight);
  if (operands.packed_channels > 0) {
    plan.add(Kernel::requantize, {operands.packed_channels, 256}, Buffer::saved,
             Buffer::activation);
  }
  return summed;
}

std::int64_t sum_runs(std::int64_t rows) { return ceil_div(rows, 16 * bias::sum_run); }

std::int64_t rows_column_amax_sums(const DeviceFacts& facts, std::int64_t rows) {
  return ceil_div(rows,
                  std::int64_t{rows_column_amax::token_block} * rows_column_amax::max_unit_tiles) +
         facts.sm_count * rows_column_amax::cta_units;
}

GenericGrid generic_grid(const Projection& p, std::int64_t cols, int extra) {
  GenericGrid grid{};
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
  ColumnTransform transform{};
  if (p.k_padded > 0 && !why_not_one_pass(facts, p, quant, transform)) return 0;
  const std::int64_t largest = quant.per_tensor        ? grouped::max_amax_slots
                               : quant.per_contraction ? p.k_padded
                                                       : cols;
  return largest + 1;  // and the counter of rows_column_amax_kernel
}

}  // namespace hot::detail::plan

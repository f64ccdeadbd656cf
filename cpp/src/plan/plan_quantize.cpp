// Choice of the kernels that quantise the operands of a call.
#include <algorithm>
#include <cstdint>

#include "plan/steps.h"
#include "row_runs.h"

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
using columns::token_tiles;

constexpr Reason one_scale{"it has one scale"}, empty{"it is empty"},
    token_grid{"tokens lie in a token_grid"}, fits_cluster{"its columns fit in a cluster"},
    dtypes{"operands of several types"}, all_rows{"the transform keeps all rows"},
    exponents{"features have exponents"};

Reason other_rounding(const OperandQuant& quant) {
  return {"rounding is %s", 0, rounding_name(quant.rounding)};
}

const char* block_name(const Operand& job) {
  return job.source == Source::gy ? "hadamard_block" : "forward's hadamard_block";
}

// Reason against loads of 16 elements in rows16_kernel.
Reason not_16(const Operand& job) {
  if (rows_aligned(job.x) && job.x.cols % 16 == 0) return {};
  return {"%f %n is not a multiple of 16", job.x.cols};
}

Reason why_not_rows16(const Operand& job) {
  const Rounding rounding = job.quant.rounding;
  if (!rows16_can(job.transform.block, rounding)) {
    if (rounding == Rounding::pseudo_stochastic) return pseudo_stochastic;
    return {rounding == Rounding::nearest
                ? "%s is %n, where 64 has a fast kernel that rounds to nearest"
                : "%s is %n, where 16 has a fast kernel",
            job.transform.block, block_name(job)};
  }
  return row_share(job.out.k_padded / 16).lanes > 0 ? Reason{} : too_long(job.x.cols);
}

void add_rows_pass(Plan& plan, const Operand& job, Pass pass) {
  const RowShare share = row_share(job.out.k_padded / 16);
  Buffers reads = matrix_buffer(job.source), writes = codes_buffer(job);
  if (pass == Pass::amax) {
    reads |= Buffer::rows_amax;  // read by atomicMax
    writes = Buffer::rows_amax;
  } else if (pass == Pass::codes) {
    reads |= Buffer::rows_amax;
  }
  const Kernel kernel =
      plan.choose({{Kernel::rows16, "a row goes through shared memory, twice", why_not_rows16(job)},
                   {Kernel::rows}});
  const int rows = share.lanes > 32 ? 1 : 128 / std::max(share.lanes, 1);  // per CTA
  LaunchShape shape{job.x.rows, 256};
  if (kernel == Kernel::rows16) {
    shape = {ceil_div(job.x.rows, rows), share.lanes, 0, 1, rows};
    note_loads(plan, kernel, not_16(job));
  }
  plan.add(kernel, shape, reads, writes, RowsStep{job.source, pass, share.blocks}, job.x.dtype);
}

// Adds the codes after a pass for the largest value.
void add_rows_codes(Plan& plan, const Operand& job) {
  plan.takes({Kernel::rows16, "%a is read first for its scale", one_scale});
  add_rows_pass(plan, job, Pass::codes);
}

void add_rows(Plan& plan, const Operand& job) {
  if (!job.quant.per_tensor) return add_rows_pass(plan, job, Pass::both);
  add_rows_pass(plan, job, Pass::amax);
  add_rows_codes(plan, job);
}

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

// Words for the largest values of an operand.
std::int64_t amax_words(const DeviceFacts& facts, const Operand& job) {
  if (job.from != From::matrix || job.code != Storage::int8 || job.out.scales == 0) return 0;
  const std::int64_t one = job.quant.per_tensor ? grouped::max_amax_slots : 0;
  if (job.along == Along::row) return one;
  ColumnTransform transform{};
  const Projection& p = job.transform;
  if (p.k_padded > 0 && !why_not_one_pass(facts, p, job.quant, transform)) return 0;
  const std::int64_t largest = one > 0 ? one : job.quant.per_contraction ? p.k_padded : job.x.cols;
  return largest + 1;  // and the counter of rows_column_amax_kernel
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
Buffers columns_read(const Operand& job) {
  const Buffer from = matrix_buffer(job.source);
  return job.transform.equalized ? from | Buffer::exponents : Buffers(from);
}

void note_column_loads(Plan& plan, Kernel kernel, const Operand& job) {
  note_loads(
      plan, kernel,
      job.transform.order.samples != 0 ? token_grid : not_vectors(rows_aligned(job.x), job.x.cols));
}

void add_columns_one_pass(Plan& plan, const DeviceFacts& facts, const Operand& job,
                          ColumnTransform transform) {
  const auto size = static_cast<int>(dtype_size(job.x.dtype));
  const std::int64_t tiles = column_tiles(job.x.cols, job.x.dtype);
  const ClusterSplit split =
      cluster_split(facts, token_tiles(job.transform, transform), tiles,
                    columns::max_warps * columns::sm_ctas(transform, size, Pass::both));
  const LaunchShape shape = column_shape(transform, tiles, split, split.ctas);
  Buffers reads = columns_read(job), writes = codes_buffer(job);
  if (job.sum) {
    reads |= sum_reads(job.accumulate);
    writes |= Buffer::gb;
  }
  note_column_loads(plan, Kernel::columns_one_pass, job);
  plan.add(Kernel::columns_one_pass, shape, reads, writes,
           ColumnsStep{job.source, transform, Pass::both, split.ctas, split.ctas}, job.x.dtype);
}

// Adds one of two passes, for columns that do not fit a cluster.
int add_column_pass(Plan& plan, const Operand& job, ColumnTransform transform, Pass pass) {
  const ClusterSplit split{
      static_cast<int>(ceil_div(token_tiles(job.transform, transform), columns::two_pass_warps)),
      columns::two_pass_warps};
  const LaunchShape shape =
      column_shape(transform, column_tiles(job.x.cols, job.x.dtype), split, 0);
  const bool amax = pass == Pass::amax;
  Buffers writes = amax ? amax_buffer(job) : codes_buffer(job);
  if (amax && job.sum) writes |= Buffer::sums;
  const Kernel kernel = amax ? Kernel::column_amax : Kernel::column_codes;
  note_column_loads(plan, kernel, job);
  plan.add(kernel, shape, columns_read(job) | amax_buffer(job), writes,
           ColumnsStep{job.source, transform, pass, split.ctas, 0}, job.x.dtype);
  return split.ctas;
}

void add_finish_scales(Plan& plan, const Operand& job) {
  plan.add(Kernel::finish_scales, {ceil_div(job.out.scales, 256), 256}, amax_buffer(job),
           codes_buffer(job), GenericColumnsStep{job.source});
}

void add_generic_columns(Plan& plan, const Operand& job) {
  const GenericGrid grid = generic_grid(job.transform, job.x.cols, columns::k16);
  const LaunchShape shape{grid.blocks, grid.threads, grid.shared_bytes};
  for (const bool amax : {true, false}) {
    if (!amax) plan.passed_as_before();
    plan.add(amax ? Kernel::generic_amax : Kernel::generic_codes, shape,
             columns_read(job) | amax_buffer(job), amax ? amax_buffer(job) : codes_buffer(job),
             GenericColumnsStep{job.source, grid.run});
  }
  add_finish_scales(plan, job);
}

bool add_columns(Plan& plan, const DeviceFacts& facts, const Operand& job) {
  ColumnTransform transform{};
  if (job.x.cols == 0 || job.out.k_padded == 0) {  // no codes; scales, if any, are 0
    if (job.out.scales > 0) add_finish_scales(plan, job);
    return false;
  }
  const Kernel kernel =
      plan.choose({{Kernel::columns_one_pass, "%a is read twice for its columns",
                    why_not_one_pass(facts, job.transform, job.quant, transform)},
                   {Kernel::column_amax, "%a is read twice for its columns, a thread a column",
                    why_not_columns(job.transform, job.quant, transform)},
                   {Kernel::generic_amax}});
  if (kernel == Kernel::generic_amax) {
    add_generic_columns(plan, job);
    return false;
  }
  if (kernel == Kernel::columns_one_pass) {
    add_columns_one_pass(plan, facts, job, transform);
    return job.sum;
  }
  const int runs = add_column_pass(plan, job, transform, Pass::amax);
  add_column_pass(plan, job, transform, Pass::codes);
  if (job.sum) add_final_sum(plan, runs, job.x.cols, job.accumulate, Buffer::sums);
  return job.sum;
}

// ---- rows and the largest values of columns in one read ----------------------------------------

// Reason against rows_column_amax_kernel. Without a reason, fills `work` and `shape`.
Reason why_not_rows_column_amax(const DeviceFacts& facts, const Operand& rows,
                                const Operand& columns, RowsColumnAmaxStep& work,
                                LaunchShape& shape) {
  if (rows.x.cols == 0 || rows.x.rows == 0) return empty;
  if (const Reason why = why_not_columns(columns.transform, columns.quant, work.transform)) {
    return why;
  }
  if (const Reason why = why_not(facts, Feature::bulk_copy)) return why;
  if (rows.x.dtype != DType::bf16) return of_dtype;
  if (!rows_aligned(rows.x)) return not_vectors(false, rows.x.cols);
  if (rows.x.cols % rows.transform.block != 0) {
    return {"%f %n is not a multiple of the transform's blocks", rows.x.cols};
  }
  if (!rows16_can(rows.transform.block, rows.quant.rounding)) {
    return {"%s is %n, which does not come with columns", rows.transform.block, block_name(rows)};
  }
  if (rows.powers.exponents != nullptr) return exponents;
  if (columns.transform.order.samples != 0) return token_grid;
  if (work.transform == ColumnTransform::factored) return equalized;
  if (work.transform == ColumnTransform::hadamard) return all_rows;
  const RowShare share = row_share(rows.out.k_padded / 16);
  if (share.lanes == 0 || share.lanes > 32) return too_long(rows.x.cols);
  work.of = rows.source;
  work.pass = rows.quant.per_tensor ? Pass::amax : Pass::both;
  work.lanes = share.lanes;
  work.lane_blocks = share.blocks;
  work.token_blocks = rows_column_amax::token_blocks(share.lanes);
  work.tiles = static_cast<unsigned>(
      ceil_div(rows.x.rows, std::int64_t{work.token_blocks} * rows_column_amax::token_block));
  const std::int64_t grid = std::min<std::int64_t>(work.tiles, facts.sm_count);
  // Every unit writes partial sums of g_b. Without sums there is no reason for more than a tile.
  work.unit_tiles = 1;
  if (columns.sum) {
    const std::int64_t units = std::int64_t{rows_column_amax::cta_units} * facts.sm_count;
    work.unit_tiles = static_cast<unsigned>(
        std::min<std::int64_t>(ceil_div(work.tiles, units), rows_column_amax::max_unit_tiles));
  }
  work.counter = amax_words(facts, columns) - 1;
  const int bytes = rows_column_amax::Layout(rows.x.cols, work.token_blocks).bytes();
  if (bytes > facts.shared_bytes) return {"it needs %n bytes of shared memory", bytes};
  shape = {grid, rows_column_amax::threads, static_cast<std::size_t>(bytes)};
  return {};
}

void add_rows_column_amax(Plan& plan, const Operand& rows, const Operand& columns,
                          const RowsColumnAmaxStep& work, const LaunchShape& shape) {
  Buffers reads = matrix_buffer(rows.source) | amax_buffer(columns), writes = amax_buffer(columns);
  if (rows.quant.per_tensor) reads |= Buffer::rows_amax;
  writes |= rows.quant.per_tensor ? Buffer::rows_amax : codes_buffer(rows);
  if (columns.sum) writes |= Buffer::sums;
  plan.add(Kernel::rows_column_amax, shape, reads, writes, work, rows.x.dtype);
  if (rows.quant.per_tensor) add_rows_codes(plan, rows);
  add_column_pass(plan, columns, work.transform, Pass::codes);
  if (columns.sum) {
    add_final_sum(plan, ceil_div(work.tiles, work.unit_tiles), rows.x.cols, columns.accumulate,
                  Buffer::sums);
  }
}

bool add_rows_and_columns(Plan& plan, const DeviceFacts& facts, const Operand& rows,
                          const Operand& columns) {
  RowsColumnAmaxStep work{};
  LaunchShape shape;
  const Reason apart = why_not_one_pass(facts, columns.transform, columns.quant, work.transform);
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

Reason add_rows_groups(Plan& plan, const Operand& rows, const Operand& saved) {
  const auto fits = [](const RowShare& share) {
    return share.lanes > 0 && share.lanes <= rows_groups::max_threads(share.blocks);
  };
  RowShare share = row_share(rows.out.k_padded / 16, rows_groups_lane_blocks);
  if (!fits(share)) share = row_share(rows.out.k_padded / 16);
  if (dtype_size(rows.x.dtype) != 2) return of_dtype;
  if (saved.transform.equalized) return equalized;
  if (rows.powers.exponents != nullptr) return exponents;
  if (rows.transform.block != forward_block) {
    return {"%s is %n, where 64 is read once", rows.transform.block, block_name(rows)};
  }
  if (!quads_aligned(rows.x)) return not_fours(rows.x.cols);
  if (rows.x.rows == 0 || rows.x.cols == 0) return empty;
  if (!fits(share)) return too_long(rows.x.cols);
  const int cta_rows = std::max(1, rows_groups_threads / share.lanes);
  const RowsGroupsStep work{share.blocks, static_cast<int>(ceil_div(int4_group, cta_rows)),
                            static_cast<int>(ceil_div(rows.x.cols, share.lanes * cta_rows))};
  const std::int64_t chunks = ceil_div(rows.x.rows, int4_group);
  note_loads(plan, Kernel::rows_groups, not_16(rows));
  plan.add(Kernel::rows_groups,
           {chunks * (work.row_ctas + work.column_ctas), share.lanes, 0, 1, cta_rows},
           matrix_buffer(rows.source), codes_buffer(rows) | Buffer::saved, work, rows.x.dtype);
  return {};
}

// ---- all operands of a small layer in one launch or two ----------------------------------------

void add_zero(Plan& plan, const Operands& operands) {
  Buffers writes;
  std::int64_t words = 0;
  for (const Operand& operand : operands) {
    const std::int64_t count = plan.scratch.amax[&operand - operands.begin()];
    if (count > 0) writes |= amax_buffer(operand);
    words += count;
  }
  if (words == 0) return;
  plan.add(Kernel::zero, {}, {}, writes,
           ZeroStep{static_cast<std::size_t>(words) * sizeof(std::uint32_t)});
}

// Operand of quantize_grouped_kernel, null if not needed, and its CTAs.
struct GroupedPart {
  const Operand* operand = nullptr;
  std::int64_t blocks = 0;
  int ctas = 0;  // per column tile
  ColumnTransform transform{};
  bool one_scale() const { return operand != nullptr && operand->quant.per_tensor; }
};

struct GroupedParts {
  GroupedPart weight, gradient, rows, groups;
  DType dtype = DType::f32;
  int cluster = 1;  // CTAs of the longest column tile
  int row_lanes_log2 = 0;

  explicit GroupedParts(const Operands& operands) {
    weight.operand = operands.find(Source::w, Along::column);
    gradient.operand = operands.find(Source::gy, Along::column);
    rows.operand = operands.find(Source::gy, Along::row);
    groups.operand = operands.find(Source::x, Along::column, From::groups);
    for (const GroupedPart* part : {&rows, &gradient, &weight}) {
      if (part->operand != nullptr) dtype = part->operand->x.dtype;
    }
  }
  // Whether the call has operands of a backward pass.
  bool any() const {
    return weight.operand != nullptr || gradient.operand != nullptr || rows.operand != nullptr;
  }
};

Reason why_not_grouped(const GroupedParts& parts, const Operand& job) {
  return job.x.dtype != parts.dtype ? dtypes : parts.dtype == DType::f16 ? of_dtype : Reason{};
}

// Reason against columns in the kernel. Without a reason, sets their transform and CTAs.
Reason why_not_grouped_columns(GroupedParts& parts, GroupedPart& part) {
  const Operand& job = *part.operand;
  if (const Reason why = why_not_grouped(parts, job)) return why;
  if (job.out.k_padded == 0) return empty;
  if (const Reason why = why_not_block16(job.transform, job.quant, part.transform)) return why;
  if (part.transform == ColumnTransform::factored) return equalized;
  const std::int64_t needed =
      ceil_div(token_tiles(job.transform, part.transform),
               grouped::cta_tiles(static_cast<int>(dtype_size(parts.dtype))));
  if (needed > columns::max_cluster) {
    return {"a column of %n codes is too long for a cluster", job.out.k_padded};
  }
  part.ctas = static_cast<int>(needed);
  parts.cluster = std::max(parts.cluster, part.ctas);
  return {};
}

// Reason why the kernel cannot quantise these operands or is not faster. Without a reason, sets the
// CTAs of all parts.
Reason why_not_grouped(const DeviceFacts& facts, GroupedParts& parts) {
  auto& [weight, gradient, rows, groups, dtype, cluster, row_lanes_log2] = parts;
  if (weight.operand != nullptr) {
    if (const Reason why = why_not_grouped_columns(parts, weight)) return why;
    if (weight.transform != ColumnTransform::hadamard) {
      return {"hadamard_block is %n", weight.operand->transform.block};
    }
  }
  if (const Operand* const job = gradient.operand) {
    if (const Reason why = why_not_grouped_columns(parts, gradient)) return why;
    if (gradient.transform == ColumnTransform::hadamard) return all_rows;
    if (job->quant.rounding != Rounding::stochastic) return other_rounding(job->quant);
  }
  if (const Operand* const job = rows.operand) {
    const std::int64_t blocks = job->out.k_padded / 16;
    if (const Reason why = why_not_grouped(parts, *job)) return why;
    if (job->quant.rounding != Rounding::stochastic) return other_rounding(job->quant);
    if (job->transform.block != 16) return {"hadamard_block is %n", job->transform.block};
    if (blocks == 0) return empty;
    if (blocks > grouped::row_blocks * grouped::threads) return too_long(job->x.cols);
    while ((grouped::row_blocks << row_lanes_log2) < blocks) ++row_lanes_log2;
    rows.blocks = ceil_div(job->x.rows, grouped::threads >> row_lanes_log2);
  }
  if (groups.operand != nullptr) {
    groups.blocks = ceil_div(groups.operand->out.rows, grouped::threads / 32);
  }
  if (cluster > 1) {
    if (const Reason why = why_not(facts, Feature::clusters)) return why;
  }
  for (GroupedPart* part : {&weight, &gradient}) {
    if (part->operand == nullptr) continue;
    // A column tile takes one CTA if it fits, otherwise the whole cluster.
    if (part->ctas > 1) part->ctas = cluster;
    part->blocks = column_tiles(part->operand->x.cols, dtype) * part->ctas;
  }
  const std::int64_t max_blocks = std::int64_t{thresholds.grouped_waves} * columns::min_sm_warps /
                                  columns::max_warps * facts.sm_count;
  const std::int64_t blocks = weight.blocks + gradient.blocks + rows.blocks + groups.blocks;
  if (std::max({weight.blocks, gradient.blocks, rows.blocks}) <= grouped::max_amax_slots &&
      blocks <= max_blocks) {
    return {};
  }
  return {"%n blocks hide a launch each", blocks};
}

// Adds one launch: the largest values of the operands with one scale, or all codes.
void add_grouped(Plan& plan, const GroupedParts& parts, bool amax) {
  const auto takes_part = [&](const GroupedPart& part) {
    return amax ? part.one_scale() : part.operand != nullptr;
  };
  // CTAs that reduce a column tile's values or its sums
  const auto reduces = [&](const GroupedPart& part) {
    if (!takes_part(part)) return 0;
    const bool sums = amax && part.operand->sum && part.ctas > 1;
    return sums || (!amax && !part.one_scale()) ? part.ctas : 0;
  };
  const bool shares = reduces(parts.weight) > 1 || reduces(parts.gradient) > 1;
  const int cluster = shares ? parts.cluster : 1;
  std::int64_t blocks = 0;
  Buffers reads, writes;
  const auto add = [&](GroupedRange& range, const GroupedPart& part) {
    const Operand& job = *part.operand;
    range.blocks = static_cast<unsigned>(part.blocks);
    range.end = static_cast<unsigned>(round_up(part.blocks, cluster));
    blocks += range.end;
    reads |= job.from == From::groups ? Buffer::saved : matrix_buffer(job.source);
    writes |= amax ? amax_buffer(job) : codes_buffer(job);
    if (!amax && part.one_scale()) {
      reads |= amax_buffer(job);
    } else if (job.sum) {
      reads |= sum_reads(job.accumulate);
      writes |= Buffer::gb;
    }
  };
  const auto add_part = [&](GroupedOperand& to, const GroupedPart& part) {
    if (!takes_part(part)) return;
    to.pass = amax ? Pass::amax : part.one_scale() ? Pass::codes : Pass::both;
    to.ctas = part.ctas;
    to.cluster = reduces(part);
    add(to.range, part);
  };
  GroupedStep step{};
  step.transform = parts.gradient.transform;
  step.row_lanes_log2 = parts.row_lanes_log2;
  add_part(step.weight, parts.weight);
  add_part(step.gradient, parts.gradient);
  add_part(step.rows, parts.rows);
  if (!amax && parts.groups.blocks > 0) add(step.groups, parts.groups);
  const std::size_t shared = columns::shared_bytes(
      step.transform, grouped::cta_tiles(static_cast<int>(dtype_size(parts.dtype))),
      columns::max_warps, cluster);
  plan.add(amax ? Kernel::grouped_amax : Kernel::grouped_codes,
           {blocks, grouped::threads, shared, cluster}, reads, writes, step, parts.dtype);
}

void add_token_exponents(Plan& plan, const Operand& job) {
  constexpr int warps = exponent_rows;
  plan.takes({Kernel::token_exponents, "x is read first for its tokens' sizes", equalized});
  note_loads(plan, Kernel::token_exponents, not_vectors(rows_aligned(job.x), job.x.cols));
  plan.add(Kernel::token_exponents, {ceil_div(job.x.rows, warps), 32 * warps}, Buffer::x,
           Buffer::exponents, {}, job.x.dtype);
}

void add_groups(Plan& plan, const Operand& job) {
  const bool two_bytes = dtype_size(job.x.dtype) == 2;
  const Kernel kernel =
      plan.choose({{Kernel::group_quads, two_bytes ? "x is read one column a thread" : nullptr,
                    !two_bytes                ? of_dtype
                    : job.transform.equalized ? equalized
                    : !quads_aligned(job.x)   ? not_fours(job.x.cols)
                                              : Reason{}},
                   {Kernel::groups}});
  const std::int64_t blocks = ceil_div(job.x.cols, 128) * ceil_div(job.x.rows, int4_group);
  plan.add(kernel, {blocks, 128}, columns_read(job), codes_buffer(job), {}, job.x.dtype);
}

// Adds the operands that are made of one matrix, either of which may be null.
bool add_operands(Plan& plan, const DeviceFacts& facts, const Operand* rows,
                  const Operand* columns) {
  if (columns == nullptr) {
    if (rows != nullptr) add_rows(plan, *rows);
    return false;
  }
  if (columns->code == Storage::int8) {
    return rows == nullptr ? add_columns(plan, facts, *columns)
                           : add_rows_and_columns(plan, facts, *rows, *columns);
  }
  if (rows != nullptr) {
    const Reason why = add_rows_groups(plan, *rows, *columns);
    if (!why) return false;
    add_rows(plan, *rows);
    plan.takes({Kernel::rows_groups, "x is read again to be kept", why});
  }
  add_groups(plan, *columns);
  return false;
}

}  // namespace

bool add_operands(Plan& plan, const DeviceFacts& facts, const Work& work) {
  const Operands& all = work.operands;
  const Operand* const x = all.find(Source::x, Along::column);
  plan.scratch.repeat_scales = true;
  for (const Operand& operand : all) {
    plan.scratch.amax[&operand - all.begin()] = amax_words(facts, operand);
    if (operand.sum) plan.scratch.sums = operand.x.cols * most_sum_runs(facts, operand.x.rows);
  }
  GroupedParts parts(all);
  if (parts.any() && plan.takes({Kernel::grouped_codes, nullptr, why_not_grouped(facts, parts)})) {
    if (parts.weight.one_scale() || parts.gradient.one_scale() || parts.rows.one_scale()) {
      add_grouped(plan, parts, true);
      plan.takes({Kernel::grouped_codes, "%a is read first for its scale", one_scale});
    }
    add_grouped(plan, parts, false);
    return parts.gradient.operand != nullptr && parts.gradient.operand->sum;
  }
  if (x != nullptr && x->transform.equalized) add_token_exponents(plan, *x);
  add_zero(plan, all);
  bool summed = false;
  for (const Source source : {Source::gy, Source::x, Source::w}) {
    summed |=
        add_operands(plan, facts, all.find(source, Along::row), all.find(source, Along::column));
  }
  if (const Operand* const packed = all.find(Source::x, Along::column, From::groups)) {
    plan.add(Kernel::requantize, {packed->out.rows, 256}, Buffer::saved, codes_buffer(*packed));
  }
  return summed;
}

GenericGrid generic_grid(const Projection& p, std::int64_t cols, int extra) {
  GenericGrid grid{};
  grid.threads = p.block <= 64 ? 128 : 32;
  grid.shared_bytes = static_cast<std::size_t>((p.block + extra) * grid.threads) * sizeof(float);
  const std::int64_t cut = blocks_per_cut(p.rank);
  grid.run = round_up(std::max<std::int64_t>(1, 64 / p.block), cut);
  grid.blocks = ceil_div(cols, grid.threads) * RowRuns(p, grid.run).count();
  return grid;
}

}  // namespace hot::detail::plan

// Stage: integer product. b is packed once into panels (in the workspace); a is read in place. A
// task multiplies `gemm_task_rows` rows of a by all panels of a slice, tile by tile. Sums stay in
// registers for the whole contraction. The epilogue dequantises the tile.
#include <algorithm>

#include "cpu/backend.h"

namespace hot::detail {
namespace {

// Number of products of two INT8 values (-128 included) whose sum fits an INT32.
constexpr std::int64_t k_chunk = 131008;
constexpr int max_tile = gemm_task_rows * 32;
constexpr std::int64_t task_rows = gemm_task_rows;  // fit a core's L2 cache at K = 1024

std::int64_t chunks_of(std::int64_t k) { return std::max<std::int64_t>(1, ceil_div(k, k_chunk)); }

std::size_t aligned(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

// Guard that sets up and releases registers for the tiles of a task, if the kernels need it (AMX).
// Kernels that need it have tiles as high as a task.
class TaskRegisters {
 public:
  TaskRegisters(const GemmKernels& kernels, int rows) : kernels_(kernels) {
    if (kernels_.begin != nullptr) kernels_.begin(rows);
  }
  ~TaskRegisters() {
    if (kernels_.end != nullptr) kernels_.end();
  }
  TaskRegisters(const TaskRegisters&) = delete;
  TaskRegisters& operator=(const TaskRegisters&) = delete;

 private:
  const GemmKernels& kernels_;
};

// Epilogue of a tile: scales, accumulation, bias, output type.
struct Epilogue {
  const SimdKernels& simd;
  const GemmArgs& args;

  // Writes a tile. `acc` is [rows, gemm.nr]; the first `cols` columns are valid.
  void tile(std::int64_t m, std::int64_t n, int rows, int cols, const std::int32_t* acc) const {
    const MatrixOut& out = args.out;
    if (args.a_scale == nullptr) {
      auto* sums = static_cast<std::int32_t*>(out.data);
      for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < cols; ++j) {
          sums[(m + i) * out.row_stride + (n + j) * out.col_stride] = acc[i * simd.gemm.nr + j];
        }
      }
      return;
    }
    SumsTile tile{acc,
                  simd.gemm.nr,
                  rows,
                  cols,
                  args.a_scale + m * args.a_scale_step,
                  args.b_scale + n * args.b_scale_step,
                  args.a_scale_step,
                  args.b_scale_step,
                  args.inv_divisor,
                  args.bias == nullptr ? nullptr : args.bias + n,
                  args.accumulate};
    if (out.dtype == DType::f32 && out.col_stride == 1) {
      tile.out = static_cast<float*>(out.data) + m * out.row_stride + n;
      tile.out_ld = out.row_stride;
      return simd.dequantize(tile);
    }
    float values[max_tile];
    tile.out = values;
    tile.out_ld = simd.gemm.nr;
    if (args.accumulate) {
      for (int i = 0; i < rows; ++i) {
        load_row(simd, out.contents(), m + i, n, cols, values + i * simd.gemm.nr);
      }
    }
    simd.dequantize(tile);
    for (int i = 0; i < rows; ++i) {
      store_row(simd, values + i * simd.gemm.nr, m + i, n, cols, out);
    }
  }

  // Writes a row of sums whose contraction is too long for one INT32 sum.
  void long_row(std::int64_t m, std::int64_t n, int cols, const std::int64_t* acc) const {
    if (args.a_scale == nullptr) {
      std::int32_t narrow[64];
      for (int i = 0; i < cols; ++i) narrow[i] = static_cast<std::int32_t>(acc[i]);
      return tile(m, n, 1, cols, narrow);
    }
    float values[64], before[64];
    if (args.accumulate) load_row(simd, args.out.contents(), m, n, cols, before);
    const float a = args.a_scale[m * args.a_scale_step] * args.inv_divisor;
    for (int i = 0; i < cols; ++i) {
      const float b = args.b_scale[(n + i) * args.b_scale_step];
      values[i] = static_cast<float>(acc[i]) * b * a;
      if (args.accumulate) values[i] = before[i] + values[i];
      if (args.bias != nullptr) values[i] += args.bias[n + i];
    }
    store_row(simd, values, m, n, cols, args.out);
  }
};

}  // namespace

std::size_t CpuBackend::gemm_workspace(const Context& context, std::int64_t m, std::int64_t n,
                                       std::int64_t k) const {
  const SimdKernels& simd = simd_kernels(context.isa());
  const std::int64_t chunks = chunks_of(k);
  const auto panels = static_cast<std::size_t>(ceil_div(n, simd.gemm.nr) * chunks);
  const std::size_t packed = panels * simd.gemm.panel_bytes(std::min(k, k_chunk));
  const std::size_t bias = static_cast<std::size_t>(m * chunks) * sizeof(std::int32_t);
  const auto transposed = static_cast<std::size_t>(n * k);  // gemm_token
  return std::max(aligned(packed) + aligned(bias), transposed);
}

Product::Product(const Context& context, const GemmArgs& args, void* workspace)
    : simd_(simd_kernels(context.isa())), args_(args) {
  if (args.m == 0 || args.n == 0) return;
  if (args.k == 0) {  // empty operands may have a null pointer and any stride
    static constexpr std::int8_t nothing = 0;
    args_.a = args_.b = &nothing;
    args_.lda = args_.ldb = 0;
  }
  chunks_ = chunks_of(args.k);
  panels_ = ceil_div(args.n, simd_.gemm.nr);
  panel_bytes_ = simd_.gemm.panel_bytes(std::min(args.k, k_chunk));
  packed_ = static_cast<char*>(workspace);
  bias_ = reinterpret_cast<std::int32_t*>(
      packed_ + aligned(static_cast<std::size_t>(panels_ * chunks_) * panel_bytes_));
  // With few rows, tasks also split the panels into slices.
  row_tasks_ = ceil_div(args.m, task_rows);
  slices_ = std::min(panels_, ceil_div(std::int64_t{8} * context.threads(), row_tasks_));
}

void Product::add_bias(Phase& phase) const {
  if (simd_.gemm.row_bias != nullptr) phase.add<&Product::find_bias>(row_tasks_, *this);
}

char* Product::panel_at(std::int64_t panel, std::int64_t chunk) const {
  return packed_ + static_cast<std::size_t>(panel * chunks_ + chunk) * panel_bytes_;
}

std::int64_t Product::chunk_length(std::int64_t chunk) const {
  return std::min(k_chunk, args_.k - chunk * k_chunk);
}

void Product::pack(std::int64_t task) const {
  const std::int64_t panel = task / chunks_, chunk = task % chunks_;
  const std::int64_t n = panel * simd_.gemm.nr;
  simd_.gemm.pack(args_.b + n * args_.ldb + chunk * k_chunk, args_.ldb,
                  static_cast<int>(std::min<std::int64_t>(simd_.gemm.nr, args_.n - n)),
                  chunk_length(chunk), panel_at(panel, chunk));
}

void Product::find_bias(std::int64_t task) const {
  const std::int64_t first = task * task_rows;
  for (std::int64_t m = first; m < std::min(args_.m, first + task_rows); ++m) {
    for (std::int64_t chunk = 0; chunk < chunks_; ++chunk) {
      bias_[chunk * args_.m + m] =
          simd_.gemm.row_bias(args_.a + m * args_.lda + chunk * k_chunk, chunk_length(chunk));
    }
  }
}

void Product::multiply(std::int64_t task) const {
  const std::int64_t m = task / slices_ * task_rows, slice = task % slices_;
  tiles({m, std::min(args_.m, m + task_rows)},
        {panels_ * slice / slices_, panels_ * (slice + 1) / slices_});
}

void Product::tiles(Range rows, Range panels) const {
  const Epilogue epilogue{simd_, args_};
  alignas(64) std::int32_t acc[max_tile];
  const TaskRegisters registers(simd_.gemm, static_cast<int>(rows.end - rows.begin));
  for (std::int64_t panel = panels.begin; panel < panels.end; ++panel) {
    const std::int64_t n = panel * simd_.gemm.nr;
    const auto cols = static_cast<int>(std::min<std::int64_t>(simd_.gemm.nr, args_.n - n));
    for (std::int64_t row = rows.begin; row < rows.end; row += simd_.gemm.mr) {
      const auto count = static_cast<int>(std::min<std::int64_t>(simd_.gemm.mr, rows.end - row));
      if (chunks_ == 1) {
        simd_.gemm.tile(args_.a + row * args_.lda, args_.lda, count, args_.k, panel_at(panel, 0),
                        bias_ + row, acc);
        epilogue.tile(row, n, count, cols, acc);
        continue;
      }
      std::int64_t total[max_tile] = {};
      for (std::int64_t chunk = 0; chunk < chunks_; ++chunk) {
        simd_.gemm.tile(args_.a + row * args_.lda + chunk * k_chunk, args_.lda, count,
                        chunk_length(chunk), panel_at(panel, chunk), bias_ + chunk * args_.m + row,
                        acc);
        for (int i = 0; i < count * simd_.gemm.nr; ++i) total[i] += acc[i];
      }
      for (int i = 0; i < count; ++i)
        epilogue.long_row(row + i, n, cols, total + i * simd_.gemm.nr);
    }
  }
}

void CpuBackend::gemm(const Context& context, const GemmArgs& args, void* workspace) const {
  const Product product(context, args, workspace);
  Phase phase(context);
  product.add_panels(phase);
  product.add_bias(phase);
  phase.run();
  product.add_tiles(phase);
  phase.run();
}

void CpuBackend::gemm_int4(const Context& context, const GemmArgs& packed, std::int8_t* a,
                           std::int8_t* b, void* workspace) const {
  const std::int64_t m = packed.m, n = packed.n, k = packed.k, bytes = ceil_div(k, 2);
  if (k > 0) {
    unpack_int4(context, {packed.a, DType::i4x2, m, bytes, packed.lda, 1},
                {a, DType::i8, m, k, k, 1});
    unpack_int4(context, {packed.b, DType::i4x2, n, bytes, packed.ldb, 1},
                {b, DType::i8, n, k, k, 1});
  }
  GemmArgs args = packed;
  args.a = a;
  args.b = b;
  args.lda = args.ldb = k;
  gemm(context, args, workspace);
}

// Product in fp32 for gw_scale token. b is transposed into the workspace first, so that each k of a
// result row reads one contiguous row.
void gemm_token(const Context& context, const GemmArgs& args, void* workspace) {
  if (args.m == 0 || args.n == 0) return;
  const SimdKernels& simd = simd_kernels(context.isa());
  auto* transposed = static_cast<std::int8_t*>(workspace);
  constexpr std::int64_t tile = 64;
  context.pool()->run(ceil_div(args.k, tile), [&](std::int64_t task) {
    const std::int64_t k_end = std::min(args.k, (task + 1) * tile);
    for (std::int64_t n = 0; n < args.n; ++n) {
      for (std::int64_t k = task * tile; k < k_end; ++k) {
        transposed[k * args.n + n] = args.b[n * args.ldb + k];
      }
    }
  });
  constexpr std::int64_t width = 512;
  const std::int64_t slices = ceil_div(args.n, width);
  context.pool()->run(args.m * slices, [&](std::int64_t task) {
    const std::int64_t m = task / slices, n = task % slices * width;
    const std::int64_t count = std::min(width, args.n - n);
    float acc[width] = {}, before[width];
    for (std::int64_t k = 0; k < args.k; ++k) {
      const float a = static_cast<float>(args.a[m * args.lda + k]) * args.a_scale[k];
      simd.axpy(a, transposed + k * args.n + n, count, acc);
    }
    if (args.accumulate) load_row(simd, args.out.contents(), m, n, count, before);
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = acc[i] * args.b_scale[(n + i) * args.b_scale_step] * args.inv_divisor;
      acc[i] = args.accumulate ? before[i] + value : value;
    }
    store_row(simd, acc, m, n, count, args.out);
  });
}

}  // namespace hot::detail

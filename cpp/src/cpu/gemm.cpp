// Stage: integer product. b is packed once into panels of gemm_nr rows (workspace); a is read in
// place. A task multiplies `rows_per_task` rows of a by all panels of a slice, tile by tile. Sums
// stay in registers for the whole contraction; the epilogue dequantises the tile.
#include <algorithm>
#include <cstring>

#include "cpu/backend.h"

namespace hot::detail {
namespace {

// An INT32 holds the sum of this many products of any two INT8 values, -128 included.
constexpr std::int64_t k_chunk = 131008;
constexpr int max_tile = 32 * 32;
constexpr std::int64_t rows_per_task = 96;  // 96 rows of a with K = 1024 stay in a core's L2

std::int64_t chunks_of(std::int64_t k) { return std::max<std::int64_t>(1, ceil_div(k, k_chunk)); }

std::size_t aligned(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

// The epilogue of a tile's row: scales, accumulation, output type.
struct Epilogue {
  const SimdKernels& simd;
  const GemmArgs& args;

  void row(std::int64_t m, std::int64_t n, std::int64_t count, const std::int32_t* acc) const {
    if (args.a_scale == nullptr) {
      auto* out = static_cast<std::int32_t*>(args.out.data);
      for (std::int64_t i = 0; i < count; ++i) {
        out[m * args.out.row_stride + (n + i) * args.out.col_stride] = acc[i];
      }
      return;
    }
    float before[64], rounded[64];
    const bool direct = args.out.dtype == DType::f32 && args.out.col_stride == 1;
    float* const values =
        direct ? static_cast<float*>(args.out.data) + m * args.out.row_stride + n : rounded;
    if (args.accumulate && !direct) load_row(simd, current(), m, n, count, before);
    simd.dequantize(acc, count, args.b_scale + n * args.b_scale_step, args.b_scale_step,
                    args.a_scale[m * args.a_scale_step] * args.inv_divisor,
                    !args.accumulate ? nullptr
                    : direct         ? values
                                     : before,
                    values);
    add_bias(n, count, values);
    if (!direct) store_row(simd, values, m, n, count, args.out);
  }

  // For contractions too long for one INT32 sum.
  void long_row(std::int64_t m, std::int64_t n, std::int64_t count, const std::int64_t* acc) const {
    std::int32_t narrow[64];
    if (args.a_scale == nullptr) {
      for (std::int64_t i = 0; i < count; ++i) narrow[i] = static_cast<std::int32_t>(acc[i]);
      return row(m, n, count, narrow);
    }
    float values[64], before[64];
    if (args.accumulate) load_row(simd, current(), m, n, count, before);
    const float a = args.a_scale[m * args.a_scale_step] * args.inv_divisor;
    for (std::int64_t i = 0; i < count; ++i) {
      const float b = args.b_scale[(n + i) * args.b_scale_step];
      values[i] = static_cast<float>(acc[i]) * b * a;
      if (args.accumulate) values[i] = before[i] + values[i];
    }
    add_bias(n, count, values);
    store_row(simd, values, m, n, count, args.out);
  }

  void add_bias(std::int64_t n, std::int64_t count, float* values) const {
    if (args.bias == nullptr) return;
    for (std::int64_t i = 0; i < count; ++i) values[i] += args.bias[n + i];
  }

  MatrixIn current() const {
    return {args.out.data, args.out.dtype,      args.out.rows,
            args.out.cols, args.out.row_stride, args.out.col_stride};
  }
};

}  // namespace

std::size_t CpuBackend::gemm_workspace(const Context& context, std::int64_t m, std::int64_t n,
                                       std::int64_t k) const {
  const SimdKernels& simd = simd_kernels(context.isa());
  const std::int64_t chunks = chunks_of(k);
  const auto panels = static_cast<std::size_t>(ceil_div(n, simd.gemm_nr) * chunks);
  const std::size_t packed = panels * simd.gemm_panel_bytes(std::min(k, k_chunk));
  const std::size_t bias = static_cast<std::size_t>(m * chunks) * sizeof(std::int32_t);
  const auto transposed = static_cast<std::size_t>(n * k);  // gemm_token
  return std::max(aligned(packed) + aligned(bias), transposed);
}

void CpuBackend::gemm(const Context& context, const GemmArgs& given, void* workspace) const {
  GemmArgs args = given;
  if (args.m == 0 || args.n == 0) return;
  if (args.k == 0) {  // empty operands may have no memory and any stride
    static constexpr std::int8_t nothing = 0;
    args.a = args.b = &nothing;
    args.lda = args.ldb = 0;
  }
  const SimdKernels& simd = simd_kernels(context.isa());
  const std::int64_t chunks = chunks_of(args.k);
  const std::int64_t panels = ceil_div(args.n, simd.gemm_nr);
  const std::size_t panel_bytes = simd.gemm_panel_bytes(std::min(args.k, k_chunk));
  auto* packed = static_cast<char*>(workspace);
  auto* bias = reinterpret_cast<std::int32_t*>(
      packed + aligned(static_cast<std::size_t>(panels * chunks) * panel_bytes));
  const auto panel_at = [&](std::int64_t panel, std::int64_t chunk) {
    return packed + static_cast<std::size_t>(panel * chunks + chunk) * panel_bytes;
  };
  const auto chunk_length = [&](std::int64_t chunk) {
    return std::min(k_chunk, args.k - chunk * k_chunk);
  };

  const std::int64_t bias_tasks = ceil_div(args.m, rows_per_task);
  context.pool()->run(panels * chunks + bias_tasks, [&](std::int64_t task) {
    if (task < panels * chunks) {
      const std::int64_t panel = task / chunks, chunk = task % chunks;
      const std::int64_t n = panel * simd.gemm_nr;
      simd.gemm_pack(args.b + n * args.ldb + chunk * k_chunk, args.ldb,
                     static_cast<int>(std::min<std::int64_t>(simd.gemm_nr, args.n - n)),
                     chunk_length(chunk), panel_at(panel, chunk));
      return;
    }
    const std::int64_t first = (task - panels * chunks) * rows_per_task;
    for (std::int64_t m = first; m < std::min(args.m, first + rows_per_task); ++m) {
      for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
        bias[chunk * args.m + m] =
            simd.gemm_row_bias(args.a + m * args.lda + chunk * k_chunk, chunk_length(chunk));
      }
    }
  });

  // With few rows, tasks also split the panels.
  const std::int64_t row_tasks = ceil_div(args.m, rows_per_task);
  const std::int64_t slices =
      std::min(panels, ceil_div(std::int64_t{8} * context.threads(), row_tasks));
  const Epilogue epilogue{simd, args};
  context.pool()->run(row_tasks * slices, [&](std::int64_t task) {
    const std::int64_t m_first = task / slices * rows_per_task;
    const std::int64_t m_end = std::min(args.m, m_first + rows_per_task);
    const std::int64_t slice = task % slices;
    alignas(64) std::int32_t acc[max_tile];
    std::int64_t total[max_tile];
    for (std::int64_t panel = panels * slice / slices; panel < panels * (slice + 1) / slices;
         ++panel) {
      const std::int64_t n = panel * simd.gemm_nr;
      const std::int64_t count = std::min<std::int64_t>(simd.gemm_nr, args.n - n);
      for (std::int64_t m = m_first; m < m_end; m += simd.gemm_mr) {
        const auto rows = static_cast<int>(std::min<std::int64_t>(simd.gemm_mr, m_end - m));
        if (chunks == 1) {
          simd.gemm_tile(args.a + m * args.lda, args.lda, rows, args.k, panel_at(panel, 0),
                         bias + m, acc);
          for (int i = 0; i < rows; ++i) epilogue.row(m + i, n, count, acc + i * simd.gemm_nr);
          continue;
        }
        std::fill(total, total + max_tile, 0);
        for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
          simd.gemm_tile(args.a + m * args.lda + chunk * k_chunk, args.lda, rows,
                         chunk_length(chunk), panel_at(panel, chunk), bias + chunk * args.m + m,
                         acc);
          for (int i = 0; i < rows * simd.gemm_nr; ++i) total[i] += acc[i];
        }
        for (int i = 0; i < rows; ++i) epilogue.long_row(m + i, n, count, total + i * simd.gemm_nr);
      }
    }
  });
}

void CpuBackend::gemm_int4(const Context& context, const GemmArgs& packed, std::int8_t* a,
                           std::int8_t* b, void* workspace) const {
  const std::int64_t m = packed.m, n = packed.n, k = packed.k, bytes = ceil_div(k, 2);
  if (m > 0 && k > 0) {
    unpack_int4(context, {packed.a, DType::i4x2, m, bytes, packed.lda, 1},
                {a, DType::i8, m, k, k, 1});
  }
  if (n > 0 && k > 0) {
    unpack_int4(context, {packed.b, DType::i4x2, n, bytes, packed.ldb, 1},
                {b, DType::i8, n, k, k, 1});
  }
  GemmArgs args = packed;
  args.a = a;
  args.b = b;
  args.lda = args.ldb = k;
  gemm(context, args, workspace);
}

// b is transposed first (workspace): each k of a result row then reads one contiguous row.
void gemm_token(const Context& context, const GemmTokenArgs& args, void* workspace) {
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
      const float a = static_cast<float>(args.a[m * args.lda + k]) * args.k_scale[k];
      simd.axpy(a, transposed + k * args.n + n, count, acc);
    }
    if (args.accumulate) {
      load_row(simd,
               {args.out.data, args.out.dtype, args.out.rows, args.out.cols, args.out.row_stride,
                args.out.col_stride},
               m, n, count, before);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = acc[i] * args.b_scale[(n + i) * args.b_scale_step] * args.inv_divisor;
      acc[i] = args.accumulate ? before[i] + value : value;
    }
    store_row(simd, acc, m, n, count, args.out);
  });
}

}  // namespace hot::detail

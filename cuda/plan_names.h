// Lists of the kernels and of the arrays in plans: enumerators, names, properties.
#pragma once

// Kernels: X(enumerator, __global__ function, its file, true if it may start before the previous
// kernel ends and waits at its own end). The mma.sync tiles have the order of gemm_sm80_plan.h.
#define HOT_KERNELS(X)                                                                    \
  X(zero, "memset", "backend.cpp", false)                                                 \
  X(rows16, "rows16_kernel", "quantize_rows.cu", false)                                   \
  X(rows, "rows_kernel", "quantize_rows.cu", false)                                       \
  X(rows_column_amax, "rows_column_amax_kernel", "quantize_rows_column_amax.cu", false)   \
  X(rows_groups, "rows_groups_kernel", "quantize_rows_groups.cu", false)                  \
  X(columns_one_pass, "columns_one_pass_kernel", "quantize_columns.cu", true)             \
  X(column_amax, "column_amax_kernel", "quantize_columns.cu", true)                       \
  X(column_codes, "column_codes_kernel", "quantize_columns.cu", true)                     \
  X(generic_amax, "generic_columns_kernel, amax", "quantize_columns_generic.cu", false)   \
  X(generic_codes, "generic_columns_kernel, codes", "quantize_columns_generic.cu", false) \
  X(finish_scales, "finish_scales_kernel", "quantize.cu", false)                          \
  X(grouped_amax, "quantize_grouped_kernel, amax", "quantize_grouped.cu", false)          \
  X(grouped_codes, "quantize_grouped_kernel", "quantize_grouped.cu", false)               \
  X(token_exponents, "token_exponents_kernel", "int4_activation.cu", false)               \
  X(groups, "groups_kernel", "int4_activation.cu", false)                                 \
  X(group_quads, "group_quads_kernel", "int4_activation.cu", false)                       \
  X(requantize, "requantize_kernel", "int4_activation.cu", true)                          \
  X(partial_sum, "partial_sum_kernel", "bias.cu", false)                                  \
  X(final_sum, "final_sum_kernel", "bias.cu", true)                                       \
  X(fill_zero, "fill_zero_kernel", "bias.cu", false)                                      \
  X(broadcast_scale, "broadcast_scale_kernel", "gemm.cu", false)                          \
  X(widen, "widen_kernel", "gemm.cu", false)                                              \
  X(unpack, "unpack_kernel", "pack.cu", false)                                            \
  X(gemm_small, "gemm_small_kernel", "gemm_small.cu", false)                              \
  X(wgmma_128x128, "wgmma 128x128", "gemm_int8_sm90.cuh", false)                          \
  X(wgmma_128x192, "wgmma 128x192", "gemm_int8_sm90.cuh", false)                          \
  X(wgmma_128x256, "wgmma 128x256", "gemm_int8_sm90.cuh", false)                          \
  X(wgmma_stream_k, "wgmma stream-K", "gemm_int8_sm90.cuh", false)                        \
  X(mma_128x256x128, "tile_kernel 128x256x128", "gemm_sm80.cuh", false)                   \
  X(mma_256x128x128, "tile_kernel 256x128x128", "gemm_sm80.cuh", false)                   \
  X(mma_128x256x64, "tile_kernel 128x256x64", "gemm_sm80.cuh", false)                     \
  X(mma_128x128x64, "tile_kernel 128x128x64", "gemm_sm80.cuh", false)                     \
  X(mma_64x64x64, "tile_kernel 64x64x64", "gemm_sm80.cuh", false)                         \
  X(mma_any, "tile_kernel any", "gemm_sm80.cuh", false)                                   \
  X(mma_fixup, "fixup_kernel", "gemm_sm80.cuh", false)                                    \
  X(token, "token_kernel", "gemm_sm80.cu", false)

// Arrays that steps read and write: X(enumerator, name in explain, true if in the workspace). The
// buffer all_scratch holds partial sums of g_b alone, from the start of the workspace. Operands of
// a forward product are x_rows and weight_rows, or forward_x and forward_w from quantize_forward_*.
#define HOT_BUFFERS(X)                        \
  X(gy, "g_y", false)                         \
  X(w, "w", false)                            \
  X(x, "x", false)                            \
  X(saved, "saved x", false)                  \
  X(exponents, "sizes of tokens", false)      \
  X(quantized_w, "quantised w", false)        \
  X(gx, "g_x", false)                         \
  X(gw, "g_w", false)                         \
  X(gb, "g_b", false)                         \
  X(a, "a", false)                            \
  X(b, "b", false)                            \
  X(out, "out", false)                        \
  X(gy_rows, "g_y codes (rows)", true)        \
  X(columns, "g_y codes (columns)", true)     \
  X(weight, "w codes", true)                  \
  X(activation, "x codes", true)              \
  X(rows_amax, "largest of rows", true)       \
  X(columns_amax, "largest of columns", true) \
  X(weight_amax, "largest of w", true)        \
  X(sums, "partial sums", true)               \
  X(all_scratch, "partial sums", false)       \
  X(broadcast_a, "scales of a", true)         \
  X(broadcast_b, "scales of b", true)         \
  X(stream_k, "sums of shared tiles", true)   \
  X(unpacked_a, "a as INT8", false)           \
  X(unpacked_b, "b as INT8", false)           \
  X(bias, "bias", false)                      \
  X(y, "y", false)                            \
  X(x_rows, "x codes (rows)", true)           \
  X(weight_rows, "w codes (rows)", true)      \
  X(forward_x, "quantised x", false)          \
  X(forward_w, "quantised w", false)          \
  X(wide_bias, "bias as fp32", true)

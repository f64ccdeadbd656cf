// Integer products of a warp (mma.sync, from sm_80 on): fragments, multiply-add, dequantisation.
#pragma once

namespace hot::detail {

// Loads four 8 x 8 matrices of 16-bit elements, each 8 rows of 16 bytes. Lane l passes the address
// of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

struct MmaInt8 {
  __device__ static void run(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

// Multiply-add of packed INT4: the fragments have the same words, with twice as many values.
struct MmaInt4 {
  __device__ static void run(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

// Dequantises a sum with three roundings in this order (docs/numerics.md, "Integer GEMM").
__device__ inline float dequantised(float acc, float a_scale, float b_scale, float inv_divisor) {
  return acc * b_scale * (a_scale * inv_divisor);
}

}  // namespace hot::detail

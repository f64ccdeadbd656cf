// Butterflies (a, b) -> (a + b, a - b) of the FWHT, in registers and across lanes. Distances rise:
// 1, 2, 4, ... Every addition rounds, so this order determines the bits (docs/numerics.md, "FWHT").
#pragma once

namespace hot::detail {

// Butterflies between elements of a register array, at distances Begin, 2 Begin, ... below End.
template <int Begin, int End, int Size>
__device__ void butterfly(float (&v)[Size]) {
#pragma unroll
  for (int h = Begin; h < End; h *= 2) {
#pragma unroll
    for (int i = 0; i < Size; ++i) {
      if ((i & h) == 0) {
        const float a = v[i], b = v[i + h];
        v[i] = a + b;
        v[i + h] = a - b;
      }
    }
  }
}

// Butterflies between lanes at distance h. All lanes of the warp take part. v * -1 is exact, so the
// fused multiply-add rounds once, like the addition that it replaces.
template <int Size>
__device__ void butterfly_lanes_at(float (&v)[Size], unsigned lane, unsigned h) {
  const float sign = (lane & h) != 0 ? -1.0F : 1.0F;
#pragma unroll
  for (int i = 0; i < Size; ++i) {
    v[i] = __fmaf_rn(v[i], sign, __shfl_xor_sync(0xffffffffU, v[i], static_cast<int>(h)));
  }
}

// Butterflies between lanes at distances 1, 2, ... below Lanes.
template <int Lanes, int Size>
__device__ void butterfly_lanes(float (&v)[Size], unsigned lane) {
#pragma unroll
  for (unsigned h = 1; h < Lanes; h *= 2) butterfly_lanes_at(v, lane, h);
}

// Sum in the order of row 0 of an FWHT.
template <int Size>
__device__ float tree_sum(const float (&v)[Size]) {
  float total[Size];
#pragma unroll
  for (int t = 0; t < Size; ++t) total[t] = v[t];
#pragma unroll
  for (int h = 1; h < Size; h *= 2) {
#pragma unroll
    for (int t = 0; t < Size; t += 2 * h) total[t] = total[t] + total[t + h];
  }
  return total[0];
}

}  // namespace hot::detail

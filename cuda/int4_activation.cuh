// Device code of int4_activation.cu: x from INT4 back to INT8. A header, because
// quantize_grouped.cu runs it beside other work in one launch.
#pragma once

#include <cstdint>

#include "cuda/device/rounding.cuh"
#include "kernels.h"

namespace hot::detail {

// INT4 value j of 16, as a float: 8 more than the value, below the bits of 2^23, less 2^23 + 8.
__device__ inline float nibble(const uint2& packed, int j) {
  const std::uint32_t word = (j < 8 ? packed.x : packed.y) >> (j % 2 == 0 ? 0 : 4);
  const std::uint32_t biased = (word & 0x0f0f0f0fU) ^ 0x08080808U;
  const std::uint32_t bits = __byte_perm(biased, 0x4b000000U, 0x7650U | (j % 8 / 2));
  return __uint_as_float(bits) - 8388616.0F;
}

struct RequantizeArgs {
  const std::uint8_t* packed;
  std::int64_t row_bytes;
  const std::uint16_t* scale;
  std::int64_t groups;
  Operand out;
  DeviceKey key;
};

// Thread t of the T that share channel `row`; `all_max` returns the largest of their values.
template <Rounding rounding, class AllMax>
__device__ __forceinline__ void requantize_channel(const RequantizeArgs& args, std::int64_t row,
                                                   int t, int T, const AllMax& all_max) {
  const int row_blocks = static_cast<int>(args.out.k_padded / 16);
  const auto* from = reinterpret_cast<const uint2*>(args.packed + row * args.row_bytes);
  const DeviceOffset offset = warp_offset<rounding>(args.key);
  const std::uint16_t* const scales = args.scale + row * args.groups;
  std::uint32_t largest = 0;  // scales are positive or NaN: the pattern orders them
  for (std::int64_t g = t; g < args.groups; g += T) {
    largest = max(largest, std::uint32_t{scales[g]});
  }
  largest = all_max(largest);
  const float amax = 7.0F * __uint_as_float(largest << 16);
  const DeviceScale s = device_scale(abs_bits(amax), 8);
  if (t == 0) args.out.scale[row] = s.scale;
  const std::uint64_t first =
      static_cast<std::uint64_t>(row) * static_cast<std::uint64_t>(row_blocks);
  auto* to = reinterpret_cast<uint4*>(args.out.codes + row * args.out.k_padded);
  for (int b = t; b < row_blocks; b += T) {
    uint4 codes = make_uint4(0, 0, 0, 0);
    if (s.keep) {
      const uint2 packed = from[b];
      const float factor = __uint_as_float(std::uint32_t{scales[b / 4]} << 16) * s.inv;
      codes = round_group<rounding>([&](int j) { return nibble(packed, j); }, UniformScale{factor},
                                    args.key, offset, first + static_cast<std::uint64_t>(b), 8);
    }
    to[b] = codes;
  }
}

// ---- host (int4_activation.cu)

RequantizeArgs requantize_args(const Context&, const GroupsJob&);

}  // namespace hot::detail

// Words of the Philox key and counter that are the same for a whole operand.
#pragma once

#include <cstdint>

namespace hot::detail {

// Rounds of Philox4x32: the smallest number that passes BigCrush (Salmon et al. 2011, table 2).
inline constexpr int philox_rounds = 7;

// Key and purpose of random numbers (docs/numerics.md, "Random bits").
struct RandomKey {
  std::uint32_t seed_low = 0, seed_high = 0;
  std::uint32_t stream_purpose = 0;  // upper 16 bits of c1
  std::uint32_t offset_low = 0, offset_high = 0;
};

}  // namespace hot::detail

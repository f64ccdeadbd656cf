// Codes of weight_int4 in integers, for the CPU, CUDA kernels and the check of their arguments.
#pragma once

#include <cstddef>
#include <cstdint>

#include "operands.h"

namespace hot::detail {
namespace weight_int4 {
namespace {  // compiled for several instruction sets, as scalar.h

// Values in units of the row's scale have this many units of fixed point: 127 of them are the
// largest code of INT8.
inline constexpr int unit = 64;
// Largest step. A step of 16 is two INT8 codes, the distance of neighbouring INT4 codes.
inline constexpr int max_step = 135;
// Steps that are tried: 68/64 to 37/64 of the step that reaches the group's largest value.
inline constexpr int candidates = 32;

// INT8 code of INT4 code `code` (-8 to 7): (2 code + 1) step / 16, halves away from zero. The step
// is at most max_step.
constexpr int expanded(int code, int step) {
  const int odd = 2 * code + 1;
  return odd < 0 ? -((8 - odd * step) >> 4) : (8 + odd * step) >> 4;
}

// Candidate `index` for a group whose largest magnitude in fixed point is `amax`. They descend.
constexpr int candidate(int amax, int index) {
  const int full = (amax + 59) / 60;  // smallest step that reaches amax
  const int step = (full * (68 - index) + 32) >> 6;
  return step < max_step ? step : max_step;
}

// Factor by which values in fixed point become codes; `nearest` finds the code.
constexpr float code_factor(int step) {
  return step == 0 ? 0.0F : 1.0F / static_cast<float>(8 * step);
}

// Code of a value in fixed point.
constexpr int nearest(int value, float factor) {
  const float position = static_cast<float>(value) * factor + 8.0F;
  const float limited = position < 0.0F ? 0.0F : position > 15.0F ? 15.0F : position;
  return static_cast<int>(limited) - 8;
}

}  // namespace
}  // namespace weight_int4

// A weight in INT4, in its buffer. Rows of packed codes have 16-byte alignment.
struct Int4Weight {
  std::uint8_t* packed;  // [rows, k_padded / 2], low nibble first
  float* scale;          // [rows]
  std::uint8_t* steps;   // [rows, k_padded / group]
  std::int64_t rows, k_padded;
  int group;
};
inline std::size_t int4_weight_bytes(std::int64_t rows, std::int64_t k_padded, int group) {
  return static_cast<std::size_t>(rows) *
         static_cast<std::size_t>(k_padded / 2 + std::int64_t{sizeof(float)} + k_padded / group);
}
inline Int4Weight int4_weight(void* data, std::int64_t rows, std::int64_t k_padded, int group) {
  auto* const packed = static_cast<std::uint8_t*>(data);
  auto* const scale = reinterpret_cast<float*>(packed + rows * (k_padded / 2));
  return {packed, scale, reinterpret_cast<std::uint8_t*>(scale + rows), rows, k_padded, group};
}

}  // namespace hot::detail

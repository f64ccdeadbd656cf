// Stage: symmetric quantisation to INT8 and INT4.
#pragma once

#include <cstdint>

#include "hot/api.h"
#include "hot/context.h"
#include "hot/tensor.h"

namespace hot {

/// Group of values that share a scale: the whole tensor, a token (row) or a channel (column).
enum class Granularity : std::uint8_t { tensor, token, channel };
enum class Rounding : std::uint8_t { nearest, stochastic, pseudo_stochastic };

HOT_API const char* granularity_name(Granularity granularity) noexcept;
HOT_API const char* rounding_name(Rounding rounding) noexcept;

struct QuantSpec {
  int bits = 8;  // 8: codes in [-127, 127]; 4: codes in [-7, 7]
  Granularity scale = Granularity::token;
  Rounding rounding = Rounding::stochastic;
};

/// Number of scales of an [R, C] matrix: 1, R or C.
HOT_API std::int64_t scale_count(std::int64_t rows, std::int64_t cols, Granularity scale);

/// Computes q = round(x / scale), with scale = amax / 127 (8 bits) or amax / 7 (4 bits).
///
/// @param x      [R, C], f32, f16 or bf16, any strides.
/// @param q      i8 [R, C], or i4x2 [R, ceil(C/2)] for 4 bits; rows contiguous.
/// @param scale  f32 vector of scale_count(R, C) elements.
/// `stochastic` uses the context's key. A group with NaN or Inf gets scale NaN and codes 0.
/// docs/numerics.md, "Scales", "Rounding".
HOT_API void quantize(const Context& context, const ConstTensorView& x, const QuantSpec& spec,
                      const TensorView& q, const TensorView& scale);

/// Computes out = q * scale, [R, C], f32, f16 or bf16. `scale` has scale_count elements.
HOT_API void dequantize(const Context& context, const ConstTensorView& q,
                        const ConstTensorView& scale, Granularity granularity,
                        const TensorView& out);

}  // namespace hot

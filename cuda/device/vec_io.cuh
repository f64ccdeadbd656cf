// Conversion of the three float types to and from fp32, single elements or vectors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "hot/tensor.h"

namespace hot::detail {

// Type tags: layout of elements in memory. `Words` is the number of 32-bit words of a vector.
struct F32 {
  static constexpr int size = 4;
  __device__ static float load(const void* p, std::int64_t i) {
    return static_cast<const float*>(p)[i];
  }
  __device__ static void store(void* p, std::int64_t i, float v) { static_cast<float*>(p)[i] = v; }
  template <int V>
  __device__ static void unpack(const unsigned (&word)[V], float* v) {
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = __uint_as_float(word[i]);
  }
  template <int V>
  __device__ static void pack(const float* v, unsigned (&word)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) word[i] = __float_as_uint(v[i]);
  }
};

// Elements of a 16-bit type; a word holds two.
template <class Scalar>
struct Float16 {
  static constexpr int size = 2;
  __device__ static float load(const void* p, std::int64_t i) {
    return static_cast<float>(static_cast<const Scalar*>(p)[i]);
  }
  __device__ static void store(void* p, std::int64_t i, float v) {
    static_cast<Scalar*>(p)[i] = Scalar(v);
  }
};

struct F16 : Float16<__half> {
  template <int Words>
  __device__ static void unpack(const unsigned (&word)[Words], float* v) {
#pragma unroll
    for (int i = 0; i < Words; ++i) {
      v[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(word[i])));
      v[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(word[i] >> 16)));
    }
  }
  template <int Words>
  __device__ static void pack(const float* v, unsigned (&word)[Words]) {
#pragma unroll
    for (int i = 0; i < Words; ++i) {
      const __half2 pair = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
      word[i] = static_cast<unsigned>(__half_as_ushort(__high2half(pair))) << 16 |
                __half_as_ushort(__low2half(pair));
    }
  }
};

struct BF16 : Float16<__nv_bfloat16> {
  template <int Words>
  __device__ static void unpack(const unsigned (&word)[Words], float* v) {
#pragma unroll
    for (int i = 0; i < Words; ++i) {
      v[2 * i] = __uint_as_float(word[i] << 16);
      v[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000U);
    }
  }
  template <int Words>
  __device__ static void pack(const float* v, unsigned (&word)[Words]) {
#pragma unroll
    for (int i = 0; i < Words; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
      word[i] = static_cast<unsigned>(__bfloat16_as_ushort(__high2bfloat16(pair))) << 16 |
                __bfloat16_as_ushort(__low2bfloat16(pair));
    }
  }
};

// Calls f with the tag of a type, on the host or a device. A kernel's branch is uniform. One kernel
// can therefore serve all nine pairs of types at the cost of two of these branches.
template <class F>
constexpr void with_dtype(DType dtype, const F& f) {
  if (dtype == DType::f32) {
    f(F32{});
  } else if (dtype == DType::f16) {
    f(F16{});
  } else {
    f(BF16{});
  }
}

// Calls f with a value from First to Last as a compile-time constant. A value beyond Last counts as
// Last.
template <auto First, auto Last, class F>
constexpr auto with_constant(decltype(First) value, const F& f) {
  if constexpr (First < Last) {
    constexpr auto next = static_cast<decltype(First)>(static_cast<int>(First) + 1);
    if (value != First) return with_constant<next, Last>(value, f);
  }
  return f(std::integral_constant<decltype(First), First>{});
}

// Loads 4 or 8 aligned bytes, or a multiple of 16 aligned to 16. Not through the read-only cache:
// the output may be the input.
template <int Words>
__device__ void load_words(const void* p, unsigned (&word)[Words]) {
  if constexpr (Words == 1) {
    word[0] = *static_cast<const unsigned*>(p);
  } else if constexpr (Words == 2) {
    const uint2 w = *static_cast<const uint2*>(p);
    word[0] = w.x, word[1] = w.y;
  } else {
    static_assert(Words % 4 == 0);
#pragma unroll
    for (int i = 0; i < Words; i += 4) {
      const uint4 w = static_cast<const uint4*>(p)[i / 4];
      word[i] = w.x, word[i + 1] = w.y, word[i + 2] = w.z, word[i + 3] = w.w;
    }
  }
}

template <int Words>
__device__ void store_words(const unsigned (&word)[Words], void* p) {
  if constexpr (Words == 1) {
    *static_cast<unsigned*>(p) = word[0];
  } else if constexpr (Words == 2) {
    *static_cast<uint2*>(p) = make_uint2(word[0], word[1]);
  } else {
    static_assert(Words % 4 == 0);
#pragma unroll
    for (int i = 0; i < Words; i += 4) {
      static_cast<uint4*>(p)[i / 4] = make_uint4(word[i], word[i + 1], word[i + 2], word[i + 3]);
    }
  }
}

}  // namespace hot::detail

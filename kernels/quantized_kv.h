// Keys and values in eight bits, as layer_cache.py describes them: from heads of fp32 to them, and back.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "simd.h"

namespace headrace {

// float8_e4m3fn: sign, four bits of exponent, three of fraction.
struct float8 {
  uint8_t bits;
};

typedef int8_t SignedBytes __attribute__((vector_size(kLanes)));
typedef int16_t Shorts __attribute__((vector_size(kLanes * 2)));

// The largest number, and the factor by which what `load` returns is too small: the bits of a float8, moved into a
// float16, stand for 2^-8 of it.
template <typename Cache>
struct EightBits {
  static constexpr bool kIs = false;
  static constexpr float kUnit = 1.0f;
};
template <>
struct EightBits<int8_t> {
  static constexpr bool kIs = true;
  static constexpr float kLargest = 127.0f, kUnit = 1.0f;
};
template <>
struct EightBits<float8> {
  static constexpr bool kIs = true;
  static constexpr float kLargest = 448.0f, kUnit = 256.0f;
};

// Conversions that GCC 12 makes of `__builtin_convertvector` element by element.
#if defined(__AVX512F__)
inline Ints widen_bytes(const void* source) { return (Ints)_mm512_cvtepi8_epi32(load_raw<__m128i>(source)); }
inline Floats widen_halves(Ints halves) { return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)halves)); }
#elif defined(__AVX2__) && defined(__F16C__)
inline Ints widen_bytes(const void* source) { return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)source)); }
inline Floats widen_halves(Ints halves) {
  const __m256i low = _mm256_and_si256((__m256i)halves, _mm256_set1_epi32(0xffff));
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  return (Floats)_mm256_cvtph_ps(packed);
}
#else
inline Ints widen_bytes(const void* source) { return __builtin_convertvector(load_raw<SignedBytes>(source), Ints); }
inline Floats widen_halves(Ints halves) {
  return __builtin_convertvector((Float16s)__builtin_convertvector(halves, Shorts), Floats);
}
#endif

inline Floats load(const int8_t* source) { return __builtin_convertvector(widen_bytes(source), Floats); }

inline Floats load(const float8* source) { return widen_halves((widen_bytes(source) << 7) & 0xbfff); }

// Rounds to the nearest integer, to the even one of two: fp32 has nothing between integers from 2^23 to 2^24.
inline Ints round_to_integers(Floats x) { return __builtin_convertvector(x + 12582912.0f - 12582912.0f, Ints); }

inline void store(int8_t* target, Floats x) {
  const SignedBytes bytes = __builtin_convertvector(round_to_integers(x), SignedBytes);
  std::memcpy(target, &bytes, sizeof(bytes));
}

inline void store(float8* target, Floats x) {
  const Ints bits = (Ints)x, magnitude = bits & 0x7fffffff;
  const Ints rounded = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
  // Below 2^-6 a step is 2^-9, as it is from 2^14 on in fp32.
  const Ints small = (Ints)((Floats)magnitude + 16384.0f) - 0x46800000;
  const Ints number = (Floats)magnitude < 0.015625f ? small : rounded;
  const SignedBytes bytes = __builtin_convertvector(number | ((bits >> 24) & 0x80), SignedBytes);
  std::memcpy(target, &bytes, sizeof(bytes));
}

inline float largest_magnitude(const float* head, int count) {
  Floats largest{};
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats magnitude = (Floats)((Ints)load(head + i) & 0x7fffffff);
    largest = magnitude > largest ? magnitude : largest;
  }
  float result = horizontal_max(largest);
  for (; i < count; ++i) result = std::max(result, std::fabs(head[i]));
  return result;
}

// Writes a head, rounded to the cache's type; in eight bits its scale too.
template <typename Cache>
inline void store_head(const float* head, Cache* target, int count, _Float16* scale) {
  if constexpr (EightBits<Cache>::kIs) {
    constexpr float kLargest = EightBits<Cache>::kLargest;
    *scale = static_cast<_Float16>(std::min(largest_magnitude(head, count) / kLargest, 65504.0f));
    const float wide = static_cast<float>(*scale), inverse = wide > 0.0f ? 1.0f / wide : 0.0f;
    for (int i = 0; i < count; i += kLanes) {
      const int lanes = std::min(kLanes, count - i);
      Floats x{};
      std::memcpy(&x, head + i, lanes * sizeof(float));
      x *= inverse;
      x = x > kLargest ? splat(kLargest) : x < -kLargest ? splat(-kLargest) : x;
      Cache bytes[kLanes];
      store(bytes, x);
      std::memcpy(target + i, bytes, lanes);
    }
  } else {
    narrow(head, target, count);
  }
}

// Both scales of up to kLanes tokens, times the factor by which what `load` returns is too small.
struct Scales {
  Floats key, value;
};

template <typename Cache>
inline Scales load_scales(const int32_t* pairs, int count) {
  Ints both{};
  if (count == kLanes)
    both = load_raw<Ints>(pairs);
  else
    std::memcpy(&both, pairs, count * sizeof(int32_t));
  constexpr float kUnit = EightBits<Cache>::kUnit;
  return {widen_halves(both) * kUnit, widen_halves(both >> 16) * kUnit};
}

}  // namespace headrace

// Vectors of fp32 for the CPU kernels, in GCC's vector extensions: as wide as the machine that compiles them.
#pragma once

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>
#include <utility>

namespace headrace {

#ifdef __AVX512F__
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef _Float16 Float16s __attribute__((vector_size(kLanes * 2)));

// Storage types, numbered as in cpu_library.py.
enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3, kFloat8 = 4 };

struct bfloat16 {
  uint16_t bits;
};

template <typename T>
inline T load_raw(const void* source) {
  T vector;
  std::memcpy(&vector, source, sizeof(T));
  return vector;
}

inline Floats splat(float value) { return Floats{} + value; }

inline Floats load(const float* source) { return load_raw<Floats>(source); }

inline Floats load(const bfloat16* source) {
  const Ints wide = __builtin_convertvector(load_raw<Halves>(source), Ints) << 16;
  return (Floats)wide;
}

// GCC takes its vectors of float16 apart where the processor has no arithmetic for them.
inline Floats load(const _Float16* source) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(load_raw<__m256i>(source));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(load_raw<__m128i>(source));
#else
  return __builtin_convertvector(load_raw<Float16s>(source), Floats);
#endif
}

inline float to_float(float value) { return value; }
inline float to_float(_Float16 value) { return static_cast<float>(value); }
inline float to_float(bfloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline void store_scalar(float* target, float value) { *target = value; }
inline void store_scalar(_Float16* target, float value) { *target = static_cast<_Float16>(value); }
inline void store_scalar(bfloat16* target, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  target->bits = is_nan ? 0x7fc0u : static_cast<uint16_t>(rounded >> 16);
}

inline void store(float* target, Floats vector) { std::memcpy(target, &vector, sizeof(vector)); }
inline void store(_Float16* target, Floats vector) {
#if defined(__AVX512F__)
  const __m256i narrow = _mm512_cvtps_ph((__m512)vector, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  const __m128i narrow = _mm256_cvtps_ph((__m256)vector, _MM_FROUND_TO_NEAREST_INT);
#else
  const Float16s narrow = __builtin_convertvector(vector, Float16s);
#endif
  std::memcpy(target, &narrow, sizeof(narrow));
}
inline void store(bfloat16* target, Floats vector) {
  const Ints bits = (Ints)vector;
  const Ints rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const Ints kept = vector == vector ? rounded : Ints{} + 0x7fc00000;
  const Halves narrow = __builtin_convertvector((kept >> 16) & 0xffff, Halves);
  std::memcpy(target, &narrow, sizeof(narrow));
}

// Stores `count` elements, rounded to the target's type.
template <typename T>
inline void narrow(const float* source, T* target, int count) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) store(target + i, load(source + i));
  for (; i < count; ++i) store_scalar(target + i, source[i]);
}

// Widens `count` elements to fp32; lanes up to `padded` become zero.
template <typename T>
inline void widen(const T* source, float* target, int count, int padded) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats vector = load(source + i);
    std::memcpy(target + i, &vector, sizeof(vector));
  }
  for (; i < count; ++i) target[i] = to_float(source[i]);
  for (; i < padded; ++i) target[i] = 0.0f;
}

// Vector whose lane i is function(i), known at compile time.
template <typename Function, int... kLane>
constexpr Ints make_ints(Function function, std::integer_sequence<int, kLane...>) {
  return Ints{function(kLane)...};
}

template <typename Function>
constexpr Ints make_ints(Function function) {
  return make_ints(function, std::make_integer_sequence<int, kLanes>());
}

constexpr Ints kLaneNumbers = make_ints([](int lane) { return lane; });

template <int kDistance>
inline Floats swap_lanes(Floats vector) {
  return __builtin_shuffle(vector, kLaneNumbers ^ kDistance);
}

template <int kDistance = kLanes / 2>
inline float horizontal_max(Floats vector) {
  if constexpr (kDistance == 0) {
    return vector[0];
  } else {
    const Floats other = swap_lanes<kDistance>(vector);
    return horizontal_max<kDistance / 2>(vector > other ? vector : other);
  }
}

template <int kDistance = kLanes / 2>
inline float horizontal_sum(Floats vector) {
  if constexpr (kDistance == 0) {
    return vector[0];
  } else {
    return horizontal_sum<kDistance / 2>(vector + swap_lanes<kDistance>(vector));
  }
}

// Says whether any lane of a comparison holds.
inline bool any(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  int32_t lanes = 0;
  for (int i = 0; i < kLanes; ++i) lanes |= mask[i];
  return lanes != 0;
#endif
}

// exp(x) for x <= 0 (results below 2^-126 come out as about 2^-126): range reduction by ln 2, then the degree-5 polynomial of Cephes' expf.
inline Floats exp_nonpositive(Floats x) {
  x = x < -87.33f ? splat(-87.33f) : x;
  const Floats scaled = x * 1.44269504088896341f - 0.5f;
  const Ints power = __builtin_convertvector(scaled, Ints);  // Truncates towards zero, which rounds: scaled <= 0.
  const Floats whole = __builtin_convertvector(power, Floats);
  Floats r = x - whole * 0.693359375f;
  r = r - whole * -2.12194440e-4f;
  Floats y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  return y * (Floats)((power + 127) << 23);
}

// Through exp(-2 |x|), which cannot overflow.
inline Floats tangent(Floats x) {
  const Floats e = exp_nonpositive((x < 0.0f ? x : -x) * 2.0f);
  const Floats magnitude = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -magnitude : magnitude;
}

// x / (1 + exp(-x)), through exp(-|x|), which cannot overflow.
inline Floats silu(Floats x) {
  const Floats magnitude = x < 0.0f ? -x : x;
  const Floats e = exp_nonpositive(-magnitude);
  return x * (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

}  // namespace headrace

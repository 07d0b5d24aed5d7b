// The numbers that quantized weights are stored as, with the indices of forms/numbers.py: how wide a code is, and how
// codes become operands. Integers are multiplied as they are; other numbers become pairs of bfloat16, which
// hold them exactly.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../dense/packed.h"

namespace headrace {

enum class Number : int32_t { kInt4 = 0, kInt8 = 1, kFloat8 = 2, kFloat4 = 3 };

struct Int4 {
  static constexpr int kBits = 4;
  static constexpr bool kIsInteger = true;
};

struct Int8 {
  static constexpr int kBits = 8;
  static constexpr bool kIsInteger = true;
};

// The bfloat16 numbers of neighbouring columns, two in a lane: those of a word of kBits codes. A word's bytes are
// columns 0, 2, 1 and 3, with 4 bits in their low halves, and 4, 6, 5 and 7 in their high ones.
template <int kBits>
struct ColumnPairs {
  Ints pairs[16 / kBits];
};

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)

// Both bytes of the bfloat16 numbers of all magnitudes.
struct Float8Table {
  uint8_t low[128], high[128];

  constexpr Float8Table() : low(), high() {
    for (int magnitude = 0; magnitude < 128; ++magnitude) {
      int exponent = magnitude >> 3, fraction = magnitude & 7;
      int bits = 0;
      if (exponent > 0) {
        bits = ((exponent + 120) << 7) | (fraction << 4);
      } else if (fraction > 0) {
        exponent = 121;  // Of 0.fraction; below one for each position that the first one bit is away from the point.
        while (fraction < 8) fraction <<= 1, --exponent;
        bits = (exponent << 7) | ((fraction & 7) << 4);
      }
      if (magnitude == 127) bits = 0x7fc0;
      low[magnitude] = static_cast<uint8_t>(bits & 255);
      high[magnitude] = static_cast<uint8_t>(bits >> 8);
    }
  }
};

// float8_e4m3fn.
struct Float8 {
  static constexpr int kBits = 8;
  static constexpr bool kIsInteger = false;

  __m512i low[2], high[2];

  Float8() {
    static constexpr Float8Table kTable;
    for (int i = 0; i < 2; ++i) {
      low[i] = load_raw<__m512i>(kTable.low + 64 * i);
      high[i] = load_raw<__m512i>(kTable.high + 64 * i);
    }
  }

  ColumnPairs<8> decode(Ints words) const {
    const auto codes = (__m512i)words;
    const Ints low_bytes = (Ints)_mm512_permutex2var_epi8(low[0], codes, low[1]);
    const Ints high_bytes = (Ints)_mm512_permutex2var_epi8(high[0], codes, high[1]) | (words & static_cast<int32_t>(0x80808080));
    typedef uint16_t Shorts __attribute__((vector_size(kLanes * 4)));
    return {{(low_bytes & 0x00ff00ff) | (Ints)((Shorts)high_bytes << 8),
             (Ints)((Shorts)low_bytes >> 8) | (high_bytes & static_cast<int32_t>(0xff00ff00))}};
  }
};

#else

struct Float8 {
  static constexpr int kBits = 8;
  static constexpr bool kIsInteger = false;

  // The bits of a float8 number as those of a float are 2^-120 of it, numbers without leading one included.
  static Ints widened(Ints code) {
    const Ints bits = ((code & 0x7f) << 20) | ((code & 0x80) << 24);
    const Ints number = (Ints)((Floats)bits * 0x1p120f);
    return (code & 0x7f) == 0x7f ? Ints{} + 0x7fc00000 : number;
  }

  ColumnPairs<8> decode(Ints words) const {
    const auto pair = [](Ints even, Ints odd) { return ((widened(even) >> 16) & 0xffff) | widened(odd); };
    return {{pair(words & 255, (words >> 16) & 255), pair((words >> 8) & 255, (words >> 24) & 255)}};
  }
};

#endif

#if defined(__AVX512BW__) || defined(__AVX2__)

// float4_e2m1: the bytes of the bfloat16 numbers of all codes are looked up.
struct Float4 {
  static constexpr int kBits = 4;
  static constexpr bool kIsInteger = false;

  Ints low, high;

  Float4() {
    alignas(16) static constexpr uint8_t kLow[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0,
                                                     0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
    alignas(16) static constexpr uint8_t kHigh[16] = {0,    0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                                      0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
    for (int part = 0; part < kLanes / 4; ++part) {
      std::memcpy(reinterpret_cast<char*>(&low) + 16 * part, kLow, 16);
      std::memcpy(reinterpret_cast<char*>(&high) + 16 * part, kHigh, 16);
    }
  }

  static Ints look_up(Ints table, Ints codes) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#else
    return (Ints)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#endif
  }

  ColumnPairs<4> decode(Ints words) const {
    typedef uint16_t Shorts __attribute__((vector_size(kLanes * 4)));
    ColumnPairs<4> result;
    for (int half = 0; half < 2; ++half) {
      const Ints codes = (half == 0 ? words : words >> 4) & 0x0f0f0f0f;
      const Ints low_bytes = look_up(low, codes), high_bytes = look_up(high, codes);
      result.pairs[2 * half] = (low_bytes & 0x00ff00ff) | (Ints)((Shorts)high_bytes << 8);
      result.pairs[2 * half + 1] = (Ints)((Shorts)low_bytes >> 8) | (high_bytes & static_cast<int32_t>(0xff00ff00));
    }
    return result;
  }
};

#else

struct Float4 {
  static constexpr int kBits = 4;
  static constexpr bool kIsInteger = false;

  // As for float8: exponent and fraction where a float has them are 2^-126 of the number.
  static Ints widened(Ints code) {
    return (Ints)((Floats)(((code & 7) << 22) | ((code & 8) << 28)) * 0x1p126f);
  }

  ColumnPairs<4> decode(Ints words) const {
    const auto pair = [&](int even, int odd) {
      return ((widened((words >> even) & 15) >> 16) & 0xffff) | widened((words >> odd) & 15);
    };
    return {{pair(0, 16), pair(8, 24), pair(4, 20), pair(12, 28)}};
  }
};

#endif

// Calls a function with the number that an index stands for.
template <typename Function>
inline auto with_number(Number number, Function function) {
  switch (number) {
    case Number::kInt4: return function(Int4{});
    case Number::kInt8: return function(Int8{});
    case Number::kFloat8: return function(Float8{});
    default: return function(Float4{});
  }
}

inline int bits_of(Number number) {
  return with_number(number, [](auto of) { return decltype(of)::kBits; });
}

inline bool is_integer(Number number) {
  return with_number(number, [](auto of) { return decltype(of)::kIsInteger; });
}

}  // namespace headrace

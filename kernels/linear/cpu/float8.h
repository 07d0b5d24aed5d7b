// Tiles of float8_e4m3fn weights, which are exact in bfloat16. A word's bytes are columns 0, 2, 1 and 3.
#pragma once

#include "rows.h"

namespace headrace {

// The bfloat16 numbers of columns 0 and 1, and of 2 and 3, in a lane.
struct FloatPairs {
  Ints first, second;
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

struct Float8Decoder {
  __m512i low[2], high[2];

  Float8Decoder() {
    static constexpr Float8Table kTable;
    for (int i = 0; i < 2; ++i) {
      low[i] = load_raw<__m512i>(kTable.low + 64 * i);
      high[i] = load_raw<__m512i>(kTable.high + 64 * i);
    }
  }

  FloatPairs decode(Ints words) const {
    const auto codes = (__m512i)words;
    const Ints low_bytes = (Ints)_mm512_permutex2var_epi8(low[0], codes, low[1]);
    const Ints high_bytes = (Ints)_mm512_permutex2var_epi8(high[0], codes, high[1]) | (words & static_cast<int32_t>(0x80808080));
    typedef uint16_t Shorts __attribute__((vector_size(kLanes * 4)));
    return {(low_bytes & 0x00ff00ff) | (Ints)((Shorts)high_bytes << 8),
            (Ints)((Shorts)low_bytes >> 8) | (high_bytes & static_cast<int32_t>(0xff00ff00))};
  }
};

#else

struct Float8Decoder {
  // The bits of a float8 number as those of a float are 2^-120 of it, numbers without leading one included.
  static Ints widened(Ints code) {
    const Ints bits = ((code & 0x7f) << 20) | ((code & 0x80) << 24);
    const Ints number = (Ints)((Floats)bits * 0x1p120f);
    return (code & 0x7f) == 0x7f ? Ints{} + 0x7fc00000 : number;
  }

  FloatPairs decode(Ints words) const {
    const auto pair = [](Ints even, Ints odd) { return ((widened(even) >> 16) & 0xffff) | widened(odd); };
    return {pair(words & 255, (words >> 16) & 255), pair((words >> 8) & 255, (words >> 24) & 255)};
  }
};

#endif

// The product of a pair with two inputs, of bfloat16 or of float.
inline Floats add_pair(Floats sum, Ints pair, const bfloat16* inputs) {
  return multiply_word(sum, pair, load_raw<int32_t>(inputs), inputs);
}

inline Floats add_pair(Floats sum, Ints pair, const float* inputs) {
  sum += (Floats)(pair << 16) * inputs[0];
  return sum + (Floats)(pair & ~0xffff) * inputs[1];
}

template <typename Input, int R>
inline void multiply_float8(const QuantizedLinear& linear, const Rows& rows, int row, int panel, int half,
                            Floats (*result)[kPanelVectors]) {
  const Float8Decoder decoder;
  const int32_t* weights = linear.half_weights(panel, half);
  const int columns = linear.num_columns(), groups = linear.num_groups();
  const auto* inputs = reinterpret_cast<const Input*>(rows.values) + int64_t{row} * columns;
  Floats totals[R][kHalf] = {};
  int column = 0;
  for (int group = 0; group < groups; ++group) {
    const int end = group + 1 < groups ? column + linear.group_size : columns;
    Floats sums[R][kHalf] = {};
    for (; column < end; column += 4, weights += kHalf * kLanes) {
      FloatPairs pairs[kHalf];
      for (int v = 0; v < kHalf; ++v) {
        pairs[v] = decoder.decode(load_raw<Ints>(weights + v * kLanes));
        read_ahead(weights + v * kLanes);
      }
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < kHalf; ++v) {
          const Input* four = inputs + int64_t{r} * columns + column;
          sums[r][v] = add_pair(sums[r][v], pairs[v].first, four);
          sums[r][v] = add_pair(sums[r][v], pairs[v].second, four + 2);
        }
    }
    for (int v = 0; v < kHalf; ++v) {
      const Floats scale = load_scale(linear, linear.group_index(panel, half, group) + v * kLanes);
      for (int r = 0; r < R; ++r)
        totals[r][v] += sums[r][v] * (scale * rows.factors[int64_t{row + r} * rows.num_factors + group]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kHalf; ++v) result[r][half * kHalf + v] = totals[r][v];
}

}  // namespace headrace

// Tiles of weights that become pairs of bfloat16 numbers, times inputs of bfloat16 or float.
#pragma once

#include "rows.h"

namespace headrace {

// The product of a pair with two inputs, of bfloat16 or of float.
inline Floats add_pair(Floats sum, Ints pair, const bfloat16* inputs) {
  return multiply_word(sum, pair, load_raw<int32_t>(inputs), inputs);
}

inline Floats add_pair(Floats sum, Ints pair, const float* inputs) {
  sum += (Floats)(pair << 16) * inputs[0];
  return sum + (Floats)(pair & ~0xffff) * inputs[1];
}

template <typename Number, typename Input, int R>
__attribute__((noinline)) void multiply_pairs(const QuantizedLinear& linear, const Rows& rows, int row,
                                              int panel, int half, Floats (*result)[kPanelVectors]) {
  constexpr int kPairs = 16 / Number::kBits, kColumns = 2 * kPairs;
  const Number number;
  const int32_t* weights = linear.half_weights(panel, half);
  const int columns = linear.num_columns(), groups = linear.num_groups();
  const auto* inputs = reinterpret_cast<const Input*>(rows.values) + int64_t{row} * columns;
  Floats totals[R][kHalf] = {};
  int column = 0;
  for (int group = 0; group < groups; ++group) {
    const int end = group + 1 < groups ? column + linear.group_size : columns;
    Floats sums[R][kHalf] = {};
    for (; column < end; column += kColumns, weights += kHalf * kLanes) {
      ColumnPairs<Number::kBits> words[kHalf];
      for (int v = 0; v < kHalf; ++v) {
        words[v] = number.decode(load_raw<Ints>(weights + v * kLanes));
        read_ahead(weights + v * kLanes);
      }
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < kHalf; ++v) {
          const Input* of_row = inputs + int64_t{r} * columns + column;
          for (int pair = 0; pair < kPairs; ++pair)
            sums[r][v] = add_pair(sums[r][v], words[v].pairs[pair], of_row + 2 * pair);
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

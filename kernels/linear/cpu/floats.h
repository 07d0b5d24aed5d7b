// Tiles of integer weights times floating point inputs: no input is rounded.
#pragma once

#include "rows.h"

namespace headrace {

// Column of a word's value: with 4 bits, low halves of the bytes come before high ones.
template <int kBits>
inline Ints value_of(Ints words, int position) {
  if constexpr (kBits == 8) return (words >> (8 * position)) & 255;
  return (words >> (8 * (position % 4) + 4 * (position / 4))) & 15;
}

template <int kBits, int R>
__attribute__((noinline)) void multiply_groups_exactly(const QuantizedLinear& linear, const Rows& rows, int row,
                                                       int panel, int half, Floats (*result)[kPanelVectors]) {
  constexpr int kColumns = 32 / kBits;
  const int32_t* weights = linear.half_weights(panel, half);
  const int columns = linear.num_columns(), groups = linear.num_groups();
  const auto* inputs = reinterpret_cast<const float*>(rows.values) + int64_t{row} * columns;
  Floats sums[R][kHalf] = {};
  int column = 0;
  for (int group = 0; group < groups; ++group) {
    const int64_t index = linear.group_index(panel, half, group);
    const int end = group + 1 < groups ? column + linear.group_size : columns;
    Floats scales[kHalf], offsets[kHalf];
    for (int v = 0; v < kHalf; ++v) {
      scales[v] = load_scale(linear, index + v * kLanes);
      offsets[v] = load_offset(linear, index + v * kLanes, scales[v]);
    }
    for (; column < end; column += kColumns, weights += kHalf * kLanes)
      for (int v = 0; v < kHalf; ++v) {
        const Ints words = load_raw<Ints>(weights + v * kLanes);
        for (int position = 0; position < kColumns; ++position) {
          const Floats codes = __builtin_convertvector(value_of<kBits>(words, position), Floats);
          const Floats values = codes * scales[v] + offsets[v];
          for (int r = 0; r < R; ++r) sums[r][v] += values * inputs[int64_t{r} * columns + column + position];
        }
      }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kHalf; ++v) result[r][half * kHalf + v] = sums[r][v];
}

}  // namespace headrace

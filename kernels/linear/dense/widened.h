// Weights of 16 bits times rows of fp32. Each weight is widened in registers, once for all rows of a tile. That is exact,
// and the order of the sums is that of panel.h: results have the bits of the same weights in fp32, which are twice as long
// in coming from memory.
//
// A word is two inputs of each feature of a panel: side by side in bfloat16, as its own products take them; in float16
// first one input of all features, then the other.
#pragma once

#include "../../panel.h"

namespace headrace {

// The weights of vector v of the features for one input of a word.
template <int kInput>
inline Floats widened(const bfloat16* word, int v) {
  const Ints pairs = load_raw<Ints>(word + v * 2 * kLanes);
  return (Floats)(kInput == 0 ? pairs << 16 : pairs & ~0xffff);
}

template <int kInput>
inline Floats widened(const _Float16* word, int v) {
  return load(word + kInput * kPanel + v * kLanes);
}

template <int kInput, int R, typename W>
inline void multiply_input(Floats (*sums)[kPanelVectors], const W* word, const float* x, int64_t x_stride) {
  Floats weights[kPanelVectors];
  for (int v = 0; v < kPanelVectors; ++v) weights[v] = widened<kInput>(word, v);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = sums[r][v] + weights[v] * x[r * x_stride + kInput];
}

// Does what multiply_panel does, with weights of type W.
template <typename W, int R, typename Ahead>
inline void multiply_widened(Floats (*sums)[kPanelVectors], const int32_t* panel, int words, const float* x,
                             int64_t x_stride, Ahead& ahead) {
  for (int word = 0; word < words; ++word, panel += kPanel, x += kPerWord<W>) {
    ahead.ask(panel);
    const auto* weights = reinterpret_cast<const W*>(panel);
    multiply_input<0, R>(sums, weights, x, x_stride);
    multiply_input<1, R>(sums, weights, x, x_stride);
  }
}

}  // namespace headrace

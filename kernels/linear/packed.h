// Multiplication by a matrix that is packed for reading in order.
//
// A panel holds kPanel output features: for each word of the input (one fp32 number or two bf16 numbers), that word of
// each feature's weights. A tile multiplies a few rows by a panel with one accumulator per row and feature, and takes
// the words in order, so that a row's bits depend neither on the other rows nor on the number of threads.
#pragma once

#include <algorithm>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "../simd.h"
#include "../team.h"

namespace headrace {

constexpr int kPanelVectors = 4;
constexpr int kPanel = kPanelVectors * kLanes;
constexpr int kTileRows = kLanes == 16 ? 6 : 2;  // As many as the registers hold.
constexpr int kItemRows = 96;                    // Rows of a panel that one thread takes at a time.

struct PackedLinear {
  const void* weight;
  const float* bias;  // In the order of the panels, padded; null when there is none.
  int32_t num_inputs;
  int32_t num_outputs;  // Of the packed matrix: a gated one counts gate and up features.

  int num_panels() const { return (num_outputs + kPanel - 1) / kPanel; }
};

inline Floats multiply_word(Floats sum, Ints weights, int32_t word, const float*) {
  float x;
  std::memcpy(&x, &word, 4);
  return sum + (Floats)weights * x;
}

inline Floats multiply_word(Floats sum, Ints weights, int32_t word, const bfloat16*) {
#ifdef __AVX512BF16__
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(word));
#else
  const Ints x = Ints{} + word;
  sum += (Floats)(weights << 16) * (Floats)(x << 16);
  return sum + (Floats)(weights & ~0xffff) * (Floats)(x & ~0xffff);
#endif
}

// What becomes of a tile's sums.
enum class Finish { kStore, kStoreFloat, kAddTo, kGate };

// Stores the first `count` of the features in kVectors vectors.
template <int kVectors, typename Target>
inline void put(Target* target, const Floats* sums, int count) {
  if (count == kVectors * kLanes) {
    for (int v = 0; v < kVectors; ++v) store(target + v * kLanes, sums[v]);
    return;
  }
  alignas(64) float spilled[kVectors * kLanes];
  for (int v = 0; v < kVectors; ++v) store(spilled + v * kLanes, sums[v]);
  for (int i = 0; i < count; ++i) store_scalar(target + i, spilled[i]);
}

template <typename T, Finish kFinish>
inline void finish_row(void* target, int64_t row_start, int panel, int num_outputs, Floats* sums) {
  const int count = std::min(kPanel, num_outputs - panel * kPanel);
  if constexpr (kFinish == Finish::kStore) {
    put<kPanelVectors>(static_cast<T*>(target) + row_start + panel * kPanel, sums, count);
  } else if constexpr (kFinish == Finish::kStoreFloat) {
    put<kPanelVectors>(static_cast<float*>(target) + row_start + panel * kPanel, sums, count);
  } else if constexpr (kFinish == Finish::kAddTo) {
    float* total = static_cast<float*>(target) + row_start + panel * kPanel;
    alignas(64) float before[kPanel];
    widen(total, before, count, kPanel);
    for (int v = 0; v < kPanelVectors; ++v) sums[v] += load(before + v * kLanes);
    put<kPanelVectors>(total, sums, count);
  } else {
    constexpr int kHalf = kPanelVectors / 2;
    for (int v = 0; v < kHalf; ++v) sums[v] = silu(sums[v]) * sums[v + kHalf];
    const int first = panel * kPanel / 2;
    put<kHalf>(static_cast<T*>(target) + row_start + first, sums, std::min(kPanel / 2, num_outputs / 2 - first));
  }
}


template <typename T, Finish kFinish, int R>
inline void multiply_tile(const PackedLinear& linear, const T* x, int64_t x_stride, int panel, void* target,
                          int64_t target_start, int64_t target_stride) {
  constexpr int kPerWord = 4 / sizeof(T);
  const int words = linear.num_inputs / kPerWord;
  const auto* weights = static_cast<const int32_t*>(linear.weight) + int64_t{panel} * kPanel * words;
  Floats sums[R][kPanelVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kPanelVectors; ++v)
      sums[r][v] = linear.bias ? load(linear.bias + panel * kPanel + v * kLanes) : Floats{};
  for (int word = 0; word < words; ++word) {
    Ints weight[kPanelVectors];
    for (int v = 0; v < kPanelVectors; ++v)
      weight[v] = load_raw<Ints>(weights + int64_t{word} * kPanel + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const int32_t input = load_raw<int32_t>(x + r * x_stride + word * kPerWord);
      for (int v = 0; v < kPanelVectors; ++v)
        sums[r][v] = multiply_word(sums[r][v], weight[v], input, static_cast<const T*>(nullptr));
    }
  }
  for (int r = 0; r < R; ++r)
    finish_row<T, kFinish>(target, target_start + r * target_stride, panel, linear.num_outputs, sums[r]);
}

// Multiplies the last rows, fewer than a full tile.
template <typename T, Finish kFinish, int R = kTileRows - 1>
inline void multiply_rest(int rows, const PackedLinear& linear, const T* x, int64_t x_stride, int panel, void* target,
                          int64_t target_start, int64_t target_stride) {
  if constexpr (R > 0) {
    if (rows == R) return multiply_tile<T, kFinish, R>(linear, x, x_stride, panel, target, target_start, target_stride);
    multiply_rest<T, kFinish, R - 1>(rows, linear, x, x_stride, panel, target, target_start, target_stride);
  }
}

// Multiplies `num_rows` rows; every thread of the team calls it.
template <typename T, Finish kFinish>
void multiply(const PackedLinear& linear, const T* x, int64_t x_stride, void* target, int64_t target_stride,
              int num_rows, Operation& operation) {
  const int panels = linear.num_panels();
  const int parts = (num_rows + kItemRows - 1) / kItemRows;
  share(operation, int64_t{panels} * parts, [&](int64_t item) {
    const int panel = static_cast<int>(item / parts);
    int row = static_cast<int>(item % parts) * kItemRows;
    const int end = std::min(row + kItemRows, num_rows);
    for (; row + kTileRows <= end; row += kTileRows)
      multiply_tile<T, kFinish, kTileRows>(linear, x + row * x_stride, x_stride, panel, target, row * target_stride,
                                           target_stride);
    multiply_rest<T, kFinish>(end - row, linear, x + row * x_stride, x_stride, panel, target, row * target_stride,
                              target_stride);
  });
}

}  // namespace headrace

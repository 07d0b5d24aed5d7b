// Multiplication by a matrix that is packed for reading in order.
//
// A panel holds kPanel output features: for each word of the input (one fp32 number or two bf16 numbers), that word of
// each feature's weights. A tile multiplies a few rows by a panel with one accumulator per row and feature, and takes
// the words in order, so that a row's bits depend neither on the other rows nor on the number of threads.
#pragma once

#include <omp.h>

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
constexpr int kLine = 64;                        // Bytes of a cache line.

struct PackedLinear {
  const void* weight;
  const float* bias;  // In the order of the panels, padded; null when there is none.
  int32_t num_inputs;
  int32_t num_outputs;  // Of the packed matrix: a gated one counts gate and up features.

  int num_panels() const { return (num_outputs + kPanel - 1) / kPanel; }

  int64_t panel_bytes(int element_size) const { return int64_t{kPanel} * num_inputs * element_size; }
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

// A panel to multiply rows by, and where the rows and their results lie.
template <typename T>
struct PanelProduct {
  const PackedLinear& linear;
  int panel;
  const T* x;
  int64_t x_stride;
  void* target;
  int64_t target_stride;
};

// Multiplies R rows, from `row` on. Meanwhile asks memory for what is at `ahead`, a cache line a word.
template <typename T, Finish kFinish, int R, bool kAhead>
inline void multiply_tile(const PanelProduct<T>& product, int row, const char* ahead) {
  constexpr int kPerWord = 4 / sizeof(T);
  const PackedLinear& linear = product.linear;
  const int words = linear.num_inputs / kPerWord;
  const auto* weights = static_cast<const int32_t*>(linear.weight) + int64_t{product.panel} * kPanel * words;
  const T* x = product.x + row * product.x_stride;
  Floats sums[R][kPanelVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kPanelVectors; ++v)
      sums[r][v] = linear.bias ? load(linear.bias + product.panel * kPanel + v * kLanes) : Floats{};
  for (int word = 0; word < words; ++word) {
    Ints weight[kPanelVectors];
    for (int v = 0; v < kPanelVectors; ++v)
      weight[v] = load_raw<Ints>(weights + int64_t{word} * kPanel + v * kLanes);
    if constexpr (kAhead) __builtin_prefetch(ahead + int64_t{word} * kLine, 0, 2);
    for (int r = 0; r < R; ++r) {
      const int32_t input = load_raw<int32_t>(x + r * product.x_stride + word * kPerWord);
      for (int v = 0; v < kPanelVectors; ++v)
        sums[r][v] = multiply_word(sums[r][v], weight[v], input, static_cast<const T*>(nullptr));
    }
  }
  for (int r = 0; r < R; ++r)
    finish_row<T, kFinish>(product.target, (row + r) * product.target_stride, product.panel, linear.num_outputs,
                           sums[r]);
}

// Multiplies `count` rows, at most a full tile.
template <typename T, Finish kFinish, bool kAhead, int R = kTileRows>
inline void multiply_some(int count, const PanelProduct<T>& product, int row, const char* ahead) {
  if constexpr (R > 0) {
    if (count == R) return multiply_tile<T, kFinish, R, kAhead>(product, row, ahead);
    multiply_some<T, kFinish, kAhead, R - 1>(count, product, row, ahead);
  }
}

// Multiplies the rows from `row` to `end` in tiles of about equal height, which keep the arithmetic units busy where a
// last tile of one row would not. The first tile takes the panel from memory, the others find it in the cache: while
// they compute, memory is asked for the panel at `next`, unless that is null. A single tile leaves it to the
// processor to read ahead, which does so better when it is not disturbed.
template <typename T, Finish kFinish>
inline void multiply_rows(const PanelProduct<T>& product, int row, int end, const char* next) {
  constexpr int kPieces = kPanel * 4 / kLine;  // Lines of a word: each tile asks for so much of the panel.
  const int64_t piece_bytes = product.linear.panel_bytes(sizeof(T)) / kPieces;
  int tiles = (end - row + kTileRows - 1) / kTileRows;
  int asked = next && tiles > 1 ? 0 : kPieces;
  for (; row < end; --tiles) {
    const int count = (end - row + tiles - 1) / tiles;
    if (asked < kPieces)
      multiply_some<T, kFinish, true>(count, product, row, next + asked++ * piece_bytes);
    else
      multiply_some<T, kFinish, false>(count, product, row, nullptr);
    row += count;
  }
}

// Multiplies `num_rows` rows; every thread of the team calls it.
template <typename T, Finish kFinish>
void multiply(const PackedLinear& linear, const T* x, int64_t x_stride, void* target, int64_t target_stride,
              int num_rows, Operation& operation) {
  const int panels = linear.num_panels(), num_threads = omp_get_num_threads();
  const int parts = (num_rows + kItemRows - 1) / kItemRows;
  share(operation, int64_t{panels} * parts, [&](int64_t item) {
    const int panel = static_cast<int>(item / parts), row = static_cast<int>(item % parts) * kItemRows;
    const int64_t next = (item + num_threads) / parts;  // Likely this thread's, when all are equally fast.
    const char* next_panel = static_cast<const char*>(linear.weight) + next * linear.panel_bytes(sizeof(T));
    const bool can_ask = next != panel && next < panels;
    multiply_rows<T, kFinish>({linear, panel, x, x_stride, target, target_stride}, row,
                              std::min(row + kItemRows, num_rows), can_ask ? next_panel : nullptr);
  });
}

}  // namespace headrace

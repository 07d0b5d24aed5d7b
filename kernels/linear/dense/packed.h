// Multiplication by a matrix that is packed for reading in order: panels of output features, as in panel.h.
#pragma once

#include <omp.h>

#include <algorithm>
#include <type_traits>

#include "../../panel.h"
#include "../../team.h"
#include "widened.h"

namespace headrace {

constexpr int kItemRows = 96;  // Rows of a panel that one thread takes at a time.

struct PackedLinear {
  const void* weight;
  const float* bias;  // In the order of the panels, padded; null when there is none.
  int32_t num_inputs;
  int32_t num_outputs;  // Of the packed matrix: a gated one counts gate and up features.
  int32_t dtype;        // Of the weights: that of the rows, or one of 16 bits with rows of fp32.

  int num_panels() const { return (num_outputs + kPanel - 1) / kPanel; }

  int64_t panel_bytes(int element_size) const { return int64_t{kPanel} * num_inputs * element_size; }
};

// What a multiplication adds to the sums of a row and panel before they are finished: nothing.
struct NothingMore {
  static constexpr bool kReads = false;
  void operator()(int64_t, int, Floats*) const {}
};

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

// Adds the first `count` features of a panel to `total`.
inline void add_to(float* total, Floats* sums, int count) {
  if (count == kPanel) {
    for (int v = 0; v < kPanelVectors; ++v) store(total + v * kLanes, load(total + v * kLanes) + sums[v]);
    return;
  }
  alignas(64) float before[kPanel];
  widen(total, before, count, kPanel);
  for (int v = 0; v < kPanelVectors; ++v) sums[v] += load(before + v * kLanes);
  put<kPanelVectors>(total, sums, count);
}

template <typename T, Finish kFinish>
inline void finish_row(void* target, int64_t row_start, int panel, int num_outputs, Floats* sums) {
  const int count = std::min(kPanel, num_outputs - panel * kPanel);
  if constexpr (kFinish == Finish::kStore) {
    put<kPanelVectors>(static_cast<T*>(target) + row_start + panel * kPanel, sums, count);
  } else if constexpr (kFinish == Finish::kStoreFloat) {
    put<kPanelVectors>(static_cast<float*>(target) + row_start + panel * kPanel, sums, count);
  } else if constexpr (kFinish == Finish::kAddTo) {
    add_to(static_cast<float*>(target) + row_start + panel * kPanel, sums, count);
  } else {
    constexpr int kHalf = kPanelVectors / 2;
    for (int v = 0; v < kHalf; ++v) sums[v] = silu(sums[v]) * sums[v + kHalf];
    const int first = panel * kPanel / 2;
    put<kHalf>(static_cast<T*>(target) + row_start + first, sums, std::min(kPanel / 2, num_outputs / 2 - first));
  }
}

// A panel to multiply rows by, and where the rows lie.
template <typename T>
struct PanelProduct {
  const PackedLinear& linear;
  int panel;
  const T* x;
  int64_t x_stride;
};

// Multiplies R rows by a panel and adds its bias, if there is one. Not inlined: side by side in one function, some of the
// loops come out a third slower. The sums begin and end here in registers: copied as an array they went through memory,
// by calls of memmove, which cost a twentieth of the time that 256 inputs take.
template <typename W, typename T, int R, typename Ahead>
__attribute__((noinline)) void multiply_by_panel(Floats (*result)[kPanelVectors], const float* bias,
                                                 const int32_t* panel, int words, const T* x, int64_t x_stride,
                                                 Ahead ahead) {
  if (words <= 0) __builtin_unreachable();  // Else the sums are stored for a loop that does not run.
  Floats sums[R][kPanelVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = bias ? load(bias + v * kLanes) : Floats{};
  if constexpr (std::is_same_v<W, T>)
    multiply_panel<T, R>(sums, panel, words, x, x_stride, ahead);
  else
    multiply_widened<W, R>(sums, panel, words, x, x_stride, ahead);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kPanelVectors; ++v) result[r][v] = sums[r][v];
}

// Does the same for `count` rows, at most R.
template <typename W, typename T, int R = kTileRows, typename Ahead>
inline void multiply_some_by_panel(int count, Floats (*result)[kPanelVectors], const float* bias, const int32_t* panel,
                                   int words, const T* x, int64_t x_stride, Ahead ahead) {
  if constexpr (R > 0) {
    if (count == R) return multiply_by_panel<W, T, R>(result, bias, panel, words, x, x_stride, ahead);
    multiply_some_by_panel<W, T, R - 1>(count, result, bias, panel, words, x, x_stride, ahead);
  }
}

// Multiplies `count` rows, at most a full tile, from `row` on; `finish` gets each row and its sums.
template <typename W, typename T, typename Finisher, typename Ahead>
inline void multiply_tile(int count, const PanelProduct<T>& product, int row, Ahead ahead, Finisher finish) {
  const PackedLinear& linear = product.linear;
  const int words = linear.num_inputs / kPerWord<W>;
  const auto* weights = static_cast<const int32_t*>(linear.weight) + int64_t{product.panel} * kPanel * words;
  const float* bias = linear.bias ? linear.bias + product.panel * kPanel : nullptr;
  Floats sums[kTileRows][kPanelVectors];
  multiply_some_by_panel<W, T>(count, sums, bias, weights, words, product.x + row * product.x_stride, product.x_stride,
                               ahead);
  for (int r = 0; r < count; ++r) finish(row + r, sums[r]);
}

// Multiplies the rows from `row` to `end` in tiles of about equal height, which keep the arithmetic units busy where a
// last tile of one row would not. The first tile takes the panel from memory, the others find it in the cache: while
// they compute, memory is asked for the panel at `next`, unless that is null. A single tile asks for what it reads itself
// a little before; a single row leaves that to the processor, which does it better when it is not disturbed.
// While rows are multiplied, memory is also asked for what `more` reads for those that follow.
template <typename W, typename T, typename Finisher, typename More = NothingMore>
inline void multiply_rows(const PanelProduct<T>& product, int row, int end, const char* next, Finisher finish,
                          const More& more = {}) {
  const auto multiply_some = [&](int count, auto ahead) {
    if constexpr (More::kReads) {
      RangeList list;
      more.list(row + count, product.panel, list);
      multiply_tile<W>(count, product, row, ListAhead<decltype(ahead)>{ahead, list}, finish);
    } else {
      multiply_tile<W>(count, product, row, ahead, finish);
    }
  };
  constexpr int kPieces = kPanel * 4 / kLine;  // Lines of a word: each tile asks for so much of the panel.
  const int64_t piece_bytes = product.linear.panel_bytes(sizeof(W)) / kPieces;
  int tiles = (end - row + kTileRows - 1) / kTileRows;
  if (end - row == 1) return multiply_some(1, NothingAhead{});
  if (tiles == 1) return multiply_some(end - row, PagesAhead{});
  int asked = next ? 0 : kPieces;
  for (; row < end; --tiles) {
    const int count = (end - row + tiles - 1) / tiles;
    if (asked < kPieces)
      multiply_some(count, LinesAhead{next + asked++ * piece_bytes});
    else
      multiply_some(count, NothingAhead{});
    row += count;
  }
}

// Multiplies `num_rows` rows by weights of type W, and adds `more`; every thread of the team calls it.
template <typename W, typename T, Finish kFinish, typename More>
void multiply_by(const PackedLinear& linear, const T* x, int64_t x_stride, void* target, int64_t target_stride,
                 int num_rows, Operation& operation, More more) {
  const int panels = linear.num_panels(), num_threads = omp_get_num_threads();
  const int parts = (num_rows + kItemRows - 1) / kItemRows;
  share(operation, int64_t{panels} * parts, [&](int64_t item) {
    const int panel = static_cast<int>(item / parts), row = static_cast<int>(item % parts) * kItemRows;
    const int64_t next = (item + num_threads) / parts;  // Likely this thread's, when all are equally fast.
    const char* next_panel = static_cast<const char*>(linear.weight) + next * linear.panel_bytes(sizeof(W));
    const bool can_ask = next != panel && next < panels;
    const PanelProduct<T> product{linear, panel, x, x_stride};
    multiply_rows<W>(product, row, std::min(row + kItemRows, num_rows), can_ask ? next_panel : nullptr,
                     [&](int64_t of, Floats* sums) {
                       more(of, panel, sums);
                       finish_row<T, kFinish>(target, of * target_stride, panel, linear.num_outputs, sums);
                     }, more);
  });
}

// Does the same with weights of the type that the matrix has.
template <typename T, Finish kFinish, typename More = NothingMore>
void multiply(const PackedLinear& linear, const T* x, int64_t x_stride, void* target, int64_t target_stride,
              int num_rows, Operation& operation, More more = {}) {
  if constexpr (std::is_same_v<T, float>) {
    if (linear.dtype == kBFloat16)
      return multiply_by<bfloat16, T, kFinish>(linear, x, x_stride, target, target_stride, num_rows, operation, more);
    if (linear.dtype == kFloat16)
      return multiply_by<_Float16, T, kFinish>(linear, x, x_stride, target, target_stride, num_rows, operation, more);
  }
  multiply_by<T, T, kFinish>(linear, x, x_stride, target, target_stride, num_rows, operation, more);
}

}  // namespace headrace

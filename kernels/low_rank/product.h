// What adapters add to the product of a matrix: up(scale * down(x)), two thin matrices of each adapter (LoRA).
//
// Rows are taken in the order of their adapters, so that neighbours share what they read of the first matrix; no row is
// padded to the rank of another. The second product is added to the sums of the matrix itself, before anything becomes
// of them. A row's bits depend neither on the other rows nor on the number of threads.
#pragma once

#include <algorithm>

#include "../linear/dense/packed.h"

namespace headrace {

constexpr int kHalfPanel = kPanel / 2;
constexpr int kDownRows = 4;   // Rows that share what is read of the first matrix.
constexpr int kDownRanks = 4;  // Ranks whose sums are made side by side.
constexpr int kItemRanks = 16;

// Which ranks the features of half a panel are made of, and where their weights begin.
struct LowRankHalf {
  int64_t offset;
  int32_t first, count;
};

// The two matrices of an adapter beside one matrix of the model.
struct LowRank {
  const void* down;  // [rank, num_inputs].
  const void* up;    // For each half panel, [count, kHalfPanel]; in bfloat16 pairs of ranks, as in panel.h.
  const float* scales;  // [rank].
  const LowRankHalf* halves;  // [2 * panels].
  int32_t rank, num_inputs;
  int32_t dtype;  // Of both: bfloat16, or float32 where rows are of that type.
};

// By an adapter's slot; null where it leaves the matrix as it is. The array is null where no adapter can be.
using LowRankTable = const LowRank* const*;

// The rows of a step that have an adapter, in the order of their slots.
struct AdapterRows {
  const int32_t* rows;
  const int32_t* slots;
  const int32_t* places;  // Of each row of the step, its place among these; below zero without an adapter.
  void* products;         // [num_rows, stride], of the first matrices, by place, in the type of the rows.
  int32_t num_rows, stride;  // An even number, as many as any adapter has ranks or more.

  template <typename T>
  T* products_at(int64_t place) const {
    return static_cast<T*>(products) + place * stride;
  }

  int64_t num_items() const {
    return int64_t{(num_rows + kDownRows - 1) / kDownRows} * ((stride + kItemRanks - 1) / kItemRanks);
  }
};

// The sums of `a` where the lane's bit is zero, and of `b` where it is one, over the two lanes that differ in it.
template <int kBit>
inline Floats halve(Floats a, Floats b) {
  constexpr Ints kOwn = make_ints([](int lane) { return lane & kBit ? lane + kLanes : lane; });
  return __builtin_shuffle(a, b, kOwn) + __builtin_shuffle(a, b, kOwn ^ kBit);
}

// Sums all lanes of four vectors at once, which takes a third of what one after another does.
inline void sum_lanes(const Floats* vectors, float* sums) {
  constexpr int kHigh = kLanes / 2, kLow = kLanes / 4;
  Floats all = halve<kLow>(halve<kHigh>(vectors[0], vectors[1]), halve<kHigh>(vectors[2], vectors[3]));
  if constexpr (kLow > 2) all += swap_lanes<2>(all);
  all += swap_lanes<1>(all);
  sums[0] = all[0];
  sums[1] = all[kHigh];
  sums[2] = all[kLow];
  sums[3] = all[kHigh + kLow];
}

// Multiplies the inputs from `first` on, one vector after another, by K ranks of weights. Meanwhile memory is asked for
// those at `next`, of the adapter that comes then: the processor does not foresee where its matrix begins.
template <typename W, typename T, int R, int K>
inline void down_rest(const W* weights, const W* next, int size, int first, const T* const* rows, Floats (*sums)[K]) {
  int i = first;
  for (; i + kLanes <= size; i += kLanes) {
    Floats x[R];
    for (int r = 0; r < R; ++r) x[r] = load(rows[r] + i);
    for (int k = 0; k < K; ++k) {
      const Floats weight = load(weights + int64_t{k} * size + i);
      __builtin_prefetch(next + int64_t{k} * size + i, 0, 2);
      for (int r = 0; r < R; ++r) sums[r][k] += weight * x[r];
    }
  }
  if (i == size) return;
  alignas(64) float weight[kLanes], x[kLanes];
  for (int r = 0; r < R; ++r) {
    widen(rows[r] + i, x, size - i, kLanes);
    for (int k = 0; k < K; ++k) {
      widen(weights + int64_t{k} * size + i, weight, size - i, kLanes);
      sums[r][k] += load(weight) * load(x);
    }
  }
}

template <typename W, typename T, int R, int K>
inline void down_sums(const W* weights, const W* next, int size, const T* const* rows, Floats (*sums)[K]) {
  down_rest<W, T, R, K>(weights, next, size, 0, rows, sums);
}

#ifdef __AVX512BF16__
template <typename W, typename T, int R, int K>
inline void down_sums(const bfloat16* weights, const bfloat16* next, int size, const bfloat16* const* rows, Floats (*sums)[K]) {
  int i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    __m512bh x[R];
    for (int r = 0; r < R; ++r) x[r] = load_raw<__m512bh>(rows[r] + i);
    for (int k = 0; k < K; ++k) {
      const auto weight = load_raw<__m512bh>(weights + int64_t{k} * size + i);
      __builtin_prefetch(next + int64_t{k} * size + i, 0, 2);
      for (int r = 0; r < R; ++r) sums[r][k] = (Floats)_mm512_dpbf16_ps((__m512)sums[r][k], weight, x[r]);
    }
  }
  down_rest<W, T, R, K>(weights, next, size, i, rows, sums);
}
#endif

template <typename W, typename T, int R, int K>
__attribute__((noinline)) void down_tile(const LowRank& adapter, const void* next, const T* const* rows,
                                         T* const* products, int rank) {
  Floats sums[R][K];
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < K; ++k) sums[r][k] = Floats{};
  const int size = adapter.num_inputs;
  const int64_t first = int64_t{rank} * size;
  down_sums<W, T, R, K>(static_cast<const W*>(adapter.down) + first, static_cast<const W*>(next) + first, size, rows, sums);
  for (int r = 0; r < R; ++r) {
    float totals[K];
    if constexpr (K == 4)
      sum_lanes(sums[r], totals);
    else
      for (int k = 0; k < K; ++k) totals[k] = horizontal_sum(sums[r][k]);
    for (int k = 0; k < K; ++k) store_scalar(products[r] + rank + k, totals[k] * adapter.scales[rank + k]);
  }
}

template <typename W, typename T, int R>
inline void down_ranks(const LowRank& adapter, const void* next, const T* const* rows, T* const* products, int rank,
                       int end) {
  for (; rank + kDownRanks <= end; rank += kDownRanks) down_tile<W, T, R, kDownRanks>(adapter, next, rows, products, rank);
  for (; rank < end; ++rank) down_tile<W, T, R, 1>(adapter, next, rows, products, rank);
}

template <typename W, typename T, int R = kDownRows>
inline void down_some(int count, const LowRank& adapter, const void* next, const T* const* rows, T* const* products,
                      int rank, int end) {
  if constexpr (R > 0) {
    if (count == R) return down_ranks<W, T, R>(adapter, next, rows, products, rank, end);
    down_some<W, T, R - 1>(count, adapter, next, rows, products, rank, end);
  }
}

// Multiplies up to kDownRows rows, of one adapter, by some ranks of its first matrix.
template <typename T>
inline void multiply_down(const LowRank& adapter, const void* next, int count, const T* const* rows, T* const* products,
                          int rank, int end) {
  if constexpr (std::is_same_v<T, float>)
    if (adapter.dtype == kFloat32) return down_some<float, T>(count, adapter, next, rows, products, rank, end);
  down_some<bfloat16, T>(count, adapter, next, rows, products, rank, end);
}

// Multiplies all rows by the first matrices of their adapters; every thread of the team calls it.
template <typename T>
void multiply_down(LowRankTable table, const AdapterRows& adapters, const T* x, int64_t x_stride,
                   Operation& operation) {
  const int tiles = (adapters.num_rows + kDownRows - 1) / kDownRows, threads = omp_get_num_threads();
  share(operation, adapters.num_items(), [&](int64_t item) {
    const int end = std::min<int>((item % tiles + 1) * kDownRows, adapters.num_rows);
    const int first_rank = static_cast<int>(item / tiles) * kItemRanks;
    for (int place = static_cast<int>(item % tiles) * kDownRows; place < end;) {
      const int slot = adapters.slots[place];
      const T* rows[kDownRows];
      T* products[kDownRows];
      int count = 0;
      for (; place < end && adapters.slots[place] == slot; ++place, ++count) {
        rows[count] = x + adapters.rows[place] * x_stride;
        products[count] = adapters.products_at<T>(place);
      }
      const LowRank* adapter = table[slot];
      if (!adapter) continue;
      // What this thread likely takes then.
      const int64_t then = place < end ? place : (item % tiles + threads) * kDownRows;
      const LowRank* next = then < adapters.num_rows ? table[adapters.slots[then]] : nullptr;
      multiply_down<T>(*adapter, next ? next->down : adapter->down, count, rows, products, first_rank,
                       std::min(first_rank + kItemRanks, adapter->rank));
    }
  });
}

// Adds what the ranks of half a panel are times their products, two ranks at a time in bfloat16. The last of an odd
// number has a rank of zeros beside it.
template <typename T>
inline void add_half(const LowRank& adapter, const LowRankHalf& half, const T* products, Floats* sums) {
  constexpr int kVectors = kPanelVectors / 2;
  products += half.first;
  if constexpr (std::is_same_v<T, float>) {
    if (adapter.dtype == kFloat32) {
      const auto* weights = static_cast<const float*>(adapter.up) + half.offset;
      for (int rank = 0; rank < half.count; ++rank, weights += kHalfPanel)
        for (int v = 0; v < kVectors; ++v) sums[v] += load(weights + v * kLanes) * products[rank];
      return;
    }
  }
  const auto* weights = reinterpret_cast<const int32_t*>(static_cast<const bfloat16*>(adapter.up) + half.offset);
  for (int rank = 0; rank < half.count; rank += 2, weights += kHalfPanel) {
    for (int v = 0; v < kVectors; ++v) {
      const Ints pairs = load_raw<Ints>(weights + v * kLanes);
      if constexpr (std::is_same_v<T, float>) {
        sums[v] += (Floats)(pairs << 16) * products[rank];
        sums[v] += (Floats)(pairs & ~0xffff) * products[rank + 1];
      } else {
        sums[v] = multiply_word(sums[v], pairs, load_raw<int32_t>(products + rank), products);
      }
    }
  }
}

// Adds the products of an adapter's second matrix to the sums of a panel.
template <typename T>
__attribute__((noinline)) void add_up(const LowRank& adapter, const T* products, int panel, Floats* sums) {
  for (int half = 0; half < 2; ++half)
    add_half(adapter, adapter.halves[2 * panel + half], products, sums + half * kPanelVectors / 2);
}

// Takes the row of a token from the first matrix of an adapter beside an embedding, [vocab_size, rank].
template <typename T>
inline void look_up(const LowRank& adapter, int64_t token, T* products) {
  const int64_t first = token * adapter.rank;
  for (int rank = 0; rank < adapter.rank; ++rank) {
    const float value = adapter.dtype == kBFloat16 ? to_float(static_cast<const bfloat16*>(adapter.down)[first + rank])
                                                   : static_cast<const float*>(adapter.down)[first + rank];
    store_scalar(products + rank, value * adapter.scales[rank]);
  }
}

// What a multiplication adds to the sums of each row and panel: the products of the row's adapter.
template <typename T>
struct AddedAdapters {
  LowRankTable table;
  const AdapterRows& adapters;
  int num_rows, num_panels;

  void operator()(int64_t row, int panel, Floats* sums) const {
    if (row + kTileRows < num_rows)
      ask(row + kTileRows, panel);
    else
      ask(row + kTileRows - num_rows, panel + omp_get_num_threads());
    const int place = adapters.places[row];
    if (place < 0) return;
    if (const LowRank* adapter = table[adapters.slots[place]])
      add_up(*adapter, adapters.products_at<T>(place), panel, sums);
  }

  // Asks memory for what a row of the next tile, or of the panel that this thread likely takes next, is going to read:
  // the few lines of each row lie far apart, and the processor does not foresee them.
  void ask(int64_t row, int panel) const {
    if (row >= num_rows || panel >= num_panels || adapters.places[row] < 0) return;
    const LowRank* adapter = table[adapters.slots[adapters.places[row]]];
    if (!adapter) return;
    const int size = adapter->dtype == kBFloat16 ? 2 : 4;
    for (int half = 0; half < 2; ++half) {
      const LowRankHalf& of = adapter->halves[2 * panel + half];
      const char* weights = static_cast<const char*>(adapter->up) + of.offset * size;
      for (int64_t byte = 0; byte < int64_t{of.count} * kHalfPanel * size; byte += kLine)
        __builtin_prefetch(weights + byte, 0, 2);
    }
  }
};

}  // namespace headrace

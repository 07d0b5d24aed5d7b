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
constexpr int kDownRows = 4;   // Rows that share each read of the first matrix.
constexpr int kItemRanks = 16;
constexpr int kBlock = 2 * kLanes;  // Inputs that are multiplied at a time.

// Which ranks the features of half a panel are made of, and how many ranks of others stand before theirs.
struct LowRankHalf {
  int32_t offset;
  int16_t first, count;
};

// The two matrices of an adapter beside one matrix of the model. All that is read lies together, in this order.
struct LowRank {
  const LowRankHalf* halves;  // [2 * panels + 1], an end behind the last.
  const float* scales;        // [rank].
  const void* down;  // [rank, row_size]; in bfloat16 beside rows of fp32 each word has an input of both halves of a block.
  const void* up;    // For each half panel, [count, kHalfPanel]; in bfloat16 pairs of ranks, as in panel.h.
  int32_t rank, num_inputs;
  int32_t dtype;  // Of both: bfloat16, or float32 where rows are of that type.

  int element_size() const { return dtype == kBFloat16 ? 2 : 4; }
  int row_size() const { return (num_inputs + kBlock - 1) / kBlock * kBlock; }

  // Where the weights of a half panel begin.
  int64_t half_byte(int half) const { return int64_t{halves[half].offset} * kHalfPanel * element_size(); }
};

// By an adapter's slot, with a rank of zero where it leaves the matrix as it is. Null where no adapter can be.
using LowRankTable = const LowRank*;

// Returns what the adapter in a slot has beside a matrix; null if nothing.
inline const LowRank* adapter_in(LowRankTable table, int slot) { return table[slot].rank ? table + slot : nullptr; }

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

// Sums all lanes of K vectors at once, in the order of horizontal_sum: the sum of one is in lane k * kLanes / K.
template <int K, int kDistance = kLanes / 2>
inline Floats sum_lanes(const Floats* vectors) {
  if constexpr (kDistance == 0) {
    return vectors[0];
  } else if constexpr (K == 1) {
    const Floats sum = vectors[0] + swap_lanes<kDistance>(vectors[0]);
    return sum_lanes<1, kDistance / 2>(&sum);
  } else {
    Floats halves[K / 2];
    for (int k = 0; k < K / 2; ++k) halves[k] = halve<kDistance>(vectors[k], vectors[k + K / 2]);
    return sum_lanes<K / 2, kDistance / 2>(halves);
  }
}

// A block of a row's inputs, and how it is multiplied by a block of weights.
template <typename W, typename T>
struct InputBlock {
  Floats first, second;

  explicit InputBlock(const T* x) : first(load(x)), second(load(x + kLanes)) {}

  Floats add_to(Floats sum, const W* weights) const {
    if constexpr (std::is_same_v<W, T>) {
      sum += load(weights) * first;
      return sum + load(weights + kLanes) * second;
    } else {
      const Ints pairs = load_raw<Ints>(weights);
      sum += (Floats)(pairs << 16) * first;
      return sum + (Floats)(pairs & ~0xffff) * second;
    }
  }
};

#ifdef __AVX512BF16__
template <>
struct InputBlock<bfloat16, bfloat16> {
  __m512bh pairs;

  explicit InputBlock(const bfloat16* x) : pairs(load_raw<__m512bh>(x)) {}

  Floats add_to(Floats sum, const bfloat16* weights) const {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, load_raw<__m512bh>(weights), pairs);
  }
};
#endif

template <typename W, typename T, int R, int K>
inline void multiply_block(const W* weights, int stride, const T* const* rows, int first, Floats (*sums)[K]) {
  for (int r = 0; r < R; ++r) {
    const InputBlock<W, T> block(rows[r] + first);
    for (int k = 0; k < K; ++k) sums[r][k] = block.add_to(sums[r][k], weights + int64_t{k} * stride);
  }
}

// Multiplies R rows by K ranks of weights. Meanwhile memory is asked for those at `next`, of the adapter that comes then:
// the processor does not foresee where its matrix begins.
template <typename W, typename T, int R, int K>
__attribute__((noinline)) void down_tile(const LowRank& adapter, const void* next, const T* const* rows,
                                         T* const* products, int rank) {
  Floats sums[R][K];
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < K; ++k) sums[r][k] = Floats{};
  const int size = adapter.num_inputs, stride = adapter.row_size();
  const W* weights = static_cast<const W*>(adapter.down) + int64_t{rank} * stride;
  const W* ahead = static_cast<const W*>(next) + int64_t{rank} * stride;
  int i = 0;
  for (; i + kBlock <= size; i += kBlock) {
    for (int k = 0; k < K; ++k)
      for (int place = 0; place < kBlock; place += kLine / sizeof(W))
        __builtin_prefetch(ahead + int64_t{k} * stride + i + place, 0, 3);
    multiply_block<W, T, R, K>(weights + i, stride, rows, i, sums);
  }
  if (i < size) {
    alignas(64) T rest[R][kBlock] = {};
    const T* ends[R];
    for (int r = 0; r < R; ++r) {
      std::copy(rows[r] + i, rows[r] + size, rest[r]);
      ends[r] = rest[r];
    }
    multiply_block<W, T, R, K>(weights + i, stride, ends, 0, sums);
  }
  const Floats scales = load(adapter.scales + rank);  // And what lies behind them, which is the first matrix.
  for (int r = 0; r < R; ++r) {
    constexpr Ints kPlaces = make_ints([](int lane) { return lane % K * (kLanes / K); });
    T totals[kLanes];
    store(totals, __builtin_shuffle(sum_lanes<K>(sums[r]), kPlaces) * scales);
    std::memcpy(products[r] + rank, totals, K * sizeof(T));
  }
}

// As many ranks at a time as there are registers for their sums.
template <typename W, typename T, int R, int K = (R <= 2 ? 8 : 4)>
inline void down_ranks(const LowRank& adapter, const void* next, const T* const* rows, T* const* products, int rank,
                       int end) {
  for (; rank + K <= end; rank += K) down_tile<W, T, R, K>(adapter, next, rows, products, rank);
  if constexpr (K > 1) down_ranks<W, T, R, (K > 4 ? 4 : 1)>(adapter, next, rows, products, rank, end);
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
      const LowRank* adapter = adapter_in(table, slot);
      if (!adapter) continue;
      // What this thread likely takes then.
      const int64_t then = place < end ? place : (item % tiles + threads) * kDownRows;
      const LowRank* next = then < adapters.num_rows ? adapter_in(table, adapters.slots[then]) : nullptr;
      multiply_down<T>(*adapter, next ? next->down : adapter->down, count, rows, products, first_rank,
                       std::min(first_rank + kItemRanks, adapter->rank));
    }
  });
}

// Adds what the ranks of one or two halves of a panel, as many of each, are times their products: two ranks at a time in
// bfloat16, where the last of an odd number has a rank of zeros beside it.
template <typename T, int kHalves>
inline void add_ranks(const LowRank& adapter, const LowRankHalf* halves, const T* products, Floats* sums) {
  constexpr int kVectors = kPanelVectors / 2;
  if constexpr (std::is_same_v<T, float>) {
    if (adapter.dtype == kFloat32) {
      const auto* up = static_cast<const float*>(adapter.up);
      for (int rank = 0; rank < halves->count; ++rank) {
        for (int h = 0; h < kHalves; ++h) {
          const float* weights = up + int64_t{halves[h].offset + rank} * kHalfPanel;
          for (int v = 0; v < kVectors; ++v)
            sums[h * kVectors + v] += load(weights + v * kLanes) * products[halves[h].first + rank];
        }
      }
      return;
    }
  }
  const auto* up = static_cast<const int32_t*>(adapter.up);
  for (int rank = 0; rank < halves->count; rank += 2) {
    for (int h = 0; h < kHalves; ++h) {
      const int32_t* weights = up + int64_t{halves[h].offset + rank} * kHalfPanel / 2;
      const T* inputs = products + halves[h].first + rank;
      for (int v = 0; v < kVectors; ++v) {
        Floats& sum = sums[h * kVectors + v];
        const Ints pairs = load_raw<Ints>(weights + v * kLanes);
        if constexpr (std::is_same_v<T, float>) {
          sum += (Floats)(pairs << 16) * inputs[0];
          sum += (Floats)(pairs & ~0xffff) * inputs[1];
        } else {
          sum = multiply_word(sum, pairs, load_raw<int32_t>(inputs), products);
        }
      }
    }
  }
}

// Adds the products of an adapter's second matrix to the sums of a panel. These are copied vector by vector: as an array
// they went through memory in pieces of half a vector, and to read a vector the processor waited until both were written.
template <typename T>
__attribute__((noinline)) void add_up(const LowRank& adapter, const T* products, int panel, Floats* target) {
  const LowRankHalf* halves = adapter.halves + 2 * panel;
  static_assert(kPanelVectors == 4);
  Floats sums[] = {target[0], target[1], target[2], target[3]};
  if (halves[0].count == halves[1].count) {
    add_ranks<T, 2>(adapter, halves, products, sums);
  } else {
    add_ranks<T, 1>(adapter, halves, products, sums);
    add_ranks<T, 1>(adapter, halves + 1, products, sums + kPanelVectors / 2);
  }
  target[0] = sums[0], target[1] = sums[1], target[2] = sums[2], target[3] = sums[3];
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

// What a multiplication adds to the sums of each row and panel: the products of the row's adapter. Each row reads its own
// memory, few lines in each place, which the processor does not foresee: it is asked for while other rows are multiplied.
template <typename T>
struct AddedAdapters {
  static constexpr bool kReads = true;
  LowRankTable table;
  const AdapterRows& adapters;
  int num_rows, num_panels;

  void operator()(int64_t row, int panel, Floats* sums) const {
    const int place = adapters.places[row];
    if (place < 0) return;
    if (const LowRank* adapter = adapter_in(table, adapters.slots[place]))
      add_up(*adapter, adapters.products_at<T>(place), panel, sums);
  }

  // Asks memory for what the tile at a row reads, all at once.
  void ask(int64_t row, int panel) const {
    RangeList list_of_tile;
    list(row, panel, list_of_tile);
    for (int i = 0; i < list_of_tile.count; ++i)
      for (const char* line = list_of_tile.ranges[i].begin; line < list_of_tile.ranges[i].end; line += kLine)
        __builtin_prefetch(line, 0, 2);
  }

  // Returns the slot of a row's adapter; below zero without.
  int slot_of(int64_t row) const {
    const int place = adapters.places[row];
    return place < 0 ? -1 : adapters.slots[place];
  }

  // Lists what the tile at a row reads, and the one before it did not; behind the last row that of the panel that this
  // thread likely takes next.
  void list(int64_t row, int panel, RangeList& ranges) const {
    int before = -1;
    if (row >= num_rows) {
      row = 0;
      panel += omp_get_num_threads();
      if (panel >= num_panels) return;
    } else if (row > 0) {
      before = slot_of(row - 1);
    }
    const int64_t end = std::min<int64_t>(row + kTileRows, num_rows);
    for (; row < end; ++row) {
      const int slot = slot_of(row);
      if (slot == before || slot < 0) continue;
      before = slot;
      if (const LowRank* adapter = adapter_in(table, slot))
        ranges.add(adapter->up, adapter->half_byte(2 * panel), adapter->half_byte(2 * panel + 2));
    }
  }
};

}  // namespace headrace

// The arithmetic of paged attention: rows of queries advanced by one tile of keys and values at a time.
#pragma once

#include <algorithm>
#include <cmath>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "../simd.h"

namespace headrace {

constexpr int kTile = kLanes;      // Keys a tile at most: their scores fill one vector.
constexpr int kMaxHeadDim = 256;
constexpr int kMaxGroup = 64;

// State of the rows of one item of work, all in the first two cache levels.
struct Rows {
  int count;
  int head_dim_padded;
  int first_position[kMaxGroup];  // First key each row sees,
  int last_position[kMaxGroup];   // and the last: its own.
  float maximum[kMaxGroup];
  alignas(64) Floats sum[kMaxGroup];
  alignas(64) float query[kMaxGroup * kMaxHeadDim];
  alignas(64) bfloat16 narrow_query[kMaxGroup * kMaxHeadDim];  // The same, when the keys are multiplied as bf16.
  float scale;
  alignas(64) float output[kMaxGroup * kMaxHeadDim];
};

template <typename Cache>
struct Tile {
  const Cache* keys;
  const Cache* values;
  int64_t stride;  // Elements from one key to the next.
  int start;       // Position of the first key.
  int count;
  const char* next_keys;  // The tile after this one, to prefetch; null when there is none.
  const char* next_values;
  int64_t next_stride_bytes;
  int row_bytes;
};

// Sums the lanes of each of kTile vectors: lane j of the result is the sum of partial[j].
template <int kGroup>
inline Floats reduce_each(Floats* partial) {
  if constexpr (kGroup == 1) {
    return partial[0];
  } else {
    constexpr Ints low = pairing_mask<kGroup>(0), high = pairing_mask<kGroup>(kGroup / 2);
    for (int i = 0; i < kGroup / 2; ++i) {
      const Floats a = partial[i], b = partial[i + kGroup / 2];
      partial[i] = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
    }
    return reduce_each<kGroup / 2>(partial);
  }
}

// Asks for the key and value `j` of the next tile, so that memory works while this tile is computed. Only for items of
// one token: those of a prompt find the keys in the cache, where the item before has left them. Into the second
// level: half the time from memory that a prefetch into the first level takes (Zen 4).
template <typename Cache>
inline void prefetch(const Tile<Cache>& tile, int j) {
  const int64_t offset = j * tile.next_stride_bytes;
  for (int byte = 0; byte < tile.row_bytes; byte += 64) {
    __builtin_prefetch(tile.next_keys + offset + byte, 0, 2);
    __builtin_prefetch(tile.next_values + offset + byte, 0, 2);
  }
}

// Partial dot products of one key with R queries, the lanes still to be summed.
template <int kVectors, int R, typename Cache>
inline void multiply_key(const Rows& rows, int row, const Cache* key, Floats* dot) {
  const int vectors = kVectors ? kVectors : rows.head_dim_padded / kLanes;
  const int width = vectors * kLanes;
  for (int v = 0; v < vectors; ++v) {
    const Floats k = load(key + v * kLanes);
    for (int r = 0; r < R; ++r) dot[r] += load(rows.query + (row + r) * width + v * kLanes) * k;
  }
}

#ifdef __AVX512BF16__
// The same without widening, two elements a lane.
template <int kVectors, int R>
inline void multiply_key_pairs(const Rows& rows, int row, const bfloat16* key, Floats* dot) {
  constexpr int kWidth = kVectors * kLanes;
  for (int v = 0; v < kWidth; v += 2 * kLanes) {
    const auto k = load_raw<__m512bh>(key + v);
    for (int r = 0; r < R; ++r) {
      const auto q = load_raw<__m512bh>(rows.narrow_query + (row + r) * kWidth + v);
      dot[r] = (Floats)_mm512_dpbf16_ps((__m512)dot[r], q, k);
    }
  }
}
#endif

// Scores of R rows and a tile, lanes beyond its keys undefined.
template <int kVectors, int R, bool kPairs, typename Cache>
inline void score(const Rows& rows, int row, const Tile<Cache>& tile, Floats* scores) {
  Floats partial[R][kTile];
  for (int j = 0; j < tile.count; ++j) {
    if (tile.next_keys) prefetch(tile, j);
    Floats dot[R] = {};
#ifdef __AVX512BF16__
    if constexpr (kPairs)
      multiply_key_pairs<kVectors, R>(rows, row, tile.keys + j * tile.stride, dot);
    else
#endif
      multiply_key<kVectors, R>(rows, row, tile.keys + j * tile.stride, dot);
    for (int r = 0; r < R; ++r) partial[r][j] = dot[r];
  }
  for (int j = tile.count; j < kTile; ++j)
    for (int r = 0; r < R; ++r) partial[r][j] = Floats{};
  for (int r = 0; r < R; ++r) scores[r] = reduce_each<kLanes>(partial[r]) * rows.scale;
}

// Brings a row's maximum, sum and output up to date with a tile's scores; returns the keys' weights.
inline Floats weigh(Rows& rows, int row, Ints seen, Floats scores) {
  scores = seen ? scores : splat(-INFINITY);
  const int width = rows.head_dim_padded;
  const float previous = rows.maximum[row];
  const float maximum = std::max(previous, horizontal_max(scores));
  const Floats weight = seen ? exp_nonpositive(scores - maximum) : Floats{};
  if (maximum != previous) {
    const Floats correction = exp_nonpositive(splat(previous - maximum));
    rows.maximum[row] = maximum;
    rows.sum[row] *= correction;
    float* output = rows.output + row * width;
    for (int i = 0; i < width; i += kLanes) store(output + i, load(output + i) * correction);
  }
  rows.sum[row] += weight;
  return weight;
}

// Adds a tile's values, weighted, to the outputs of R rows. A key that a row does not see has weight 0 there.
template <int kVectors, int R, typename Cache>
inline void add_values(Rows& rows, int row, const Tile<Cache>& tile, int begin, int end, const float (*weights)[kTile]) {
  constexpr int kStep = kVectors ? kVectors : 1;
  const int width = rows.head_dim_padded;
  for (int first = 0; first < width; first += kStep * kLanes) {
    Floats sums[R][kStep];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kStep; ++v) sums[r][v] = load(rows.output + (row + r) * width + first + v * kLanes);
    for (int j = begin; j < end; ++j) {
      const Cache* value = tile.values + j * tile.stride + first;
      for (int v = 0; v < kStep; ++v) {
        const Floats x = load(value + v * kLanes);
        for (int r = 0; r < R; ++r) sums[r][v] += x * weights[r][j];
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kStep; ++v) store(rows.output + (row + r) * width + first + v * kLanes, sums[r][v]);
  }
}

// Advances R rows by one tile. kVectors is the padded head_dim in vectors, or 0 when only known at run time.
template <int kVectors, int R, bool kPairs, typename Cache>
inline void advance(Rows& rows, int row, const Tile<Cache>& tile) {
  int begin[R], end[R], first = tile.count, last = 0;
  for (int r = 0; r < R; ++r) {
    begin[r] = std::max(rows.first_position[row + r] - tile.start, 0);
    end[r] = std::min(rows.last_position[row + r] + 1 - tile.start, tile.count);
    if (begin[r] >= end[r]) continue;
    first = std::min(first, begin[r]);
    last = std::max(last, end[r]);
  }
  if (first >= last) return;
  Floats scores[R];
  score<kVectors, R, kPairs>(rows, row, tile, scores);
  alignas(64) float weights[R][kTile] = {};
  const Ints lanes = kLaneNumbers;
  for (int r = 0; r < R; ++r)
    if (begin[r] < end[r]) store(weights[r], weigh(rows, row + r, (lanes >= begin[r]) & (lanes < end[r]), scores[r]));
  add_values<kVectors, R>(rows, row, tile, first, last, weights);
}

// Advances the rows from `row` to `end`, fewer than kTogether.
template <int kVectors, int R, bool kPairs, typename Cache>
inline void advance_rest(Rows& rows, int row, int end, const Tile<Cache>& tile) {
  if constexpr (R > 0) {
    if (end - row == R) return advance<kVectors, R, kPairs>(rows, row, tile);
    advance_rest<kVectors, R - 1, kPairs>(rows, row, end, tile);
  }
}

template <int kVectors, bool kPairs, typename Cache>
void advance_all(Rows& rows, int row, int end, Tile<Cache>& tile) {
  constexpr int kTogether = kVectors == 0 ? 1 : kLanes < 16 || kVectors > 4 ? 2 : 4;
  for (; row + kTogether <= end; row += kTogether) {
    advance<kVectors, kTogether, kPairs>(rows, row, tile);
    tile.next_keys = nullptr;
  }
  advance_rest<kVectors, kTogether - 1, kPairs>(rows, row, end, tile);
}

template <bool kPairs, typename Cache>
void advance_all(Rows& rows, int row, int end, Tile<Cache>& tile) {
  switch (rows.head_dim_padded / kLanes) {
    case 2: return advance_all<2, kPairs>(rows, row, end, tile);
    case 4: return advance_all<4, kPairs>(rows, row, end, tile);
    case 8: return advance_all<8, kPairs>(rows, row, end, tile);
    default: return advance_all<0, false>(rows, row, end, tile);
  }
}

}  // namespace headrace

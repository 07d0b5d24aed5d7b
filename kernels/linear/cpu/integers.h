// Tiles of integer weights times integer inputs. Sums of products are exact, so they need no order.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "rows.h"

namespace headrace {

// Adds to each lane the products of its four unsigned bytes with its four signed ones.
inline Ints add_products(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)unsigned_bytes, (__m256i)signed_bytes);
#else
  typedef int16_t Shorts __attribute__((vector_size(kLanes * 4)));
  const Shorts low = (Shorts)(unsigned_bytes & 0x00ff00ff), high = (Shorts)((unsigned_bytes >> 8) & 0x00ff00ff);
  const Shorts first = (Shorts)((Shorts)signed_bytes << 8) >> 8, second = (Shorts)signed_bytes >> 8;
#if defined(__AVX512BW__)
  return sum + (Ints)_mm512_madd_epi16((__m512i)low, (__m512i)first) +
         (Ints)_mm512_madd_epi16((__m512i)high, (__m512i)second);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return sum + (Ints)_mm256_madd_epi16((__m256i)low, (__m256i)first) +
         (Ints)_mm256_madd_epi16((__m256i)high, (__m256i)second);
#else
  for (int byte = 0; byte < 4; ++byte)
    sum += ((unsigned_bytes >> (8 * byte)) & 255) * ((signed_bytes << (24 - 8 * byte)) >> 24);
  return sum;
#endif
#endif
}

// Four columns of a row's inputs, from `column` on, in every lane.
inline Ints four_inputs(const Rows& rows, int row, int r, int column) {
  return Ints{} + load_raw<int32_t>(rows.values + (row + r) * rows.row_bytes + column);
}

// Adds the products of a run of columns to R rows of sums.
template <int kBits, int R>
inline void add_columns(Ints (*sums)[kHalf], const int32_t* weights, const Rows& rows, int row, int column, int count) {
  constexpr int kColumns = 32 / kBits;
  for (int word = 0; word < count / kColumns; ++word, column += kColumns, weights += kHalf * kLanes) {
    Ints words[kHalf];
    for (int v = 0; v < kHalf; ++v) words[v] = load_raw<Ints>(weights + v * kLanes);
    for (int v = 0; v < kHalf; ++v) read_ahead(weights + v * kLanes);
    if constexpr (kBits == 4) {
      for (int r = 0; r < R; ++r) {
        const Ints input = four_inputs(rows, row, r, column);
        for (int v = 0; v < kHalf; ++v) sums[r][v] = add_products(sums[r][v], words[v] & 0x0f0f0f0f, input);
      }
      for (int r = 0; r < R; ++r) {
        const Ints input = four_inputs(rows, row, r, column + 4);
        for (int v = 0; v < kHalf; ++v) sums[r][v] = add_products(sums[r][v], (words[v] >> 4) & 0x0f0f0f0f, input);
      }
    } else {
      for (int r = 0; r < R; ++r) {
        const Ints input = four_inputs(rows, row, r, column);
        for (int v = 0; v < kHalf; ++v) sums[r][v] = add_products(sums[r][v], words[v], input);
      }
    }
  }
}

template <int kBits, int kSegment, int R>
__attribute__((noinline)) void multiply_groups(const QuantizedLinear& linear, const Rows& rows, int row,
                                               int panel, int half, Floats (*result)[kPanelVectors]) {
  constexpr int kWords = kSegment * kBits / 32 * kHalf * kLanes;
  const int32_t* weights = linear.half_weights(panel, half);
  const int columns = linear.num_columns(), groups = linear.num_groups();
  Floats totals[R][kHalf] = {};
  int column = 0;
  for (int group = 0; group < groups; ++group) {
    const int64_t index = linear.group_index(panel, half, group);
    const int end = group + 1 < groups ? column + linear.group_size : columns;
    Floats scales[kHalf];
    for (int v = 0; v < kHalf; ++v) scales[v] = load_scale(linear, index + v * kLanes);
    for (; column < end; column += kSegment, weights += kWords) {
      Ints sums[R][kHalf] = {};
      add_columns<kBits, R>(sums, weights, rows, row, column, kSegment);
      for (int r = 0; r < R; ++r) {
        const float factor = rows.factors[int64_t{row + r} * rows.num_factors + column / kSegment];
        for (int v = 0; v < kHalf; ++v)
          totals[r][v] += __builtin_convertvector(sums[r][v], Floats) * (scales[v] * factor);
      }
    }
    for (int v = 0; v < kHalf; ++v) {
      const Floats offset = load_offset(linear, index + v * kLanes, scales[v]);
      for (int r = 0; r < R; ++r) totals[r][v] += offset * rows.sums[int64_t{row + r} * rows.num_groups + group];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kHalf; ++v) result[r][half * kHalf + v] = totals[r][v];
}

// Multiplies by both halves at once: sums of integers need no registers beside them for totals.
template <int R>
__attribute__((noinline)) void multiply_tokens(const QuantizedLinear& linear, const Rows& rows, int row, int panel,
                                                Floats (*result)[kPanelVectors]) {
  const int32_t *weights = linear.half_weights(panel, 0), *other_weights = linear.half_weights(panel, 1);
  Ints sums[R][kPanelVectors];
  // Weights are stored 128 too large.
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = Ints{} - 128 * static_cast<int32_t>(rows.sums[row + r]);
  for (int column = 0; column < linear.num_columns(); column += 4) {
    Ints words[kPanelVectors];
    for (int v = 0; v < kHalf; ++v) {
      const int64_t place = int64_t{column / 4 * kHalf + v} * kLanes;
      words[v] = load_raw<Ints>(weights + place);
      words[kHalf + v] = load_raw<Ints>(other_weights + place);
      read_ahead(weights + place);
      read_ahead(other_weights + place);
    }
    for (int r = 0; r < R; ++r) {
      const Ints input = four_inputs(rows, row, r, column);
      for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = add_products(sums[r][v], words[v], input);
    }
  }
  for (int v = 0; v < kPanelVectors; ++v) {
    const Floats scale = load_scale(linear, linear.group_index(panel, 0, 0) + v * kLanes);
    for (int r = 0; r < R; ++r)
      result[r][v] = __builtin_convertvector(sums[r][v], Floats) * rows.factors[row + r] * scale;
  }
}

}  // namespace headrace

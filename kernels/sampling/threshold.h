// The smallest scaled logit that a row keeps under `min_p`, `top_k` and `top_p`, without sorting the vocabulary.
//
// The maxima of the tiles bound it from below, so that few tokens get onto a list. Pivots taken from the list narrow it down
// until the rest is short enough to be sorted.
#pragma once

#include <cfloat>

#include "row.h"

namespace headrace {

constexpr int kPivots = 8;
constexpr int kSamples = 4 * kPivots;
constexpr int kSortedLength = 128;
constexpr int kMaxRounds = 40;  // Then the rest is sorted: only a list made to defeat the pivots takes as many.

// Appends those lanes to a list that are marked; may write `kLanes` floats. Returns the new length.
inline int append(float* list, int length, Floats values, Ints is_marked) {
#ifdef __AVX512F__
  const __mmask16 mask = _mm512_test_epi32_mask((__m512i)is_marked, (__m512i)is_marked);
  if (!mask) return length;
  store(list + length, (Floats)_mm512_maskz_compress_ps(mask, (__m512)values));
  return length + __builtin_popcount(mask);
#else
  for (int lane = 0; lane < kLanes; ++lane)
    if (is_marked[lane]) list[length++] = values[lane];
  return length;
#endif
}

// Moves the values in [low, high) of a list to another or to the start of the same; returns how many there are.
inline int keep_between(const float* list, int length, float low, float high, float* kept) {
  int count = 0;
  each_vector(list, length,
              [&](Floats values, int) { count = append(kept, count, values, (values >= low) & (values < high)); });
  return count;
}

// For each pivot, the number or the weight of the values that are not smaller.
template <bool kCounts>
inline void sums_from(const float* list, int length, const float* pivots, double* sums) {
  constexpr int kBlock = 64 * kLanes;  // Summed in float32.
  std::fill(sums, sums + kPivots, 0.0);
  for (int start = 0; start < length; start += kBlock) {
    Floats parts[kPivots] = {};
    each_vector(list + start, std::min(kBlock, length - start), [&](Floats values, int) {
      const Floats amounts = kCounts ? splat(1.0f) : exp_nonpositive(values);
      for (int pivot = 0; pivot < kPivots; ++pivot)
        parts[pivot] += values >= pivots[pivot] ? amounts : splat(0.0f);
    });
    for (int pivot = 0; pivot < kPivots; ++pivot) sums[pivot] += horizontal_sum(parts[pivot]);
  }
}

inline double weight_of(const float* list, int length) {
  double total = 0.0;
  each_vector(list, length, [&](Floats values, int) { total += horizontal_sum(weights_of(values, kNoWeight)); });
  return total;
}

// Sorts the list; otherwise as `find_threshold`.
template <bool kCounts>
inline float find_in_sorted(float* list, int length, double sum, double bound) {
  std::sort(list, list + length, [](float a, float b) { return a > b; });
  for (int place = 0; place < length; ++place) {
    sum += kCounts ? 1.0 : static_cast<double>(exp_nonpositive(splat(list[place]))[0]);
    if (sum >= bound) return list[place];
  }
  return list[length - 1];
}

// The largest value for which there are `bound` values that are not smaller, or values of this weight; the smallest value where
// there are too few. The list is not empty and is kept; `rest` has room for as many values, and for `kLanes` more.
template <bool kCounts>
inline float find_threshold(const float* list, int length, double bound, float* rest) {
  double before = 0.0;  // The sum over the values above those that are left.
  for (int round = 0; length > kSortedLength && round < kMaxRounds; ++round) {
    float samples[kSamples], pivots[kPivots];
    for (int i = 0; i < kSamples; ++i) samples[i] = list[int64_t{length} * i / kSamples];
    std::sort(samples, samples + kSamples, [](float a, float b) { return a > b; });
    for (int i = 0; i < kPivots; ++i) pivots[i] = samples[i * (kSamples / kPivots) + kSamples / kPivots / 2];
    double sums[kPivots];
    sums_from<kCounts>(list, length, pivots, sums);
    int reached = 0;
    while (reached < kPivots && before + sums[reached] < bound) ++reached;
    const float low = reached < kPivots ? pivots[reached] : -INFINITY;
    const float high = reached > 0 ? pivots[reached - 1] : INFINITY;
    const int count = keep_between(list, length, low, high, rest);
    list = rest;
    if (count == 0) return pivots[kPivots - 1];
    if (count < length) {
      before += reached > 0 ? sums[reached - 1] : 0.0;
      length = count;
      continue;
    }
    // The lowest pivot is the smallest value: it, or something above it.
    const int above = keep_between(list, length, std::nextafter(low, INFINITY), INFINITY, rest);
    if (above == 0 || before + (kCounts ? above : weight_of(rest, above)) < bound) return low;
    length = above;
  }
  if (list != rest) std::copy(list, list + length, rest);
  return find_in_sorted<kCounts>(rest, length, before, bound);
}

// The memory of truncation, for one row at a time.
struct TruncationScratch {
  double* masses;  // One for each tile.
  float* list;     // One for each token, and `kLanes` more.
  float* rest;     // The same.
};

// Lists the scaled logits that are at least `cut`.
inline int list_tokens(const Row& row, float cut, float* list) {
  int length = 0;
  for (int tile = 0; tile < tiles_of(row.size); ++tile) {
    if (row.scaled(row.maxima[tile]) < cut) continue;
    each_vector(row.logits + tile * kTile, row.size_of(tile), [&](Floats values, int) {
      const Floats scaled = row.scaled(values);
      length = append(list, length, scaled, scaled >= cut);
    });
  }
  return length;
}

inline float find_least(const Row& row, float log_min_p, int top_k, float top_p, const TruncationScratch& scratch) {
  float least = log_min_p > -INFINITY ? std::min(log_min_p, 0.0f) : -INFINITY;
  const bool has_top_k = top_k > 0 && top_k < row.size, has_top_p = top_p < 1.0f;
  if (!has_top_k && !has_top_p) return least;
  const int num_tiles = tiles_of(row.size);
  float cut = std::max(least, -FLT_MAX);
  double total = 0.0;
  if (has_top_k && top_k <= num_tiles) {
    // As many tokens as there are tiles with a maximum from here on are from here on.
    std::copy(row.maxima, row.maxima + num_tiles, scratch.rest);
    float* kth = scratch.rest + top_k - 1;
    std::nth_element(scratch.rest, kth, scratch.rest + num_tiles, [](float a, float b) { return a > b; });
    cut = std::max(cut, row.scaled(*kth));
  } else if (!has_top_k) {
    // All tokens below weigh too little to matter, even if the whole vocabulary lay there.
    total = find_masses(row, least, scratch.masses);
    const double margin = std::log(row.size / ((1.0 - top_p) * total)) + 0.01;
    cut = std::max(cut, -static_cast<float>(std::max(margin, 0.0)));
  }
  int length = list_tokens(row, cut, scratch.list);
  if (has_top_k) {
    least = std::max(least, find_threshold<true>(scratch.list, length, top_k, scratch.rest));
    if (!has_top_p) return least;
    length = keep_between(scratch.list, length, least, INFINITY, scratch.list);
    total = weight_of(scratch.list, length);
  }
  return std::max(least, find_threshold<false>(scratch.list, length, double{top_p} * total, scratch.rest));
}

}  // namespace headrace

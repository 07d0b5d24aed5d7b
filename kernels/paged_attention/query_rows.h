// Rows of queries, and how a span of keys and values advances them: online softmax with fp32 accumulation.
#pragma once

#include <cmath>

#include "span.h"

namespace headrace {

constexpr int kMaxRows = 64;
constexpr int kRowElements = kMaxRows * 256;  // Of all rows: there are fewer of larger heads.

// State of the rows of one item of work, all in the first two cache levels.
template <typename Word>
struct QueryRows {
  int count;
  int width, value_width;        // Elements of a row's query and output: those of a head up to whole panels.
  int first_position[kMaxRows];  // First key each row sees,
  int last_position[kMaxRows];   // and the last: its own.
  float maximum[kMaxRows];
  float scale, cap_scale;        // With a soft cap: the cap, and the scale of scores over the cap. Else 0 for the latter.
  alignas(64) Floats sum[kMaxRows];
  alignas(64) Word query[kRowElements];
  alignas(64) float output[kRowElements];
};

// Stores the weights of a tile's keys, and returns them as stored.
inline Floats put_weights(float* target, Floats weights) {
  store(target, weights);
  return weights;
}

inline Floats put_weights(bfloat16* target, Floats weights) {
#ifdef __AVX512BF16__
  const __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)weights);
  std::memcpy(target, &rounded, sizeof(rounded));
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
#else
  store(target, weights);
  return load(target);
#endif
}

// Apart from the code of scores without a cap, whose registers it would take.
[[gnu::noinline]] inline void cap_scores(Floats* scores, float scale) {
  for (int t = 0; t < kSpanTiles; ++t) scores[t] = tangent(scores[t] * scale);
}

// Which keys of a tile a row sees.
template <typename Word, typename Cache>
inline Ints seen_keys(const QueryRows<Word>& rows, int row, const Tile<Cache>& tile) {
  const int begin = rows.first_position[row] - tile.start;
  const int end = std::min(rows.last_position[row] + 1 - tile.start, tile.count);
  return (kLaneNumbers >= begin) & (kLaneNumbers < end);
}

// Says whether a row sees all keys of a span.
template <typename Word, typename Cache>
inline bool sees_all(const QueryRows<Word>& rows, int row, const Span<Cache>& span) {
  const Tile<Cache>& last = span.tiles[kSpanTiles - 1];
  return span.is_whole && rows.first_position[row] <= span.tiles[0].start &&
         rows.last_position[row] >= last.start + kTile - 1;
}

// Brings a row's maximum, sum and output up to date with its scores of a span; stores the keys' weights. In eight bits
// the scale of a key multiplies its scores, the scale of a value its weights.
template <typename Word, typename Cache>
inline void weigh(QueryRows<Word>& rows, int row, const Span<Cache>& span, const PackedSpan<Word>& packed,
                  Floats* scores, Word* weights) {
  const Floats unseen = splat(-INFINITY);
  Floats best = unseen;
  if constexpr (EightBits<Cache>::kIs)
    for (int t = 0; t < kSpanTiles; ++t) scores[t] *= packed.scales[t].key;
  if (rows.cap_scale > 0.0f) cap_scores(scores, rows.cap_scale);
  const bool has_hidden = !sees_all(rows, row, span);
  for (int t = 0; t < kSpanTiles; ++t) {
    scores[t] *= rows.scale;
    if (has_hidden) scores[t] = seen_keys(rows, row, span.tiles[t]) ? scores[t] : unseen;
    best = scores[t] > best ? scores[t] : best;
  }
  const float previous = rows.maximum[row];
  const float maximum = any(best > previous) ? std::max(previous, horizontal_max(best)) : previous;
  if (maximum != previous) {
    const Floats correction = exp_nonpositive(splat(previous - maximum));
    rows.maximum[row] = maximum;
    rows.sum[row] *= correction;
    float* output = rows.output + row * rows.value_width;
    for (int i = 0; i < rows.value_width; i += kLanes) store(output + i, load(output + i) * correction);
  }
  for (int t = 0; t < kSpanTiles; ++t) {
    const Floats weight = scores[t] > unseen ? exp_nonpositive(scores[t] - maximum) : Floats{};
    if constexpr (EightBits<Cache>::kIs) {
      rows.sum[row] += weight;
      put_weights(weights + t * kTile, weight * packed.scales[t].value);
    } else {
      rows.sum[row] += put_weights(weights + t * kTile, weight);
    }
  }
}

// Adds the products of R rows and a panel to sums, which are in registers meanwhile: an array that others know would be
// written behind each word.
template <int R, typename Word>
[[gnu::noinline]] void add_products(Floats (*sums)[kPanelVectors], const int32_t* panel, int words, const Word* x,
                                    int64_t x_stride) {
  if (words <= 0) return;
  NothingAhead ahead;
  Floats kept[R][kPanelVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kPanelVectors; ++v) kept[r][v] = sums[r][v];
  multiply_panel<Word, R>(kept, panel, words, x, x_stride, ahead);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = kept[r][v];
}

// The products of R rows and keys that lie transposed, in the order in which `add_products` takes those of a panel.
// Meanwhile asks memory for the keys of the span that follows; null where nothing does.
template <int R, typename Word, typename Cache>
[[gnu::noinline]] void multiply_keys(Floats (*sums)[kPanelVectors], const Span<Cache>& span, const Span<Cache>* next,
                                     const Word* x, int64_t x_stride) {
  Floats kept[R][kPanelVectors] = {};
  const Cache *keys[kSpanTiles], *ahead[kSpanTiles];
  for (int t = 0; t < kSpanTiles; ++t) {
    keys[t] = span.tiles[t].keys;
    ahead[t] = next ? next->tiles[t].keys : nullptr;
  }
  const int64_t stride = span.key.element;
  for (int i = 0; i < span.head_dim; i += kPerWord<Word>) {
    Ints words[kSpanTiles];
    for (int t = 0; t < kSpanTiles; ++t) words[t] = words_of_keys<Word>(keys[t] + i * stride, stride);
    if (next)
      for (int t = 0; t < kSpanTiles; ++t) __builtin_prefetch(ahead[t] + i * stride, 0, 2);
    for (int r = 0; r < R; ++r) {
      const int32_t input = load_raw<int32_t>(x + r * x_stride + i);
      for (int t = 0; t < kSpanTiles; ++t) kept[r][t] = multiply_word(kept[r][t], words[t], input, x);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < kSpanTiles; ++t) sums[r][t] = kept[r][t];
}

// Advances R rows by one span. A key that a row does not see has weight 0 there.
template <int R, typename Word, typename Cache>
inline void advance(QueryRows<Word>& rows, int row, const Span<Cache>& span, const PackedSpan<Word>& packed,
                    const Span<Cache>* next) {
  const int key_words = (span.head_dim + kPerWord<Word> - 1) / kPerWord<Word>;
  const Word* query = rows.query + row * rows.width;
  Floats sums[R][kPanelVectors] = {};
  if (span.key.is_transposed())
    multiply_keys<R>(sums, span, next, query, rows.width);
  else
    add_products<R>(sums, packed.keys, key_words, query, rows.width);
  alignas(64) Word weights[R * kSpanKeys];
  for (int r = 0; r < R; ++r) weigh(rows, row + r, span, packed, sums[r], weights + r * kSpanKeys);
  const int value_words = (packed.num_keys + kPerWord<Word> - 1) / kPerWord<Word>;
  for (int first = 0; first < rows.value_width; first += kPanel) {
    float* output = rows.output + row * rows.value_width + first;
    const int32_t* panel = packed.values + first * (kSpanKeys / kPerWord<Word>);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = load(output + r * rows.value_width + v * kLanes);
    add_products<R>(sums, panel, value_words, weights, kSpanKeys);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kPanelVectors; ++v) store(output + r * rows.value_width + v * kLanes, sums[r][v]);
  }
}

// Advances the rows from `row` to `end`, at most R at a time; the first ones ask for the keys of the next span.
template <int R = kTileRows, typename Word, typename Cache>
inline void advance_all(QueryRows<Word>& rows, int row, int end, const Span<Cache>& span,
                        const PackedSpan<Word>& packed, const Span<Cache>* next) {
  if constexpr (R > 0) {
    for (; row + R <= end; row += R, next = nullptr) advance<R>(rows, row, span, packed, next);
    advance_all<R - 1>(rows, row, end, span, packed, next);
  }
}

}  // namespace headrace

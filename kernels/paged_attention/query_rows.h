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
  uint64_t hidden[kMaxRows];     // Those between that it does not see: bit i is the key i before its own.
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
  store(target, weights);
  return load(target);
}

// Which of the keys from `distance` before a row's own on are hidden.
inline Ints hidden_lanes(uint64_t hidden, int distance) {
  constexpr Ints kBits = make_ints([](int lane) { return 1 << (kLanes - 1 - lane); });
  const int last = distance - (kLanes - 1);
  if (last <= -kLanes || last >= 64) return Ints{};
  return (static_cast<int>(last < 0 ? hidden << -last : hidden >> last) & kBits) != 0;
}

// Apart from the code of scores without a cap, whose registers it would take.
[[gnu::noinline]] inline void cap_scores(Floats* scores, float scale) {
  for (int t = 0; t < kSpanTiles; ++t) scores[t] = tangent(scores[t] * scale);
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
  for (int t = 0; t < kSpanTiles; ++t) {
    const Tile<Cache>& tile = span.tiles[t];
    const int begin = rows.first_position[row] - tile.start;
    const int end = std::min(rows.last_position[row] + 1 - tile.start, tile.count);
    Ints seen = (kLaneNumbers >= begin) & (kLaneNumbers < end);
    if (rows.hidden[row]) seen &= ~hidden_lanes(rows.hidden[row], rows.last_position[row] - tile.start);
    scores[t] = seen ? scores[t] * rows.scale : unseen;
    best = scores[t] > best ? scores[t] : best;
  }
  const float previous = rows.maximum[row], maximum = std::max(previous, horizontal_max(best));
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

// Advances R rows by one span. A key that a row does not see has weight 0 there.
template <int R, typename Word, typename Cache>
inline void advance(QueryRows<Word>& rows, int row, const Span<Cache>& span, const PackedSpan<Word>& packed) {
  NothingAhead ahead;
  const int key_words = (span.head_dim + kPerWord<Word> - 1) / kPerWord<Word>;
  Floats sums[R][kPanelVectors] = {};
  multiply_panel<Word, R>(sums, packed.keys, key_words, rows.query + row * rows.width, rows.width, ahead);
  alignas(64) Word weights[R * kSpanKeys];
  for (int r = 0; r < R; ++r) weigh(rows, row + r, span, packed, sums[r], weights + r * kSpanKeys);
  const int value_words = (packed.num_keys + kPerWord<Word> - 1) / kPerWord<Word>;
  for (int first = 0; first < rows.value_width; first += kPanel) {
    float* output = rows.output + row * rows.value_width + first;
    const int32_t* panel = packed.values + first * (kSpanKeys / kPerWord<Word>);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = load(output + r * rows.value_width + v * kLanes);
    multiply_panel<Word, R>(sums, panel, value_words, weights, kSpanKeys, ahead);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kPanelVectors; ++v) store(output + r * rows.value_width + v * kLanes, sums[r][v]);
  }
}

// Advances the rows from `row` to `end`, at most R at a time.
template <int R = kTileRows, typename Word, typename Cache>
inline void advance_all(QueryRows<Word>& rows, int row, int end, const Span<Cache>& span,
                        const PackedSpan<Word>& packed) {
  if constexpr (R > 0) {
    for (; row + R <= end; row += R) advance<R>(rows, row, span, packed);
    advance_all<R - 1>(rows, row, end, span, packed);
  }
}

}  // namespace headrace

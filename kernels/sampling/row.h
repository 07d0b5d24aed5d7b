// A row of logits, read in tiles: the maximum of each says which tiles need no second reading.
#pragma once

#include <algorithm>
#include <cmath>

#include "../simd.h"

namespace headrace {

constexpr int kTile = 256;
constexpr float kNoWeight = -87.0f;  // Scaled logits below it weigh nothing: float32 cannot hold their exponentials.

inline int tiles_of(int size) { return (size + kTile - 1) / kTile; }

// Calls the function with each vector of some floats; lanes behind the last one hold minus infinity.
template <typename Function>
inline void each_vector(const float* values, int count, Function function) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) function(load(values + i), i);
  if (i == count) return;
  Floats last = splat(-INFINITY);
  std::memcpy(&last, values + i, (count - i) * sizeof(float));
  function(last, i);
}

struct Row {
  const float* logits;
  int size;
  float highest;
  float scale;          // The inverse temperature.
  const float* maxima;  // Of each tile.

  Floats scaled(Floats values) const { return (values - highest) * scale; }
  float scaled(float value) const { return (value - highest) * scale; }
  int size_of(int tile) const { return std::min(kTile, size - tile * kTile); }
};

// Writes the maximum of each tile and returns that of the row, which is NaN where any logit is.
inline float find_maxima(const float* logits, int size, float* maxima) {
  Ints is_nan = {};
  Floats highest = splat(-INFINITY);
  for (int tile = 0; tile < tiles_of(size); ++tile) {
    Floats maximum = splat(-INFINITY);
    each_vector(logits + tile * kTile, std::min(kTile, size - tile * kTile), [&](Floats values, int) {
      is_nan |= values != values;
      maximum = values > maximum ? values : maximum;
    });
    maxima[tile] = horizontal_max(maximum);
    highest = maximum > highest ? maximum : highest;
  }
  for (int lane = 0; lane < kLanes; ++lane)
    if (is_nan[lane]) return NAN;
  return horizontal_max(highest);
}

// The first token with the highest logit.
inline int first_highest(const Row& row) {
  int tile = 0;
  while (row.maxima[tile] != row.highest) ++tile;
  int token_id = tile * kTile;
  while (row.logits[token_id] != row.highest) ++token_id;
  return token_id;
}

// What tokens weigh, 0 below `least`, which is at least `kNoWeight`.
inline Floats weights_of(Floats scaled, float least) {
  return scaled >= least ? exp_nonpositive(scaled) : splat(0.0f);
}

// Writes what the tokens of each tile weigh whose scaled logits are at least `least`; returns the sum.
inline double find_masses(const Row& row, float least, double* masses) {
  least = std::max(least, kNoWeight);
  double total = 0.0;
  for (int tile = 0; tile < tiles_of(row.size); ++tile) {
    masses[tile] = 0.0;
    if (row.scaled(row.maxima[tile]) < least) continue;
    Floats sums = {};
    each_vector(row.logits + tile * kTile, row.size_of(tile),
                [&](Floats values, int) { sums += weights_of(row.scaled(values), least); });
    masses[tile] = horizontal_sum(sums);
    total += masses[tile];
  }
  return total;
}

// The first token at which the weights of those from `least` on, whose tiles weigh `masses`, sum up to more than `target`.
inline int token_at(const Row& row, float least, double target, const double* masses) {
  least = std::max(least, kNoWeight);
  double sum = 0.0;
  int tile = 0, last = 0;
  for (; tile < tiles_of(row.size); ++tile) {
    if (masses[tile] == 0.0) continue;
    last = tile;
    if (sum + masses[tile] > target) break;
    sum += masses[tile];
  }
  // Sums in another order may differ by a rounding: the last token with any weight is then the one meant.
  if (tile == tiles_of(row.size)) sum -= masses[tile = last];
  float weights[kTile + kLanes];
  each_vector(row.logits + tile * kTile, row.size_of(tile),
              [&](Floats values, int place) { store(weights + place, weights_of(row.scaled(values), least)); });
  int offset = 0;
  for (int place = 0; place < row.size_of(tile) && sum <= target; ++place) {
    if (weights[place] == 0.0f) continue;
    sum += weights[place];
    offset = place;
  }
  return tile * kTile + offset;
}

// The first token at which the weights of those from `least` on sum up to more than this share of all.
inline int draw_token(const Row& row, float least, double share, double* masses) {
  const double target = share * find_masses(row, least, masses);
  return token_at(row, least, target, masses);
}

}  // namespace headrace

// The draw of a watermarked row: the token with the highest scaled logit plus Gumbel noise, which its mark decides.
#pragma once

#include "row.h"

namespace headrace {

// The noise -log(-log(u)) of a uniform number (word + 1/2) / 2^32 is at most 33 ln 2, and at least -ln(33 ln 2).
constexpr float kMostNoise = 22.9f, kLeastNoise = -3.2f;

// Counters whose words are made at once, which the compiler turns into vectors.
constexpr int kCounters = 16;

// The words of `kCounters` counters from `first` on: those of one counter beside those of the next.
inline void philox_block(int64_t key, uint32_t first, uint32_t words[4][kCounters]) {
  uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  for (int i = 0; i < kCounters; ++i) {
    words[0][i] = first + i;
    words[1][i] = words[2][i] = words[3][i] = 0;
  }
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kCounters; ++i) {
      const uint64_t one = uint64_t{0xD2511F53u} * words[0][i], two = uint64_t{0xCD9E8D57u} * words[2][i];
      words[0][i] = static_cast<uint32_t>(two >> 32) ^ words[1][i] ^ low;
      words[1][i] = static_cast<uint32_t>(two);
      words[2][i] = static_cast<uint32_t>(one >> 32) ^ words[3][i] ^ high;
      words[3][i] = static_cast<uint32_t>(one);
    }
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
}

// The token with the best score so far; none below `limit` can be better.
struct MarkedDraw {
  float least;
  double best = -INFINITY;
  int token_id = 0;

  float limit() const { return std::max(least, static_cast<float>(best) - kMostNoise); }

  void take(int candidate, float scaled, uint32_t word) {
    const double score = scaled - std::log(-std::log((word + 0.5) * 0x1p-32));
    if (score <= best) return;
    best = score;
    token_id = candidate;
  }
};

// The first word that may win with a scaled logit of at most `highest`: the noise is below -log(1 - u), so 1 - u must be
// below the exponential of the difference to the best score.
inline uint32_t first_word(float highest, double best) {
  const double chance = std::exp(highest - best);
  return chance >= 1.0 ? 0 : static_cast<uint32_t>(std::max(0.0, (1.0 - chance) * 0x1p32 - 1.0));
}

// The first token with the highest score among those whose scaled logits are at least `least`. See watermark.py.
inline int draw_marked(const Row& row, float least, int64_t mark) {
  MarkedDraw draw{std::max(least, kLeastNoise - kMostNoise)};
  uint32_t words[4][kCounters];
  for (int tile = 0; tile < tiles_of(row.size); ++tile) {
    const float highest = row.scaled(row.maxima[tile]);
    if (highest < draw.limit()) continue;
    uint32_t bound = first_word(highest, draw.best);
    const int end = tile * kTile + row.size_of(tile);
    for (int first = tile * kTile; first < end; first += 4 * kCounters) {
      philox_block(mark, first / 4, words);
      for (int token_id = first; token_id < std::min(end, first + 4 * kCounters); ++token_id) {
        const int place = token_id - first;
        const uint32_t word = words[place % 4][place / 4];
        if (word < bound) continue;
        const float scaled = row.scaled(row.logits[token_id]);
        if (scaled < draw.limit()) continue;
        const double before = draw.best;
        draw.take(token_id, scaled, word);
        if (draw.best > before) bound = first_word(highest, draw.best);
      }
    }
  }
  return draw.token_id;
}

}  // namespace headrace

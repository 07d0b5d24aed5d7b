// Log probabilities of a row: of one token, and of the most likely ones.
#pragma once

#include "threshold.h"

namespace headrace {

struct Scored {
  float value;
  int32_t token_id;

  // The likelier token first, of several the one with the lower id.
  bool operator<(const Scored& other) const {
    return value != other.value ? value > other.value : token_id < other.token_id;
  }
};

// Lists the tokens whose logits are at least as high as the `count`-th highest maximum of a tile, or all of them.
inline int list_highest(const Row& row, int count, float* maxima, Scored* list) {
  const int num_tiles = tiles_of(row.size);
  float cut = -INFINITY;
  if (count <= num_tiles) {
    std::copy(row.maxima, row.maxima + num_tiles, maxima);
    std::nth_element(maxima, maxima + count - 1, maxima + num_tiles, [](float a, float b) { return a > b; });
    cut = maxima[count - 1];
  }
  int length = 0;
  for (int tile = 0; tile < num_tiles; ++tile) {
    if (row.maxima[tile] < cut) continue;
    for (int token_id = tile * kTile; token_id < tile * kTile + row.size_of(tile); ++token_id)
      if (row.logits[token_id] >= cut) list[length++] = {row.logits[token_id], token_id};
  }
  return length;
}

}  // namespace headrace

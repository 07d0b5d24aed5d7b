// Where the keys, or the values, of a layer lie: numbers from one block, token, KV head and element of a head to the next.
// The elements of a value lie side by side, and so do those of a key, or else the same element of a block's keys
// (layer_cache.py says when).
#pragma once

#include <cstdint>

namespace headrace {

struct CacheStrides {
  int64_t block, token, head, element;

  bool is_transposed() const { return element != 1; }

  int64_t slot(int64_t number, int block_size) const {
    return number / block_size * block + number % block_size * token;
  }
};

}  // namespace headrace

// Where the keys, or the values, of a layer lie: elements from one block, token and KV head to the next.
#pragma once

#include <cstdint>

namespace headrace {

struct CacheStrides {
  int64_t block, token, head;

  static CacheStrides contiguous(int block_size, int num_kv_heads, int head_dim) {
    const int64_t token = int64_t{num_kv_heads} * head_dim;
    return {block_size * token, token, head_dim};
  }

  int64_t slot(int64_t number, int block_size) const {
    return number / block_size * block + number % block_size * token;
  }
};

}  // namespace headrace

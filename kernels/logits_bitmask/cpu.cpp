// Minus infinity for the tokens that a mask forbids.

#include "../abi.h"

#include <cmath>
#include <cstdint>

EXPORTED void headrace_forbid_tokens(float* logits, const int64_t* rows,
                                                                              const uint32_t* bitmask,
                                                                              int64_t row_stride, int32_t num_masks,
                                                                              int32_t vocab_size) {
  const int64_t num_words = (vocab_size + 31) / 32;
  for (int64_t mask = 0; mask < num_masks; ++mask) {
    float* row = logits + rows[mask] * row_stride;
    const uint32_t* words = bitmask + mask * num_words;
    for (int64_t word = 0; word < vocab_size / 32; ++word)
      if (words[word] != ~0u)
        for (int bit = 0; bit < 32; ++bit) row[word * 32 + bit] = words[word] >> bit & 1u ? row[word * 32 + bit] : -INFINITY;
    for (int token_id = vocab_size / 32 * 32; token_id < vocab_size; ++token_id)
      if (!(words[token_id / 32] >> token_id % 32 & 1u)) row[token_id] = -INFINITY;
  }
}

EXPORT_SIGNATURE(forbid_tokens)

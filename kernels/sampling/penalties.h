// Repetition, frequency and presence penalties of one row, in place.
#pragma once

#include <cstdint>

namespace headrace {

struct Penalties {
  float repetition;
  float frequency;
  float presence;

  bool does_anything() const { return repetition != 1.0f || frequency != 0.0f || presence != 0.0f; }

  // Rounds after each operation, as torch does.
  __attribute__((noinline, optimize("fp-contract=off"))) void apply(float& logit, int32_t count) const {
    float value = logit > 0.0f ? logit / repetition : logit * repetition;
    value -= frequency * static_cast<float>(count);
    value -= presence * (count > 0 ? 1.0f : 0.0f);
    logit = value;
  }
};

inline bool is_seen(const uint32_t* bits, int64_t token_id) { return bits[token_id / 32] >> (token_id % 32) & 1u; }

inline int32_t occurrences(const int64_t* drafts, int num_drafts, int64_t token_id) {
  int32_t count = 0;
  for (int i = 0; i < num_drafts; ++i) count += drafts[i] == token_id;
  return count;
}

// Visits the words of `bits`, and reads `counts` only where they are set.
inline void penalise_row(float* logits, int vocab_size, const Penalties& penalties, const int32_t* counts,
                         const uint32_t* bits, const int64_t* drafts, int num_drafts) {
  for (int word = 0; word * 32 < vocab_size; ++word) {
    for (uint32_t rest = bits[word]; rest; rest &= rest - 1) {
      const int token_id = word * 32 + __builtin_ctz(rest);
      if (token_id >= vocab_size) break;
      penalties.apply(logits[token_id], counts[token_id] + occurrences(drafts, num_drafts, token_id));
    }
  }
  for (int i = 0; i < num_drafts; ++i) {
    const int64_t token_id = drafts[i];
    if (token_id < 0 || is_seen(bits, token_id) || occurrences(drafts, i, token_id)) continue;
    penalties.apply(logits[token_id], occurrences(drafts, num_drafts, token_id));
  }
}

}  // namespace headrace

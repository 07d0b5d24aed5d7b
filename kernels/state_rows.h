// The sequences of a step, as kernels with a state take them: StateRows of state_rows.py.
#pragma once

#include <cstdint>

namespace headrace {

struct StateRows {
  const int64_t* slots;
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* num_kept;     // Null keeps all.
  const int32_t* save_starts;  // Null copies none, as the two below.
  const int32_t* save_tokens;
  const int64_t* save_slots;
  int32_t num_seqs;
};

struct StateRow {
  int64_t slot;
  int32_t first, length;
  int32_t num_kept;  // Tokens whose state is written; those behind them are drafts.
  bool is_new;       // Begins with zeros.
  bool is_padding;   // Writes no state.
  int32_t num_saves = 0;
  const int32_t* save_tokens = nullptr;
  const int64_t* save_slots = nullptr;

  StateRow(const StateRows& rows, int64_t sequence)
      : slot(rows.slots[sequence]),
        first(rows.query_starts[sequence]),
        length(rows.query_starts[sequence + 1] - first),
        num_kept(rows.num_kept ? rows.num_kept[sequence] : length),
        is_new(rows.context_lens[sequence] <= length),
        is_padding(rows.context_lens[sequence] == 0) {
    if (!rows.save_starts) return;
    num_saves = rows.save_starts[sequence + 1] - rows.save_starts[sequence];
    save_tokens = rows.save_tokens + rows.save_starts[sequence];
    save_slots = rows.save_slots + rows.save_starts[sequence];
  }
};

}  // namespace headrace

// Drafts in one call: a step of a small stack, the head, the likeliest token, and a step for that token behind it.
//
// Sequences whose chain has become unlikely, or is as long as it may be, leave the steps that follow.
#pragma once

#include <cmath>

#include "stack.h"

namespace headrace {

constexpr int kMaxCandidates = 8;

// What to draft behind the first sequences of a step.
struct ChainRequest {
  Matrix head;
  const float* norm;         // Before the head; null where there is none.
  const int32_t* token_ids;  // The token of each feature of the head; null where that is the feature's number.
  const int32_t* limits;     // Longest chain of each sequence.
  int32_t num_seqs;
  int32_t num_candidates;  // Of a place.
  float least_score;       // Log probability of a chain that goes on.
};

// Places come first, then sequences; `num_places` says how many of a sequence were computed.
struct Candidates {
  int32_t* token_ids;
  float* scores;  // Log probabilities, each given those of its chain before it.
  int32_t* num_places;
};

// The memory of a chain, beside that of the stack's steps.
template <typename T>
struct ChainScratch {
  char* stack;
  T *result, *rows, *normed;
  float *logits, *totals;
  int64_t *token_ids, *positions, *slots;
  int32_t *block_tables, *query_starts, *context_lens, *sequences;
  char* prepared;
  int64_t bytes;

  ChainScratch(const Stack& of, const ChainRequest& request, int64_t num_tokens, int64_t max_blocks, char* memory) {
    const int64_t count = request.num_seqs;
    Pieces pieces{memory};
    stack = pieces.take<char>(Scratch<T>(of, num_tokens, nullptr).bytes);
    result = pieces.take<T>(num_tokens * of.hidden_size);
    rows = pieces.take<T>(count * of.hidden_size);
    normed = pieces.take<T>(request.norm ? count * of.hidden_size : 0);
    logits = pieces.take<float>(count * request.head.num_outputs());
    totals = pieces.take<float>(count);
    token_ids = pieces.take<int64_t>(count);
    positions = pieces.take<int64_t>(count);
    slots = pieces.take<int64_t>(count);
    block_tables = pieces.take<int32_t>(count * max_blocks);
    query_starts = pieces.take<int32_t>(count + 1);
    context_lens = pieces.take<int32_t>(count);
    sequences = pieces.take<int32_t>(count);
    const QuantizedLinear* head = request.head.quantized;
    prepared = pieces.take<char>(head ? Rows(*head, inputs_of<T>(*head), count, nullptr).bytes : 0);
    bytes = pieces.bytes;
  }
};

// Puts the highest logits of a row in order, as log probabilities, with their places.
inline void choose(const float* logits, int count, int num_candidates, int32_t* token_ids, float* scores) {
  std::fill(scores, scores + num_candidates, -INFINITY);
  std::fill(token_ids, token_ids + num_candidates, 0);
  const auto offer = [&](int place) {
    if (!(logits[place] > scores[num_candidates - 1])) return;
    int rank = num_candidates - 1;
    for (; rank > 0 && logits[place] > scores[rank - 1]; --rank) {
      scores[rank] = scores[rank - 1];
      token_ids[rank] = token_ids[rank - 1];
    }
    scores[rank] = logits[place];
    token_ids[rank] = place;
  };
  int place = 0;
  for (; place + kLanes <= count; place += kLanes)
    if (horizontal_max(load(logits + place)) > scores[num_candidates - 1])
      for (int lane = 0; lane < kLanes; ++lane) offer(place + lane);
  for (; place < count; ++place) offer(place);
  const float highest = scores[0];
  Floats sums = {};
  for (place = 0; place + kLanes <= count; place += kLanes) sums += exp_nonpositive(load(logits + place) - highest);
  float sum = horizontal_sum(sums);
  for (; place < count; ++place) sum += exp_nonpositive(splat(logits[place] - highest))[0];
  for (int rank = 0; rank < num_candidates; ++rank) scores[rank] -= highest + std::log(sum);
}

// Scores the vocabulary for the last token of each sequence that is still drafted for.
template <typename T>
void score(const Stack& stack, const ChainRequest& request, const ChainScratch<T>& scratch, int count,
           const Candidates& found, int num_threads) {
  const Matrix& head = request.head;
  const int vocab_size = head.num_outputs(), size = stack.hidden_size;
  const T* inputs = request.norm ? scratch.normed : scratch.rows;
  Operation operations[4];
#pragma omp parallel num_threads(num_threads)
  {
    if (request.norm) {
      share(operations[3], count, [&](int64_t row) {
        rms_norm_row(scratch.rows + row * size, request.norm, stack.eps, scratch.normed + row * size, size);
      });
    }
    if (head.quantized) {
      const Rows rows(*head.quantized, inputs_of<T>(*head.quantized), count, scratch.prepared);
      share(operations[0], count, [&](int64_t row) {
        prepare_row(*head.quantized, rows, inputs + row * size, row);
      });
      multiply_quantized<T, Finish::kStoreFloat>(*head.quantized, rows, scratch.logits, vocab_size, count,
                                                 operations[1]);
    } else {
      multiply<T, Finish::kStoreFloat>(head.dense, inputs, size, scratch.logits, vocab_size, count,
                                       operations[1]);
    }
    share(operations[2], count, [&](int64_t row) {
      const int64_t first = int64_t{scratch.sequences[row]} * request.num_candidates;
      int32_t* token_ids = found.token_ids + first;
      choose(scratch.logits + row * vocab_size, vocab_size, request.num_candidates, token_ids, found.scores + first);
      if (request.token_ids)
        for (int rank = 0; rank < request.num_candidates; ++rank) token_ids[rank] = request.token_ids[token_ids[rank]];
    });
  }
}

// Makes the next step of those sequences that go on; returns how many do. All that is read of `step` for a sequence is
// read before anything is written for it, so that the step may lie in the same memory.
template <typename T>
int advance(const Stack& stack, const ChainRequest& request, const ChainScratch<T>& scratch, const Step& step, int count,
            const Candidates& found, int32_t* num_places) {
  int kept = 0;
  for (int row = 0; row < count; ++row) {
    const int sequence = scratch.sequences[row];
    const int64_t best = int64_t{sequence} * request.num_candidates;
    const int64_t position = step.positions[step.query_starts[row + 1] - 1] + 1;
    scratch.totals[sequence] += found.scores[best];
    const bool is_done = ++num_places[sequence] >= request.limits[sequence] || position >= stack.max_positions;
    if (is_done || !(scratch.totals[sequence] >= request.least_score)) continue;
    int32_t* table = scratch.block_tables + int64_t{kept} * step.max_blocks;
    std::memmove(table, step.block_tables + int64_t{row} * step.max_blocks, step.max_blocks * sizeof(int32_t));
    std::memmove(scratch.rows + int64_t{kept} * stack.hidden_size, scratch.rows + int64_t{row} * stack.hidden_size,
                 stack.hidden_size * sizeof(T));
    scratch.token_ids[kept] = found.token_ids[best];
    scratch.positions[kept] = position;
    scratch.slots[kept] = int64_t{table[position / step.block_size]} * step.block_size + position % step.block_size;
    scratch.context_lens[kept] = static_cast<int32_t>(position + 1);
    scratch.sequences[kept++] = sequence;
  }
  for (int row = 0; row <= kept; ++row) scratch.query_starts[row] = row;
  return kept;
}

template <typename T>
void run_chain(const Stack& stack, const ChainRequest& request, Step step, char* memory, const Candidates& candidates,
               int num_threads) {
  const ChainScratch<T> scratch(stack, request, step.num_tokens, step.max_blocks, memory);
  for (int row = 0; row < request.num_seqs; ++row) {
    scratch.sequences[row] = row;
    scratch.totals[row] = 0.0f;
    candidates.num_places[row] = 0;
  }
  const int64_t place_size = int64_t{request.num_seqs} * request.num_candidates;
  Candidates found = candidates;
  for (int count = request.num_seqs; count > 0;) {
    run_stack(stack, step, scratch.stack, scratch.result, num_threads);
    for (int row = 0; row < count; ++row) {
      const T* last = scratch.result + int64_t{step.query_starts[row + 1] - 1} * stack.hidden_size;
      std::memcpy(scratch.rows + int64_t{row} * stack.hidden_size, last, stack.hidden_size * sizeof(T));
    }
    score(stack, request, scratch, count, found, num_threads);
    count = advance(stack, request, scratch, step, count, found, candidates.num_places);
    step = Step{scratch.token_ids,    scratch.positions, scratch.slots,   scratch.block_tables, scratch.query_starts,
                scratch.context_lens, nullptr,           scratch.rows,    nullptr,              count,
                count,                step.max_blocks,   step.block_size};
    found.token_ids += place_size;
    found.scores += place_size;
  }
}

}  // namespace headrace

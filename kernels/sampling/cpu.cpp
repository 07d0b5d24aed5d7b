// Sampling and log probabilities row by row; see row.h, threshold.h, penalties.h and scores.h.

#include "../abi.h"
#include "../team.h"
#include "penalties.h"
#include "philox.h"
#include "scores.h"
#include "threshold.h"

namespace headrace {
namespace {

constexpr int64_t kSerialLogits = 1 << 15;  // Waking other threads costs more than it saves below this.
constexpr int64_t kInvalidToken = -1;

// The memory in which one thread works on one row after another.
struct RowScratch {
  double* masses;
  float* maxima;
  float* list;
  float* rest;
  Scored* scored;

  static int64_t bytes(int vocab_size) {
    const int64_t tiles = tiles_of(vocab_size), tokens = vocab_size + kLanes;
    return (tiles * (sizeof(double) + sizeof(float)) + 2 * tokens * sizeof(float) + 127) / 64 * 64;
  }

  RowScratch(char* memory, int vocab_size) {
    const int64_t tiles = tiles_of(vocab_size);
    masses = reinterpret_cast<double*>(memory);
    maxima = reinterpret_cast<float*>(masses + tiles);
    list = maxima + tiles;
    rest = list + vocab_size + kLanes;
    scored = reinterpret_cast<Scored*>(list);
  }
};

template <typename Function>
void each_row(int64_t num_rows, int vocab_size, char* scratch, int num_threads, Function function) {
  if (num_rows * vocab_size < kSerialLogits || num_threads == 1) {
    const RowScratch own(scratch, vocab_size);
    for (int64_t row = 0; row < num_rows; ++row) function(row, own);
    return;
  }
  Operation operation, threads;
#pragma omp parallel num_threads(num_threads)
  {
    const int64_t thread = threads.next.fetch_add(1, std::memory_order_relaxed);
    const RowScratch own(scratch + thread * RowScratch::bytes(vocab_size), vocab_size);
    share(operation, num_rows, [&](int64_t row) { function(row, own); });
  }
}

bool is_finite(float value) { return value - value == 0.0f; }

}  // namespace
}  // namespace headrace

// Bytes that each thread needs for `sample_tokens` and `score_tokens`.
EXPORTED int64_t headrace_sampling_scratch(int32_t vocab_size) { return headrace::RowScratch::bytes(vocab_size); }

EXPORTED void headrace_sample_tokens(const float* logits, const int64_t* slots, const int64_t* positions,
                                   const float* inverse_temperatures, const float* log_min_ps, const int32_t* top_ks,
                                   const float* top_ps, const int64_t* seeds, int64_t* token_ids, char* scratch,
                                   int64_t row_stride, int32_t num_rows, int32_t vocab_size, int32_t may_truncate,
                                   int32_t num_threads) {
  using namespace headrace;
  each_row(num_rows, vocab_size, scratch, num_threads, [&](int64_t i, const RowScratch& own) {
    const float* values = logits + i * row_stride;
    const int64_t slot = slots[i];
    const float inverse_temperature = inverse_temperatures[slot], highest = find_maxima(values, vocab_size, own.maxima);
    const bool is_greedy = inverse_temperature == 0.0f;
    const Row row{values, vocab_size, highest, inverse_temperature, own.maxima};
    if (!is_finite(highest) || !is_finite(inverse_temperature)) {
      token_ids[i] = kInvalidToken;
    } else if (is_greedy) {
      token_ids[i] = first_highest(row);
    } else {
      const TruncationScratch truncation{own.masses, own.list, own.rest};
      const float least =
          may_truncate ? find_least(row, log_min_ps[slot], top_ks[slot], top_ps[slot], truncation) : -INFINITY;
      token_ids[i] = draw_token(row, least, uniform_number(seeds[slot], positions[i]), own.masses);
    }
  });
}

EXPORTED void headrace_penalise(float* logits, const int64_t* slots, const float* repetitions, const float* frequencies,
                              const float* presences, const int32_t* output_counts, const uint32_t* seen_bits,
                              const int64_t* drafts, int64_t row_stride, int32_t num_drafts, int32_t num_rows,
                              int32_t vocab_size) {
  using namespace headrace;
  const int64_t num_words = (vocab_size + 31) / 32;
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t slot = slots[i];
    const Penalties penalties{repetitions[slot], frequencies[slot], presences[slot]};
    if (penalties.does_anything())
      penalise_row(logits + i * row_stride, vocab_size, penalties, output_counts + slot * vocab_size,
                   seen_bits + slot * num_words, drafts + i * num_drafts, num_drafts);
  }
}

EXPORTED void headrace_count_tokens(int32_t* output_counts, uint32_t* seen_bits, const int64_t* slots,
                                  const int64_t* token_ids, int32_t num_tokens, int32_t vocab_size) {
  const int64_t num_words = (vocab_size + 31) / 32;
  for (int32_t i = 0; i < num_tokens; ++i) {
    if (token_ids[i] < 0) continue;
    output_counts[slots[i] * vocab_size + token_ids[i]] += 1;
    seen_bits[slots[i] * num_words + token_ids[i] / 32] |= 1u << (token_ids[i] % 32);
  }
}

EXPORTED void headrace_score_tokens(const float* logits, const int64_t* token_ids, float* chosen, int64_t* top_ids,
                                  float* top_values, char* scratch, int64_t row_stride, int32_t num_rows,
                                  int32_t vocab_size, int32_t num_top, int32_t num_threads) {
  using namespace headrace;
  each_row(num_rows, vocab_size, scratch, num_threads, [&](int64_t i, const RowScratch& own) {
    const float* values = logits + i * row_stride;
    const Row row{values, vocab_size, find_maxima(values, vocab_size, own.maxima), 1.0f, own.maxima};
    int64_t* ids = top_ids + i * num_top;
    float* scores = top_values + i * num_top;
    if (!is_finite(row.highest)) {
      chosen[i] = NAN;
      for (int rank = 0; rank < num_top; ++rank) ids[rank] = rank, scores[rank] = NAN;
      return;
    }
    const float log_total = std::log(static_cast<float>(find_masses(row, -INFINITY, own.masses)));
    chosen[i] = row.scaled(values[token_ids[i]]) - log_total;
    if (num_top == 0) return;
    const int length = list_highest(row, num_top, reinterpret_cast<float*>(own.masses), own.scored);
    std::partial_sort(own.scored, own.scored + num_top, own.scored + length);
    for (int rank = 0; rank < num_top; ++rank) {
      ids[rank] = own.scored[rank].token_id;
      scores[rank] = row.scaled(own.scored[rank].value) - log_total;
    }
  });
}

EXPORT_SIGNATURE(sampling_scratch)
EXPORT_SIGNATURE(sample_tokens)
EXPORT_SIGNATURE(penalise)
EXPORT_SIGNATURE(count_tokens)
EXPORT_SIGNATURE(score_tokens)

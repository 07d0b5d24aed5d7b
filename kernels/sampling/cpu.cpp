// Sampling and log probabilities row by row; see row.h, threshold.h, penalties.h and scores.h.

#include <cstdlib>

#include "../abi.h"
#include "../team.h"
#include "penalties.h"
#include "philox.h"
#include "scores.h"
#include "threshold.h"
#include "watermark.h"

namespace headrace {
namespace {

constexpr int64_t kInvalidToken = -1;

// A team pays only above this many logits that are read once, some 200 µs for one thread: it has to be woken, and is as fast as
// the one of its threads that other processes hold up longest.
constexpr int64_t kSerialLogits = 1 << 22;
constexpr int kDrawnCost = 4;  // What a row costs that is drawn or scored, in rows that are read once.

// The memory in which one thread works on one row after another.
struct RowScratch {
  double* masses;
  float* maxima;
  float* list;
  float* rest;
  Scored* scored;

  explicit RowScratch(int vocab_size) {
    const int64_t tiles = tiles_of(vocab_size), tokens = vocab_size + kLanes;
    masses = static_cast<double*>(std::malloc(tiles * (sizeof(double) + sizeof(float)) + 2 * tokens * sizeof(float)));
    maxima = reinterpret_cast<float*>(masses + tiles);
    list = maxima + tiles;
    rest = list + tokens;
    scored = reinterpret_cast<Scored*>(list);
  }
  ~RowScratch() { std::free(masses); }
  RowScratch(const RowScratch&) = delete;

  bool is_there() const { return masses != nullptr; }
};

// Calls the function with each row, from several threads where all rows together cost as much as `cost` logits.
template <typename Function>
void each_row(int64_t num_rows, int vocab_size, int64_t cost, int num_threads, Function function) {
  if (cost < kSerialLogits || num_threads == 1 || num_rows == 1) {
    const RowScratch own(vocab_size);
    for (int64_t row = 0; row < num_rows; ++row) function(row, own);
    return;
  }
  Operation operation;
#pragma omp parallel num_threads(num_threads)
  {
    const RowScratch own(vocab_size);
    share(operation, num_rows, [&](int64_t row) { function(row, own); });
  }
}

bool is_finite(float value) { return value - value == 0.0f; }

}  // namespace
}  // namespace headrace

EXPORTED void headrace_sample_tokens(const float* logits, const int64_t* slots, const int64_t* positions,
                                   const float* inverse_temperatures, const float* log_min_ps, const int32_t* top_ks,
                                   const float* top_ps, const int64_t* seeds, const int64_t* marks,
                                   int64_t* token_ids, int64_t row_stride, int32_t num_rows, int32_t vocab_size, int32_t may_truncate,
                                   int32_t num_threads) {
  using namespace headrace;
  int64_t cost = 0;
  for (int64_t i = 0; i < num_rows; ++i) cost += inverse_temperatures[slots[i]] == 0.0f ? vocab_size : int64_t{kDrawnCost} * vocab_size;
  each_row(num_rows, vocab_size, cost, num_threads, [&](int64_t i, const RowScratch& own) {
    token_ids[i] = kInvalidToken;
    if (!own.is_there()) return;
    const float* values = logits + i * row_stride;
    const int64_t slot = slots[i];
    const float inverse_temperature = inverse_temperatures[slot], highest = find_maxima(values, vocab_size, own.maxima);
    const bool is_greedy = inverse_temperature == 0.0f;
    const Row row{values, vocab_size, highest, inverse_temperature, own.maxima};
    if (!is_finite(highest) || !is_finite(inverse_temperature)) return;
    if (is_greedy) {
      token_ids[i] = first_highest(row);
    } else {
      const TruncationScratch truncation{own.masses, own.list, own.rest};
      const float least =
          may_truncate ? find_least(row, log_min_ps[slot], top_ks[slot], top_ps[slot], truncation) : -INFINITY;
      token_ids[i] = marks != nullptr && marks[i] != 0
                         ? draw_marked(row, least, marks[i])
                         : draw_token(row, least, uniform_number(seeds[slot], positions[i]), own.masses);
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
                                  float* top_values, int64_t row_stride, int32_t num_rows,
                                  int32_t vocab_size, int32_t num_top, int32_t num_threads) {
  using namespace headrace;
  const int64_t cost = int64_t{kDrawnCost} * num_rows * vocab_size;
  each_row(num_rows, vocab_size, cost, num_threads, [&](int64_t i, const RowScratch& own) {
    const float* values = logits + i * row_stride;
    const float highest = own.is_there() ? find_maxima(values, vocab_size, own.maxima) : NAN;
    const Row row{values, vocab_size, highest, 1.0f, own.maxima};
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

// Of some columns of each row: the highest logit and its column.
EXPORTED void headrace_part_highest(const float* logits, float* highest, int64_t* columns, int64_t row_stride,
                                    int32_t num_rows, int32_t size, int32_t num_threads) {
  using namespace headrace;
  each_row(num_rows, size, int64_t{num_rows} * size, num_threads, [&](int64_t i, const RowScratch& own) {
    const float* values = logits + i * row_stride;
    highest[i] = own.is_there() ? find_maxima(values, size, own.maxima) : NAN;
    columns[i] = highest[i] == highest[i] ? first_highest(Row{values, size, highest[i], 1.0f, own.maxima}) : 0;
  });
}

// What some columns of each row weigh, where `highest` is that of the whole row and finite.
EXPORTED void headrace_part_masses(const float* logits, const float* scales, const float* highest, const float* least,
                                   double* masses, int64_t row_stride, int32_t num_rows, int32_t size,
                                   int32_t num_threads) {
  using namespace headrace;
  each_row(num_rows, size, int64_t{kDrawnCost} * num_rows * size, num_threads, [&](int64_t i, const RowScratch& own) {
    const float* values = logits + i * row_stride;
    masses[i] = NAN;
    if (!own.is_there() || !is_finite(highest[i])) return;
    find_maxima(values, size, own.maxima);
    masses[i] = find_masses(Row{values, size, highest[i], scales[i], own.maxima}, least[i], own.masses);
  });
}

// The column at which the weights of some columns of each row sum up to more than a target.
EXPORTED void headrace_part_draw(const float* logits, const float* scales, const float* highest, const float* least,
                                 const double* targets, int64_t* columns, int64_t row_stride, int32_t num_rows,
                                 int32_t size, int32_t num_threads) {
  using namespace headrace;
  each_row(num_rows, size, int64_t{kDrawnCost} * num_rows * size, num_threads, [&](int64_t i, const RowScratch& own) {
    const float* values = logits + i * row_stride;
    columns[i] = 0;
    if (!own.is_there() || !is_finite(highest[i])) return;
    find_maxima(values, size, own.maxima);
    const Row row{values, size, highest[i], scales[i], own.maxima};
    find_masses(row, least[i], own.masses);
    columns[i] = token_at(row, least[i], targets[i], own.masses);
  });
}

EXPORT_SIGNATURE(part_highest)
EXPORT_SIGNATURE(part_masses)
EXPORT_SIGNATURE(part_draw)
EXPORT_SIGNATURE(sample_tokens)
EXPORT_SIGNATURE(penalise)
EXPORT_SIGNATURE(count_tokens)
EXPORT_SIGNATURE(score_tokens)

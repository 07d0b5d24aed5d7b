// Takes the columns of matrix states through tokens, for rules in which a column depends on no other column. A thread
// takes a few columns through all tokens of a sequence, and sums over the state's rows in one order, so that a token's
// result does not depend on how its sequence was cut into steps.
//
// A `Rule` has `num_heads`, `key_dim` (rows of a state), `value_dim` (its columns), `states`, a type `Token` (a token's
// share in one head), and
//   read_token<T>(token, head, Token&)
//   value<T>(token, place): the values of a token from number `place` of all heads' on
//   result_of<T>(token, place): where its results go
//   step<kVectors, T>(Token, value, result, state, stride): one token, kVectors vectors of columns
//   step_column<T>(Token, value, result, state, stride): the same of one column
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../simd.h"
#include "../state_rows.h"

namespace headrace {

constexpr int kMaxKeyDim = 256;
constexpr int kMaxVectors = 8;                      // Of a block of columns: its sums stay in registers.
constexpr int64_t kSerialStateElements = 1 << 14;  // Waking other threads costs more than it saves below this.

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Takes a block of columns, from `column` on, of a head of a sequence through all its tokens; no vectors are one column.
// Tokens behind the kept ones go on with a copy.
template <int kVectors, typename T, typename Rule>
void run_columns(const Rule& rule, const StateRow& row, int head, int column) {
  constexpr int kColumns = kVectors ? kVectors * kLanes : 1;
  // Rows of the copy of one column lie apart as in the pool: side by side, the compiler would sum them in another order.
  constexpr int kCopyStride = kVectors ? kColumns : kLanes;
  alignas(64) float copy[kMaxKeyDim * kCopyStride];
  const int64_t place = int64_t{head} * rule.value_dim + column;
  const int64_t slot_size = int64_t{rule.num_heads} * rule.key_dim * rule.value_dim;
  float* pool = rule.states + row.slot * slot_size + int64_t{head} * rule.key_dim * rule.value_dim + column;
  float* state = pool;
  int64_t stride = rule.value_dim;
  if (row.is_new && !row.is_padding)
    for (int i = 0; i < rule.key_dim; ++i) std::fill_n(pool + i * stride, kColumns, 0.0f);
  typename Rule::Token token;
  int save = 0;
  for (int t = 0; t < row.length; ++t) {
    if (state == pool && (t == row.num_kept || row.is_padding)) {
      for (int i = 0; i < rule.key_dim; ++i) std::copy_n(pool + i * stride, kColumns, copy + i * kCopyStride);
      state = copy;
      stride = kCopyStride;
    }
    const int64_t number = row.first + t;
    rule.template read_token<T>(number, head, token);
    const T* value = rule.template value<T>(number, place);
    T* result = rule.template result_of<T>(number, place);
    if constexpr (kVectors == 0)
      rule.step_column(token, value, result, state, stride);
    else
      rule.template step<kVectors>(token, value, result, state, stride);
    for (; save < row.num_saves && row.save_tokens[save] == t + 1; ++save) {
      float* target = pool + (row.save_slots[save] - row.slot) * slot_size;
      for (int i = 0; i < rule.key_dim; ++i)
        std::copy_n(state + i * stride, kColumns, target + i * int64_t{rule.value_dim});
    }
  }
}

// Takes as many blocks of kVectors vectors as fit, then smaller ones: the rest is one block. Returns the first column
// that is in none.
template <int kVectors, typename T, typename Rule>
int run_blocks(const Rule& rule, const StateRow& row, int head, int column) {
  for (; column + kVectors * kLanes <= rule.value_dim; column += kVectors * kLanes)
    run_columns<kVectors, T>(rule, row, head, column);
  if constexpr (kVectors > 1) column = run_blocks<kVectors - 1, T>(rule, row, head, column);
  return column;
}

template <typename T, typename Rule>
void run_head(const Rule& rule, const StateRow& row, int head) {
  int column = run_blocks<kMaxVectors, T>(rule, row, head, 0);
  for (; column < rule.value_dim; ++column) run_columns<0, T>(rule, row, head, column);
}

// Takes all heads of all sequences through their tokens, of numbers of the type of `dtype`.
template <typename Rule>
void run_heads(const Rule& rule, const StateRows& rows, int32_t dtype, int32_t num_threads) {
  const auto run = dtype == kFloat32    ? run_head<float, Rule>
                   : dtype == kBFloat16 ? run_head<bfloat16, Rule>
                                        : run_head<_Float16, Rule>;
  const int64_t num_items = int64_t{rows.num_seqs} * rule.num_heads;
  const bool is_serial = num_items * rule.key_dim * rule.value_dim < kSerialStateElements;
#pragma omp parallel for num_threads(is_serial ? 1 : num_threads)
  for (int64_t item = 0; item < num_items; ++item) {
    const StateRow row(rows, item / rule.num_heads);
    run(rule, row, static_cast<int>(item % rule.num_heads));
  }
}

}  // namespace headrace

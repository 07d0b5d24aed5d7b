// The gated delta rule, token by token. A column of a head's state depends on no other column: a thread takes a few
// columns through all tokens of a sequence, and sums over keys in one order, so that a token's result does not depend
// on how its sequence was cut into steps.

#include <algorithm>
#include <cmath>

#include "../abi.h"
#include "../simd.h"
#include "../state_rows.h"

namespace headrace {
namespace {

constexpr int64_t kSerialElements = 1 << 14;  // Of states; waking other threads costs more than it saves below this.
constexpr int kMaxKeyDim = 256;
constexpr int kMaxVectors = 8;  // Of a block of columns: its sums stay in registers.
constexpr float kNormEps = 1e-6f;

struct DeltaRule {
  const void *qkv, *gates;
  const float *rate, *step_bias;
  void* result;
  float* states;
  int64_t qkv_stride, gates_stride;
  int num_key_heads, num_value_heads, key_dim, value_dim;
};

// A token's share in one head.
struct Token {
  alignas(64) float query[kMaxKeyDim + kLanes], key[kMaxKeyDim + kLanes];
  float decay, strength;
};

// Divides a vector by its length.
template <typename T>
inline void normalise(const T* source, float* target, int size, float scale) {
  const int padded = (size + kLanes - 1) / kLanes * kLanes;
  widen(source, target, size, padded);
  Floats sum = splat(0.0f);
  for (int i = 0; i < padded; i += kLanes) sum += load(target + i) * load(target + i);
  const Floats factor = splat(scale / std::sqrt(horizontal_sum(sum) + kNormEps));
  for (int i = 0; i < padded; i += kLanes) store(target + i, load(target + i) * factor);
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <typename T>
inline void read_token(const DeltaRule& d, int64_t token, int head, Token& result) {
  const T* qkv = static_cast<const T*>(d.qkv) + token * d.qkv_stride;
  const T* gates = static_cast<const T*>(d.gates) + token * d.gates_stride;
  const int key_head = head / (d.num_value_heads / d.num_key_heads);
  normalise(qkv + key_head * d.key_dim, result.query, d.key_dim, 1.0f / std::sqrt(static_cast<float>(d.key_dim)));
  normalise(qkv + (d.num_key_heads + key_head) * d.key_dim, result.key, d.key_dim, 1.0f);
  result.strength = 1.0f / (1.0f + std::exp(-to_float(gates[head])));
  result.decay = std::exp(-d.rate[head] * softplus(to_float(gates[d.num_value_heads + head]) + d.step_bias[head]));
}

// Takes kVectors vectors of columns of a state through one token.
template <int kVectors, typename T>
inline void step(const Token& token, int key_dim, const T* value, T* result, float* state, int64_t stride) {
  Floats known[kVectors], read[kVectors];
  for (int j = 0; j < kVectors; ++j) known[j] = read[j] = splat(0.0f);
  for (int i = 0; i < key_dim; ++i)
    for (int j = 0; j < kVectors; ++j) known[j] += load(state + i * stride + j * kLanes) * token.key[i];
  for (int j = 0; j < kVectors; ++j) known[j] = (load(value + j * kLanes) - known[j] * token.decay) * token.strength;
  for (int i = 0; i < key_dim; ++i)
    for (int j = 0; j < kVectors; ++j) {
      float* place = state + i * stride + j * kLanes;
      const Floats updated = load(place) * token.decay + known[j] * token.key[i];
      store(place, updated);
      read[j] += updated * token.query[i];
    }
  for (int j = 0; j < kVectors; ++j) store(result + j * kLanes, read[j]);
}

// The same of one column.
template <typename T>
inline void step_column(const Token& token, int key_dim, const T* value, T* result, float* state, int64_t stride) {
  float known = 0.0f, read = 0.0f;
  for (int i = 0; i < key_dim; ++i) known += state[i * stride] * token.key[i];
  const float correction = (to_float(*value) - known * token.decay) * token.strength;
  for (int i = 0; i < key_dim; ++i) {
    float& place = state[i * stride];
    place = place * token.decay + correction * token.key[i];
    read += place * token.query[i];
  }
  store_scalar(result, read);
}

// Takes `columns` columns, from `column` on, of a head of a sequence through all its tokens. Those behind the kept ones
// go on with a copy.
template <int kVectors, typename T>
void run_columns(const DeltaRule& d, const StateRow& row, int head, int column) {
  constexpr int kColumns = kVectors ? kVectors * kLanes : 1;
  alignas(64) float copy[kMaxKeyDim * kColumns];
  const int64_t value_width = int64_t{d.num_value_heads} * d.value_dim, place = int64_t{head} * d.value_dim + column;
  const T* values = static_cast<const T*>(d.qkv) + 2 * int64_t{d.num_key_heads} * d.key_dim + place;
  T* results = static_cast<T*>(d.result) + place;
  float* pool = d.states + ((row.slot * d.num_value_heads + head) * d.key_dim) * d.value_dim + column;
  float* state = pool;
  int64_t stride = d.value_dim;
  if (row.is_new && !row.is_padding)
    for (int i = 0; i < d.key_dim; ++i) std::fill_n(pool + i * stride, kColumns, 0.0f);
  Token token;
  int save = 0;
  for (int t = 0; t < row.length; ++t) {
    if (state == pool && (t == row.num_kept || row.is_padding)) {
      for (int i = 0; i < d.key_dim; ++i) std::copy_n(pool + i * stride, kColumns, copy + i * kColumns);
      state = copy;
      stride = kColumns;
    }
    const int64_t number = row.first + t;
    read_token<T>(d, number, head, token);
    const T* value = values + number * d.qkv_stride;
    if constexpr (kVectors == 0)
      step_column(token, d.key_dim, value, results + number * value_width, state, stride);
    else
      step<kVectors>(token, d.key_dim, value, results + number * value_width, state, stride);
    for (; save < row.num_saves && row.save_tokens[save] == t + 1; ++save) {
      float* target = pool + (row.save_slots[save] - row.slot) * d.num_value_heads * d.key_dim * d.value_dim;
      for (int i = 0; i < d.key_dim; ++i) std::copy_n(state + i * stride, kColumns, target + i * int64_t{d.value_dim});
    }
  }
}

template <typename T>
void run_head(const DeltaRule& d, const StateRow& row, int head, int first, int end) {
  int column = first;
  for (; column + kMaxVectors * kLanes <= end; column += kMaxVectors * kLanes)
    run_columns<kMaxVectors, T>(d, row, head, column);
  for (; column + 2 * kLanes <= end; column += 2 * kLanes) run_columns<2, T>(d, row, head, column);
  for (; column + kLanes <= end; column += kLanes) run_columns<1, T>(d, row, head, column);
  for (; column < end; ++column) run_columns<0, T>(d, row, head, column);
}

}  // namespace
}  // namespace headrace

EXPORTED void headrace_gated_delta(const void* qkv, const void* gates, const void* rate, const void* step_bias,
                                   void* result, void* states, const headrace::StateRows* rows, int64_t qkv_stride,
                                   int64_t gates_stride, int32_t num_key_heads, int32_t num_value_heads,
                                   int32_t key_dim, int32_t value_dim, int32_t dtype, int32_t num_threads) {
  using namespace headrace;
  const DeltaRule rule{qkv,          gates,         static_cast<const float*>(rate), static_cast<const float*>(step_bias),
                       result,       static_cast<float*>(states), qkv_stride, gates_stride,
                       num_key_heads, num_value_heads, key_dim, value_dim};
  const auto run = dtype == kFloat32    ? run_head<float>
                   : dtype == kBFloat16 ? run_head<bfloat16>
                                        : run_head<_Float16>;
  const int64_t elements = int64_t{rows->num_seqs} * num_value_heads * key_dim * value_dim;
#pragma omp parallel for num_threads(elements < kSerialElements ? 1 : num_threads)
  for (int64_t item = 0; item < int64_t{rows->num_seqs} * num_value_heads; ++item) {
    const StateRow row(*rows, item / num_value_heads);
    run(rule, row, static_cast<int>(item % num_value_heads), 0, value_dim);
  }
}

EXPORT_SIGNATURE(gated_delta)

EXPORT_STRUCTURE(StateRows, FIELD(slots), FIELD(query_starts), FIELD(context_lens), FIELD(num_kept), FIELD(save_starts),
                 FIELD(save_tokens), FIELD(save_slots), FIELD(num_seqs))

// The gated delta rule, token by token; `matrix_state/columns.h` says how the work is divided.

#include <cmath>

#include "../abi.h"
#include "../matrix_state/columns.h"
#include "../simd.h"
#include "../state_rows.h"

namespace headrace {
namespace {

constexpr float kNormEps = 1e-6f;

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

struct DeltaRule {
  struct Token {
    alignas(64) float query[kMaxKeyDim + kLanes], key[kMaxKeyDim + kLanes];
    float decay, strength;
  };

  const void *qkv, *gates;
  const float *rate, *step_bias;
  void* results;
  float* states;
  int64_t qkv_stride, gates_stride;
  int num_key_heads, num_heads, key_dim, value_dim;

  template <typename T>
  const T* value(int64_t token, int64_t place) const {
    return static_cast<const T*>(qkv) + token * qkv_stride + 2 * int64_t{num_key_heads} * key_dim + place;
  }

  template <typename T>
  T* result_of(int64_t token, int64_t place) const {
    return static_cast<T*>(results) + token * num_heads * value_dim + place;
  }

  template <typename T>
  void read_token(int64_t token, int head, Token& result) const {
    const T* features = static_cast<const T*>(qkv) + token * qkv_stride;
    const T* gate = static_cast<const T*>(gates) + token * gates_stride;
    const int key_head = head / (num_heads / num_key_heads);
    normalise(features + key_head * key_dim, result.query, key_dim, 1.0f / std::sqrt(static_cast<float>(key_dim)));
    normalise(features + (num_key_heads + key_head) * key_dim, result.key, key_dim, 1.0f);
    result.strength = 1.0f / (1.0f + std::exp(-to_float(gate[head])));
    result.decay = std::exp(-rate[head] * softplus(to_float(gate[num_heads + head]) + step_bias[head]));
  }

  template <int kVectors, typename T>
  void step(const Token& token, const T* value, T* result, float* state, int64_t stride) const {
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

  template <typename T>
  void step_column(const Token& token, const T* value, T* result, float* state, int64_t stride) const {
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
};

}  // namespace
}  // namespace headrace

EXPORTED void headrace_gated_delta(const void* qkv, const void* gates, const void* rate, const void* step_bias,
                                   void* result, void* states, const headrace::StateRows* rows, int64_t qkv_stride,
                                   int64_t gates_stride, int32_t num_key_heads, int32_t num_value_heads,
                                   int32_t key_dim, int32_t value_dim, int32_t dtype, int32_t num_threads) {
  using namespace headrace;
  const DeltaRule rule{qkv,           gates,           static_cast<const float*>(rate), static_cast<const float*>(step_bias),
                       result,        static_cast<float*>(states), qkv_stride, gates_stride,
                       num_key_heads, num_value_heads, key_dim, value_dim};
  run_heads(rule, *rows, dtype, num_threads);
}

EXPORT_SIGNATURE(gated_delta)

EXPORT_STRUCTURE(StateRows, FIELD(slots), FIELD(query_starts), FIELD(context_lens), FIELD(num_kept), FIELD(save_starts),
                 FIELD(save_tokens), FIELD(save_slots), FIELD(num_seqs))

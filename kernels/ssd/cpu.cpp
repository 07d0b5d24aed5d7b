// Mamba-2's state update, token by token; `matrix_state/columns.h` says how the work is divided.

#include <cmath>

#include "../abi.h"
#include "../matrix_state/columns.h"
#include "../simd.h"
#include "../state_rows.h"

namespace headrace {
namespace {

struct SsdRule {
  struct Token {
    alignas(64) float input[kMaxKeyDim + kLanes], output[kMaxKeyDim + kLanes];  // B and C of the head's group.
    float decay, step, skip;
  };

  const void *features, *steps;
  const float *rate, *step_bias, *skip;
  void* results;
  float* states;
  int64_t features_stride, steps_stride;
  int num_groups, num_heads, key_dim, value_dim;
  float min_step, max_step;

  template <typename T>
  const T* value(int64_t token, int64_t place) const {
    return static_cast<const T*>(features) + token * features_stride + place;
  }

  template <typename T>
  T* result_of(int64_t token, int64_t place) const {
    return static_cast<T*>(results) + token * num_heads * value_dim + place;
  }

  template <typename T>
  void read_token(int64_t token, int head, Token& result) const {
    const int group = head / (num_heads / num_groups), padded = (key_dim + kLanes - 1) / kLanes * kLanes;
    const T* inputs = value<T>(token, int64_t{num_heads} * value_dim + group * key_dim);
    widen(inputs, result.input, key_dim, padded);
    widen(inputs + num_groups * key_dim, result.output, key_dim, padded);
    const float wanted = to_float(static_cast<const T*>(steps)[token * steps_stride + head]) + step_bias[head];
    const float step = softplus(wanted);
    result.step = step < min_step ? min_step : step > max_step ? max_step : step;  // NaN stays NaN.
    result.decay = std::exp(-rate[head] * result.step);
    result.skip = skip[head];
  }

  template <int kVectors, typename T>
  void step(const Token& token, const T* value, T* result, float* state, int64_t stride) const {
    Floats scaled[kVectors], read[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      scaled[j] = load(value + j * kLanes) * token.step;
      read[j] = load(value + j * kLanes) * token.skip;
    }
    for (int i = 0; i < key_dim; ++i)
      for (int j = 0; j < kVectors; ++j) {
        float* place = state + i * stride + j * kLanes;
        const Floats updated = load(place) * token.decay + scaled[j] * token.input[i];
        store(place, updated);
        read[j] += updated * token.output[i];
      }
    for (int j = 0; j < kVectors; ++j) store(result + j * kLanes, read[j]);
  }

  template <typename T>
  void step_column(const Token& token, const T* value, T* result, float* state, int64_t stride) const {
    const float scaled = to_float(*value) * token.step;
    float read = to_float(*value) * token.skip;
    for (int i = 0; i < key_dim; ++i) {
      float& place = state[i * stride];
      place = place * token.decay + scaled * token.input[i];
      read += place * token.output[i];
    }
    store_scalar(result, read);
  }
};

}  // namespace
}  // namespace headrace

EXPORTED void headrace_ssd(const void* features, const void* steps, const void* rate, const void* step_bias,
                           const void* skip, void* result, void* states, const headrace::StateRows* rows,
                           int64_t features_stride, int64_t steps_stride, int32_t num_groups, int32_t num_heads,
                           int32_t state_size, int32_t head_dim, float min_step, float max_step, int32_t dtype,
                           int32_t num_threads) {
  using namespace headrace;
  const SsdRule rule{features,
                     steps,
                     static_cast<const float*>(rate),
                     static_cast<const float*>(step_bias),
                     static_cast<const float*>(skip),
                     result,
                     static_cast<float*>(states),
                     features_stride,
                     steps_stride,
                     num_groups,
                     num_heads,
                     state_size,
                     head_dim,
                     min_step,
                     max_step};
  run_heads(rule, *rows, dtype, num_threads);
}

EXPORT_SIGNATURE(ssd)

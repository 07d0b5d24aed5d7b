// A short convolution over the tokens of each sequence, a filter a channel, which goes on from the sequence's state.

#include <algorithm>

#include "../abi.h"
#include "../simd.h"
#include "../state_rows.h"

namespace headrace {
namespace {

constexpr int64_t kSerialElements = 1 << 14;  // Waking other threads costs more than it saves below this.
constexpr int kBlock = 512;                   // Channels of an item.

struct Convolution {
  const void *x, *weight, *bias;
  void* result;
  float* states;
  int64_t x_stride;
  int channels, width;
  bool has_silu;
};

// The inputs of one sequence: those of the step, and before them those of the state, or zeros.
template <typename T>
struct Inputs {
  const T* x;
  const float* state;
  int64_t x_stride;
  int channels, width;
  bool is_new;

  const float* before(int token) const { return state + int64_t{width - 1 + token} * channels; }

  Floats vector(int token, int channel) const {
    if (token >= 0) return load(x + token * x_stride + channel);
    return is_new ? splat(0.0f) : load(before(token) + channel);
  }

  float scalar(int token, int channel) const {
    if (token >= 0) return to_float(x[token * x_stride + channel]);
    return is_new ? 0.0f : before(token)[channel];
  }
};

template <typename T>
inline void convolve(const Convolution& c, const Inputs<T>& inputs, int token, int channel, int count, T* result) {
  const T *weight = static_cast<const T*>(c.weight), *bias = static_cast<const T*>(c.bias);
  int i = channel;
  for (; i + kLanes <= channel + count; i += kLanes) {
    Floats sum = bias ? load(bias + i) : splat(0.0f);
    for (int tap = 0; tap < c.width; ++tap)
      sum += load(weight + int64_t{tap} * c.channels + i) * inputs.vector(token - c.width + 1 + tap, i);
    store(result + i, c.has_silu ? silu(sum) : sum);
  }
  for (; i < channel + count; ++i) {
    float sum = bias ? to_float(bias[i]) : 0.0f;
    for (int tap = 0; tap < c.width; ++tap)
      sum += to_float(weight[int64_t{tap} * c.channels + i]) * inputs.scalar(token - c.width + 1 + tap, i);
    store_scalar(result + i, c.has_silu ? silu(splat(sum))[0] : sum);
  }
}

// Writes the last inputs behind `num_tokens` tokens of the step.
template <typename T>
inline void write_state(const Convolution& c, const Inputs<T>& inputs, int num_tokens, int channel, int count,
                        float* state) {
  for (int age = 0; age + 1 < c.width; ++age) {
    float* target = state + int64_t{age} * c.channels + channel;
    for (int i = 0; i < count; ++i) target[i] = inputs.scalar(num_tokens - c.width + 1 + age, channel + i);
  }
}

template <typename T>
void run_block(const Convolution& c, const StateRow& row, int channel) {
  const int count = std::min(kBlock, c.channels - channel);
  float* state = c.states + row.slot * (c.width - 1) * c.channels;
  const Inputs<T> inputs{static_cast<const T*>(c.x) + row.first * c.x_stride, state, c.x_stride, c.channels, c.width,
                         row.is_new};
  T* result = static_cast<T*>(c.result) + int64_t{row.first} * c.channels;
  for (int token = 0; token < row.length; ++token)
    convolve(c, inputs, token, channel, count, result + int64_t{token} * c.channels);
  if (row.is_padding) return;
  for (int save = 0; save < row.num_saves; ++save) {
    float* copy = c.states + row.save_slots[save] * (c.width - 1) * c.channels;
    write_state(c, inputs, row.save_tokens[save], channel, count, copy);
  }
  // An input that stays in the state moves to an older place, which was read already.
  write_state(c, inputs, row.num_kept, channel, count, state);
}

}  // namespace
}  // namespace headrace

EXPORTED void headrace_causal_conv(const void* x, void* result, const void* weight, const void* bias, void* states,
                                   const headrace::StateRows* rows, int64_t x_stride, int32_t channels, int32_t width,
                                   int32_t has_silu, int32_t dtype, int32_t num_threads) {
  using namespace headrace;
  const Convolution convolution{x,        weight,   bias,  result, static_cast<float*>(states),
                                x_stride, channels, width, has_silu != 0};
  const auto run = dtype == kFloat32    ? run_block<float>
                   : dtype == kBFloat16 ? run_block<bfloat16>
                                        : run_block<_Float16>;
  const int64_t num_blocks = (channels + kBlock - 1) / kBlock;
  const int64_t num_tokens = rows->query_starts[rows->num_seqs] - rows->query_starts[0];
  const bool is_serial = num_tokens * channels < kSerialElements;
#pragma omp parallel for num_threads(is_serial ? 1 : num_threads)
  for (int64_t item = 0; item < rows->num_seqs * num_blocks; ++item) {
    const StateRow row(*rows, item / num_blocks);
    run(convolution, row, static_cast<int>(item % num_blocks) * kBlock);
  }
}

EXPORT_SIGNATURE(causal_conv)

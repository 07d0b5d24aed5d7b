// Inputs in the form that a quantized matrix multiplies: a function of each row alone.
#pragma once

#include "weight.h"

namespace headrace {

// What inputs become.
enum class Inputs { kIntegers, kFloats, kPairs };

template <typename T>
constexpr bool kIsBFloat16 = false;
template <>
constexpr bool kIsBFloat16<bfloat16> = true;

// Inputs in bfloat16 lose nothing that matters by becoming integers of 8 bits, a factor for 32 of them; those in float32
// and float16 stay what they are, and results are those of the exact formula. Numbers that are no integers, and
// inputs rounded to them, are exact in bfloat16.
template <typename T>
inline Inputs inputs_of(const QuantizedLinear& linear) {
  if (linear.has_tokens()) return Inputs::kIntegers;
  if (is_integer(linear.number)) return kIsBFloat16<T> ? Inputs::kIntegers : Inputs::kFloats;
  return kIsBFloat16<T> || linear.rounding != Rounding::kNone ? Inputs::kPairs : Inputs::kFloats;
}

// The prepared rows of one multiplication.
struct Rows {
  Inputs inputs;
  char* values;    // [num_rows, num_columns] of int8, float or bfloat16.
  float* factors;  // [num_rows, num_factors]: what the values are to be multiplied by.
  float* sums;     // Of integers: [num_rows, num_groups]; of a group times their factors, or of the row.
  int64_t row_bytes;
  int32_t num_factors, num_groups;
  int64_t bytes;

  Rows(const QuantizedLinear& linear, Inputs kind, int64_t num_rows, char* memory) : inputs(kind) {
    const int size = inputs == Inputs::kIntegers ? 1 : inputs == Inputs::kPairs ? 2 : 4;
    const bool has_segments = inputs == Inputs::kIntegers && !linear.has_tokens();
    num_groups = linear.num_groups();
    num_factors = has_segments ? linear.num_columns() / linear.segment() : num_groups;
    row_bytes = int64_t{linear.num_columns()} * size;
    const auto padded = [](int64_t count) { return (count + 63) / 64 * 64; };
    values = memory;
    factors = reinterpret_cast<float*>(memory + padded(num_rows * row_bytes));
    sums = factors + padded(num_rows * num_factors);
    bytes = padded(num_rows * row_bytes) + 4 * (padded(num_rows * num_factors) + padded(num_rows * num_groups));
  }
};

typedef int8_t SignedBytes __attribute__((vector_size(kLanes)));

// Reads kPadded inputs in the order of the columns; zeros beyond the last.
template <typename T>
inline void read_inputs(const QuantizedLinear& linear, const T* x, int first, float* target) {
  const int count = std::min(kPadded, linear.num_inputs - first);
  if (!linear.input_order) return widen(x + first, target, count, kPadded);
  for (int i = 0; i < kPadded; ++i) target[i] = i < count ? to_float(x[linear.input_order[first + i]]) : 0.0f;
}

// The largest magnitude of `count` inputs; NaN counts as larger than all numbers.
inline Ints largest_bits(const float* values, int count, Ints largest = Ints{}) {
  for (int i = 0; i < count; i += kLanes) {
    const Ints bits = (Ints)load(values + i) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

inline float largest_of(Ints bits) {
  int32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) largest = std::max(largest, bits[i]);
  float result;
  std::memcpy(&result, &largest, 4);
  return result;
}

// Rounds to the nearest integer, halves to even: |values| < 2^22.
inline Ints nearest_integers(Floats values) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: the lowest bit of the sum counts ones.
  return (Ints)(values + kShift) - (Ints)splat(kShift);
}

inline Ints store_integers(Ints integers, int8_t* target) {
  const SignedBytes narrow = __builtin_convertvector(integers, SignedBytes);
  std::memcpy(target, &narrow, sizeof(narrow));
  return integers;
}

inline int sum_of(Ints integers) {
  return static_cast<int>(horizontal_sum(__builtin_convertvector(integers, Floats)));
}

// Integers with a factor for each segment, those of padding included: they are multiplied like all others.
template <typename T>
inline void prepare_segments(const QuantizedLinear& linear, const T* x, int8_t* values, float* factors, float* sums) {
  const int segment = linear.segment(), last_group = linear.num_groups() - 1;
  alignas(64) float inputs[kPadded];
  for (int first = 0; first < linear.num_columns(); first += kPadded) {
    read_inputs(linear, x, first, inputs);
    for (int start = 0; start < kPadded; start += segment) {
      const float largest = largest_of(largest_bits(inputs + start, segment));
      // The factor of so small inputs could not be inverted; they are zero.
      const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f, factor = largest / 127.0f;
      Ints total{};
      for (int i = start; i < start + segment; i += kLanes)
        total += store_integers(nearest_integers(load(inputs + i) * inverse), values + first + i);
      factors[(first + start) / segment] = factor;
      sums[std::min((first + start) / linear.group_size, last_group)] += factor * sum_of(total);
    }
  }
}

// Integers with a factor for the row.
template <typename T>
inline void prepare_token(const QuantizedLinear& linear, const T* x, int8_t* values, float* factors, float* sums) {
  alignas(64) float inputs[kPadded];
  float factor = linear.activation_scale;
  if (linear.rounding == Rounding::kToken) {
    Ints largest{};
    for (int first = 0; first < linear.num_columns(); first += kPadded) {
      read_inputs(linear, x, first, inputs);
      largest = largest_bits(inputs, kPadded, largest);
    }
    const float scale = largest_of(largest) / 127.0f;
    factor = scale < 1e-12f ? 1e-12f : scale;
  }
  for (int first = 0; first < linear.num_columns(); first += kPadded) {
    read_inputs(linear, x, first, inputs);
    Ints total{};
    for (int i = 0; i < kPadded; i += kLanes) {
      Floats steps = load(inputs + i) / factor;
      steps = steps < -128.0f ? splat(-128.0f) : steps;
      steps = steps > 127.0f ? splat(127.0f) : steps;
      total += store_integers(nearest_integers(steps), values + first + i);
    }
    sums[0] += sum_of(total);
  }
  factors[0] = factor;
}

// Rounds to float8_e4m3fn: 4 significant bits, halves to even; below 2^-6 to multiples of 2^-9.
inline Floats round_to_float8(Floats values) {
  values = values > 448.0f ? splat(448.0f) : values;
  values = values < -448.0f ? splat(-448.0f) : values;
  const Ints bits = (Ints)values;
  const Ints normal = (bits + 0x7ffff + ((bits >> 20) & 1)) & ~0xfffff;
  constexpr float kShift = 12582912.0f / 512.0f;
  const Floats small = (values + kShift) - kShift, magnitude = (Floats)(bits & 0x7fffffff);
  const Floats rounded = magnitude < 0.015625f ? small : (Floats)normal;
  return values == values ? rounded : values;
}

// bfloat16 numbers with a factor for each group, rounded to float8 where inputs are to be.
template <typename T>
inline void prepare_pairs(const QuantizedLinear& linear, const T* x, bfloat16* values, float* factors) {
  alignas(64) float inputs[kPadded];
  const int columns = linear.num_columns(), step = linear.num_groups() == 1 ? columns : linear.group_size;
  for (int group = 0, start = 0; start < columns; ++group, start += step) {
    const int end = std::min(start + step, columns);
    float factor = linear.rounding == Rounding::kStatic ? linear.activation_scale : 1.0f;
    if (linear.rounding == Rounding::kToken) {
      Ints largest{};
      for (int first = start; first < end; first += kPadded) {
        read_inputs(linear, x, first, inputs);
        largest = largest_bits(inputs, kPadded, largest);
      }
      const float scale = largest_of(largest) / 448.0f;
      factor = scale < 1e-12f ? 1e-12f : scale;
    }
    for (int first = start; first < end; first += kPadded) {
      read_inputs(linear, x, first, inputs);
      for (int i = 0; i < kPadded; i += kLanes) {
        const Floats value = load(inputs + i);
        store(values + first + i, linear.rounding == Rounding::kNone ? value : round_to_float8(value / factor));
      }
    }
    factors[group] = factor;
  }
}

// The inputs as they are.
template <typename T>
inline void prepare_floats(const QuantizedLinear& linear, const T* x, float* values, float* factors) {
  for (int first = 0; first < linear.num_columns(); first += kPadded) read_inputs(linear, x, first, values + first);
  for (int group = 0; group < linear.num_groups(); ++group) factors[group] = 1.0f;
}

template <typename T>
inline void prepare_row(const QuantizedLinear& linear, const Rows& rows, const T* x, int64_t row) {
  char* values = rows.values + row * rows.row_bytes;
  float *factors = rows.factors + row * rows.num_factors, *sums = rows.sums + row * rows.num_groups;
  for (int group = 0; group < rows.num_groups; ++group) sums[group] = 0.0f;
  if (rows.inputs == Inputs::kFloats)
    prepare_floats(linear, x, reinterpret_cast<float*>(values), factors);
  else if (rows.inputs == Inputs::kPairs)
    prepare_pairs(linear, x, reinterpret_cast<bfloat16*>(values), factors);
  else if (linear.has_tokens())
    prepare_token(linear, x, reinterpret_cast<int8_t*>(values), factors, sums);
  else
    prepare_segments(linear, x, reinterpret_cast<int8_t*>(values), factors, sums);
}

}  // namespace headrace

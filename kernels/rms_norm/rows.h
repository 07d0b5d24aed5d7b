// RMS normalisation of one row, in fp32, rounded once.
#pragma once

#include <cmath>

#include "../simd.h"

namespace headrace {

// The factor that brings `size` elements to a root mean square of one.
template <typename T>
inline float inverse_rms(const T* row, int size, float eps) {
  Floats squares[2] = {};
  int i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    const Floats a = load(row + i), b = load(row + i + kLanes);
    squares[0] += a * a;
    squares[1] += b * b;
  }
  float rest = 0.0f;
  for (; i < size; ++i) rest += to_float(row[i]) * to_float(row[i]);
  return 1.0f / std::sqrt((horizontal_sum(squares[0] + squares[1]) + rest) / size + eps);
}

template <typename T, typename Weight, typename Result>
inline void rms_norm_row(const T* row, const Weight* weight, float eps, Result* result, int size) {
  const float factor = inverse_rms(row, size, eps);
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) store(result + i, load(row + i) * factor * load(weight + i));
  for (; i < size; ++i) store_scalar(result + i, to_float(row[i]) * factor * to_float(weight[i]));
}

// Adds `row` to `residual`, in place, rounded to its type.
template <typename T>
inline void add_row(const T* row, T* residual, int size) {
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) store(residual + i, load(residual + i) + load(row + i));
  for (; i < size; ++i) store_scalar(residual + i, to_float(residual[i]) + to_float(row[i]));
}

}  // namespace headrace

// Nonlinear functions beside those of simd.h, in fp32.
#pragma once

#include "../simd.h"

namespace headrace {

// 1 / (1 + exp(-x)), through exp(-|x|), which cannot overflow.
inline Floats sigmoid(Floats x) {
  const Floats e = exp_nonpositive(x < 0.0f ? x : -x);
  return (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

// 0.5 x (1 + tanh(y)) = x sigmoid(2 y), with y = sqrt(2 / pi) (x + 0.044715 x^3).
inline Floats gelu_tanh(Floats x) { return x * sigmoid(x * (1.5957691216f + 0.07135481627f * (x * x))); }

// x times the normal distribution function, by the error function's complement: Abramowitz and Stegun, 7.1.26, which is
// right to 1.5e-7. Taken of -|x|, whose tail would vanish beside one.
inline Floats gelu(Floats x) {
  const Floats z = (x < 0.0f ? -x : x) * 0.70710678f;
  const Floats t = 1.0f / (1.0f + 0.3275911f * z);
  Floats y = splat(1.061405429f);
  y = y * t - 1.453152027f;
  y = y * t + 1.421413741f;
  y = y * t - 0.284496736f;
  y = y * t + 0.254829592f;
  const Floats tail = 0.5f * y * t * exp_nonpositive(-(z * z));
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

// SiLU of one half of a row times the other half, rounded once.
template <typename T, typename Target>
inline void silu_mul_row(const T* gate_up, Target* target, int size) {
  const T *gate = gate_up, *up = gate_up + size;
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) store(target + i, silu(load(gate + i)) * load(up + i));
  for (; i < size; ++i) store_scalar(target + i, silu(splat(to_float(gate[i])))[0] * to_float(up[i]));
}

}  // namespace headrace

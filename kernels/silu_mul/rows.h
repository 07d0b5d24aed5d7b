// SiLU of one half of a row times the other half, in fp32, rounded once.
#pragma once

#include "../simd.h"

namespace headrace {

template <typename T, typename Target>
inline void silu_mul_row(const T* gate_up, Target* target, int size) {
  const T *gate = gate_up, *up = gate_up + size;
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) store(target + i, silu(load(gate + i)) * load(up + i));
  for (; i < size; ++i) store_scalar(target + i, silu(splat(to_float(gate[i])))[0] * to_float(up[i]));
}

}  // namespace headrace

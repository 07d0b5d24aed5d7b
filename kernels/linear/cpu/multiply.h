// Multiplication of rows by a quantized matrix, shared among threads.
#pragma once

#include "floats.h"
#include "integers.h"
#include "pairs.h"

namespace headrace {

// The products are functions of their own: side by side in one, the loops of some come out a tenth slower.
template <int R>
inline void multiply_half(const QuantizedLinear& linear, const Rows& rows, int row, int panel, int half,
                          Floats (*sums)[kPanelVectors]) {
  with_number(linear.number, [&](auto of) {
    using Of = decltype(of);
    if constexpr (!Of::kIsInteger) {
      if (rows.inputs == Inputs::kPairs) return multiply_pairs<Of, bfloat16, R>(linear, rows, row, panel, half, sums);
      return multiply_pairs<Of, float, R>(linear, rows, row, panel, half, sums);
    } else {
      if (rows.inputs == Inputs::kFloats)
        return multiply_groups_exactly<Of::kBits, R>(linear, rows, row, panel, half, sums);
      if (linear.segment() == 32) return multiply_groups<Of::kBits, 32, R>(linear, rows, row, panel, half, sums);
      return multiply_groups<Of::kBits, 16, R>(linear, rows, row, panel, half, sums);
    }
  });
}

// Multiplies R rows by a panel; not inlined, since what becomes of the sums is the same code for all forms.
template <int R>
__attribute__((noinline)) void multiply_quantized_tile(const QuantizedLinear& linear, const Rows& rows, int row,
                                                       int panel, Floats (*sums)[kPanelVectors]) {
  if (linear.has_tokens())
    multiply_tokens<R>(linear, rows, row, panel, sums);
  else
    for (int half = 0; half < 2; ++half) multiply_half<R>(linear, rows, row, panel, half, sums);
  if (!linear.bias) return;
  for (int v = 0; v < kPanelVectors; ++v) {
    const Floats bias = load(linear.bias + panel * kPanel + v * kLanes);
    for (int r = 0; r < R; ++r) sums[r][v] += bias;
  }
}

template <int R = kTileRows>
inline void multiply_quantized_some(int count, const QuantizedLinear& linear, const Rows& rows, int row, int panel,
                                    Floats (*sums)[kPanelVectors]) {
  if constexpr (R > 0) {
    if (count == R) return multiply_quantized_tile<R>(linear, rows, row, panel, sums);
    multiply_quantized_some<R - 1>(count, linear, rows, row, panel, sums);
  }
}

// Multiplies the prepared rows from `row` to `end` by a panel; `finish` gets each row and its sums.
template <typename Finisher>
inline void multiply_quantized_rows(const QuantizedLinear& linear, const Rows& rows, int panel, int row, int end,
                                    Finisher finish) {
  for (int tiles = (end - row + kTileRows - 1) / kTileRows; row < end; --tiles) {
    const int count = (end - row + tiles - 1) / tiles;
    Floats sums[kTileRows][kPanelVectors];
    multiply_quantized_some(count, linear, rows, row, panel, sums);
    for (int r = 0; r < count; ++r) finish(row + r, sums[r]);
    row += count;
  }
}

// Multiplies prepared rows, and adds `more`; every thread of the team calls it.
template <typename T, Finish kFinish, typename More = NothingMore>
void multiply_quantized(const QuantizedLinear& linear, const Rows& rows, void* target, int64_t target_stride,
                        int num_rows, Operation& operation, More more = {}) {
  const int panels = linear.num_panels(), parts = (num_rows + kItemRows - 1) / kItemRows;
  share(operation, int64_t{panels} * parts, [&](int64_t item) {
    const int panel = static_cast<int>(item / parts), row = static_cast<int>(item % parts) * kItemRows;
    multiply_quantized_rows(linear, rows, panel, row, std::min(row + kItemRows, num_rows),
                            [&](int64_t of, Floats* sums) {
                              if constexpr (More::kReads)
                                if ((of - row) % kTileRows == 0) more.ask(of + kTileRows, panel);
                              more(of, panel, sums);
                              finish_row<T, kFinish>(target, of * target_stride, panel, linear.num_outputs, sums);
                            });
  });
}

}  // namespace headrace

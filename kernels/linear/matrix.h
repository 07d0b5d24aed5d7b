// A matrix in any form that the CPU kernels multiply by.
#pragma once

#include "cpu/multiply.h"
#include "dense/packed.h"

namespace headrace {

struct Matrix {
  PackedLinear dense;
  const QuantizedLinear* quantized;  // In place of the dense one; null otherwise.

  bool is_given() const { return quantized || dense.weight; }
  int num_inputs() const { return quantized ? quantized->num_inputs : dense.num_inputs; }
  int num_outputs() const { return quantized ? quantized->num_outputs : dense.num_outputs; }
  int num_panels() const { return quantized ? quantized->num_panels() : dense.num_panels(); }

  // Memory for the prepared inputs of a quantized matrix.
  template <typename T>
  int64_t prepared_bytes(int64_t num_rows) const {
    return quantized ? Rows(*quantized, inputs_of<T>(*quantized), num_rows, nullptr).bytes : 0;
  }
};

// Cuts memory into pieces; without memory, counts how much they take.
struct Pieces {
  char* memory;
  int64_t bytes = 0;

  template <typename T>
  T* take(int64_t count) {
    char* piece = memory + bytes;
    bytes += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(piece);
  }
};

}  // namespace headrace

// A quantized matrix as the kernels read it; packing.py makes it.
//
// As a dense matrix (../dense/packed.h), it is stored panel by panel. A panel lies as two halves of kHalf vectors of
// output features each, so that a tile's sums and what scales them fit into the registers. A half is a row of vectors of
// 32-bit words: a word holds 8 columns of 4 bits, or 4 columns of 8 bits, of one feature.
#pragma once

#include "numbers.h"

namespace headrace {

constexpr int kHalf = kPanelVectors / 2;
constexpr int kPadded = 32;  // Columns are padded with zeros to a multiple of this.

enum class Offset : int32_t {
  kZero = 0,   // -scale * the same zero point for all.
  kZeros = 1,  // -scale * a zero point of each group, in a byte.
  kFloat = 2,  // As they are, in float32.
};

enum class Rounding : int32_t { kNone = 0, kToken = 1, kStatic = 2 };

struct QuantizedLinear {
  const void* weight;
  const void* scales;   // [panels, groups, kPanel] of scale_dtype.
  const void* offsets;  // Likewise; null with Offset::kZero.
  const float* bias;    // As that of PackedLinear.
  const int32_t* input_order;  // Column j multiplies input feature input_order[j]; null is in order.
  int32_t num_inputs, num_outputs, group_size;
  Number number;
  DType scale_dtype;
  Offset offset;
  float zero_point;
  Rounding rounding;  // Of the inputs, to numbers of the same kind.
  float activation_scale;

  // Integers from -128, stored from zero, times a scale a feature; inputs are integers too.
  bool has_tokens() const { return rounding != Rounding::kNone && is_integer(number); }

  int num_panels() const { return (num_outputs + kPanel - 1) / kPanel; }
  int num_groups() const { return (num_inputs + group_size - 1) / group_size; }
  int num_columns() const { return (num_inputs + kPadded - 1) / kPadded * kPadded; }
  // Columns whose inputs share a factor, where inputs become integers.
  int segment() const { return group_size % 32 == 0 || num_groups() == 1 ? 32 : 16; }
  int64_t half_words() const { return int64_t{num_columns()} * bits_of(number) / 32 * kHalf * kLanes; }

  const int32_t* half_weights(int panel, int half) const {
    return static_cast<const int32_t*>(weight) + (int64_t{panel} * 2 + half) * half_words();
  }

  int64_t group_index(int panel, int half, int group) const {
    return (int64_t{panel} * num_groups() + group) * kPanel + half * kHalf * kLanes;
  }
};

// Asks memory for the line that lies a page after this one. The processor reads ahead by itself, but not across pages.
inline void read_ahead(const int32_t* weights) { __builtin_prefetch(weights + 1024); }

inline Floats load_scale(const QuantizedLinear& linear, int64_t index) {
  switch (linear.scale_dtype) {
    case kFloat16: return load(static_cast<const _Float16*>(linear.scales) + index);
    case kBFloat16: return load(static_cast<const bfloat16*>(linear.scales) + index);
    default: return load(static_cast<const float*>(linear.scales) + index);
  }
}

inline Floats load_offset(const QuantizedLinear& linear, int64_t index, Floats scale) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  switch (linear.offset) {
    case Offset::kZero: return scale * -linear.zero_point;
    case Offset::kZeros: {
      const Bytes zeros = load_raw<Bytes>(static_cast<const uint8_t*>(linear.offsets) + index);
      return -scale * __builtin_convertvector(zeros, Floats);
    }
    default: return load(static_cast<const float*>(linear.offsets) + index);
  }
}

}  // namespace headrace

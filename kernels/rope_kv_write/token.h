// Head normalisation, rotation and KV write of one token, in fp32, rounded once.
#pragma once

#include "../rms_norm/rows.h"

namespace headrace {

constexpr int kMaxRotatedHeadDim = 256;

struct HeadSizes {
  int32_t num_heads, num_kv_heads, head_dim, rotated_dim;
};

// Rotates `source` into `target`; a weight of null leaves the head as it is before.
template <typename T, typename Weight, typename Target>
inline void rotate_head(const T* source, Target* target, const HeadSizes& sizes, const float* cos, const float* sin,
                        const Weight* weight, float eps) {
  alignas(64) float head[kMaxRotatedHeadDim], rotated[kMaxRotatedHeadDim];
  if (weight)
    rms_norm_row(source, weight, eps, head, sizes.head_dim);
  else
    widen(source, head, sizes.head_dim, sizes.head_dim);
  const int half = sizes.rotated_dim / 2;
  for (int i = 0; i < half; ++i) {
    rotated[i] = head[i] * cos[i] - head[i + half] * sin[i];
    rotated[i + half] = head[i + half] * cos[i] + head[i] * sin[i];
  }
  for (int i = sizes.rotated_dim; i < sizes.head_dim; ++i) rotated[i] = head[i];
  narrow(rotated, target, sizes.head_dim);
}

template <typename T, typename Target>
inline void convert(const T* source, Target* target, int count) {
  alignas(64) float wide[kMaxRotatedHeadDim];
  widen(source, wide, count, count);
  narrow(wide, target, count);
}

// Rotates the query heads of a token in place; writes its keys, rotated, and its values, where they are not null.
template <typename T, typename Weight, typename Cache>
inline void rotate_token(T* qkv, const HeadSizes& sizes, const float* cos_sin, const Weight* query_norm,
                         const Weight* key_norm, float eps, Cache* key, Cache* value) {
  const float *cos = cos_sin, *sin = cos_sin + sizes.rotated_dim / 2;
  const int dim = sizes.head_dim;
  for (int h = 0; h < sizes.num_heads; ++h)
    rotate_head(qkv + h * dim, qkv + h * dim, sizes, cos, sin, query_norm, eps);
  if (!key) return;
  const T *keys = qkv + sizes.num_heads * dim, *values = keys + sizes.num_kv_heads * dim;
  for (int h = 0; h < sizes.num_kv_heads; ++h) {
    rotate_head(keys + h * dim, key + h * dim, sizes, cos, sin, key_norm, eps);
    convert(values + h * dim, value + h * dim, dim);
  }
}

}  // namespace headrace

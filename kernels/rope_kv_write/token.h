// Head normalisation, rotation and KV write of one token, in fp32, rounded once.
#pragma once

#include "../quantized_kv.h"
#include "../rms_norm/rows.h"

namespace headrace {

constexpr int kMaxRotatedHeadDim = 256;

struct HeadSizes {
  int32_t num_heads, num_kv_heads, head_dim, rotated_dim;
};

// Where a token's keys and values go; no keys for a token of padding.
template <typename Cache>
struct TokenCache {
  Cache* key = nullptr;
  Cache* value = nullptr;
  _Float16* scales = nullptr;  // Of the first KV head, in eight bits; those of the next are `scale_stride` further on.
  int64_t scale_stride = 0;

  TokenCache(void* keys, void* values, void* kv_scales, int64_t slot, const HeadSizes& sizes, int block_size) {
    if (slot < 0) return;
    const int64_t offset = slot * sizes.num_kv_heads * sizes.head_dim;
    key = static_cast<Cache*>(keys) + offset;
    value = static_cast<Cache*>(values) + offset;
    if (!EightBits<Cache>::kIs) return;
    scale_stride = int64_t{2} * block_size;
    scales = static_cast<_Float16*>(kv_scales) + slot / block_size * sizes.num_kv_heads * scale_stride +
             slot % block_size * 2;
  }
};

// Rotates `source` into `target`; a weight of null leaves the head as it is before.
template <typename T, typename Weight, typename Target>
inline void rotate_head(const T* source, Target* target, const HeadSizes& sizes, const float* cos, const float* sin,
                        const Weight* weight, float eps, _Float16* scale = nullptr) {
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
  store_head(rotated, target, sizes.head_dim, scale);
}

template <typename T, typename Target>
inline void convert(const T* source, Target* target, int count, _Float16* scale) {
  alignas(64) float wide[kMaxRotatedHeadDim];
  widen(source, wide, count, count);
  store_head(wide, target, count, scale);
}

// Rotates the query heads of a token in place; writes its keys, rotated, and its values.
template <typename T, typename Weight, typename Cache>
inline void rotate_token(T* qkv, const HeadSizes& sizes, const float* cos_sin, const Weight* query_norm,
                         const Weight* key_norm, float eps, const TokenCache<Cache>& cache) {
  const float *cos = cos_sin, *sin = cos_sin + sizes.rotated_dim / 2;
  const int dim = sizes.head_dim;
  for (int h = 0; h < sizes.num_heads; ++h)
    rotate_head(qkv + h * dim, qkv + h * dim, sizes, cos, sin, query_norm, eps);
  if (!cache.key) return;
  const T *keys = qkv + sizes.num_heads * dim, *values = keys + sizes.num_kv_heads * dim;
  for (int h = 0; h < sizes.num_kv_heads; ++h) {
    _Float16* scales = cache.scales + h * cache.scale_stride;
    rotate_head(keys + h * dim, cache.key + h * dim, sizes, cos, sin, key_norm, eps, scales);
    convert(values + h * dim, cache.value + h * dim, dim, scales + 1);
  }
}

}  // namespace headrace

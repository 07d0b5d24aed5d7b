// Head normalisation, rotation and KV write of one token, in fp32, rounded once.
#pragma once

#include "../cache_strides.h"
#include "../quantized_kv.h"
#include "../rms_norm/rows.h"

namespace headrace {

constexpr int kMaxRotatedHeadDim = 576;  // Of values too.

struct HeadSizes {
  int32_t num_heads, num_kv_heads, head_dim, rotated_dim;
};

// Which dimensions of a head are paired: from the first on, either neighbours or those half the rotated ones apart.
struct Pairing {
  int32_t first_rotated = 0, is_interleaved = 0;
};

// Where a token's keys and values go; no keys for a token of padding, and no values where keys hold them.
template <typename Cache>
struct TokenCache {
  Cache* key = nullptr;
  Cache* value = nullptr;
  _Float16* scales = nullptr;  // Of the first KV head, in eight bits; those of the next are `scale_stride` further on.
  int64_t scale_stride = 0;
  CacheStrides key_strides, value_strides;

  TokenCache(void* keys, void* values, void* kv_scales, int64_t slot, int num_kv_heads, int block_size,
             const CacheStrides& strides_of_keys, const CacheStrides& strides_of_values)
      : key_strides(strides_of_keys), value_strides(strides_of_values) {
    if (slot < 0 || !keys) return;
    key = static_cast<Cache*>(keys) + key_strides.slot(slot, block_size);
    if (values) value = static_cast<Cache*>(values) + value_strides.slot(slot, block_size);
    if (!EightBits<Cache>::kIs) return;
    scale_stride = int64_t{2} * block_size;
    scales = static_cast<_Float16*>(kv_scales) + slot / block_size * num_kv_heads * scale_stride + slot % block_size * 2;
  }
};

// Rotates `head` into `rotated`, in whose other dimensions nothing changes.
inline void rotate_pairs(const float* head, float* rotated, int rotated_dim, Pairing pairing, const float* cos,
                         const float* sin) {
  const int half = rotated_dim / 2;
  head += pairing.first_rotated;
  rotated += pairing.first_rotated;
  if (pairing.is_interleaved) {
    for (int i = 0; i < half; ++i) {
      rotated[2 * i] = head[2 * i] * cos[i] - head[2 * i + 1] * sin[i];
      rotated[2 * i + 1] = head[2 * i + 1] * cos[i] + head[2 * i] * sin[i];
    }
    return;
  }
  for (int i = 0; i < half; ++i) {
    rotated[i] = head[i] * cos[i] - head[i + half] * sin[i];
    rotated[i + half] = head[i + half] * cos[i] + head[i] * sin[i];
  }
}

// Rotates `source` into `target`, whose elements are `stride` apart; a weight of null leaves the head as it is before.
template <typename T, typename Weight, typename Target>
inline void rotate_head(const T* source, Target* target, int64_t stride, const HeadSizes& sizes, Pairing pairing,
                        const float* cos, const float* sin, const Weight* weight, float eps,
                        _Float16* scale = nullptr) {
  alignas(64) float head[kMaxRotatedHeadDim], rotated[kMaxRotatedHeadDim];
  if (weight)
    rms_norm_row(source, weight, eps, head, sizes.head_dim);
  else
    widen(source, head, sizes.head_dim, sizes.head_dim);
  for (int i = 0; i < pairing.first_rotated; ++i) rotated[i] = head[i];
  rotate_pairs(head, rotated, sizes.rotated_dim, pairing, cos, sin);
  for (int i = pairing.first_rotated + sizes.rotated_dim; i < sizes.head_dim; ++i) rotated[i] = head[i];
  if (stride == 1) return store_head(rotated, target, sizes.head_dim, scale);
  Target stored[kMaxRotatedHeadDim];
  store_head(rotated, stored, sizes.head_dim, scale);
  for (int i = 0; i < sizes.head_dim; ++i) target[i * stride] = stored[i];
}

template <typename T, typename Target>
inline void convert(const T* source, Target* target, int count, _Float16* scale) {
  alignas(64) float wide[kMaxRotatedHeadDim];
  widen(source, wide, count, count);
  store_head(wide, target, count, scale);
}

// Rotates the query heads of a token in place; writes its keys, rotated, and its values, each of `value_dim` numbers.
template <typename T, typename Weight, typename Cache>
inline void rotate_token(T* qkv, const T* values, int value_dim, const HeadSizes& sizes, Pairing pairing,
                         const float* cos_sin, const Weight* query_norm, const Weight* key_norm, float eps,
                         const TokenCache<Cache>& cache) {
  const float *cos = cos_sin, *sin = cos_sin + sizes.rotated_dim / 2;
  const int dim = sizes.head_dim;
  for (int h = 0; h < sizes.num_heads; ++h)
    rotate_head(qkv + h * dim, qkv + h * dim, 1, sizes, pairing, cos, sin, query_norm, eps);
  if (!cache.key) return;
  const T* keys = qkv + sizes.num_heads * dim;
  for (int h = 0; h < sizes.num_kv_heads; ++h) {
    _Float16* scales = cache.scales + h * cache.scale_stride;
    rotate_head(keys + h * dim, cache.key + h * cache.key_strides.head, cache.key_strides.element, sizes, pairing, cos,
                sin, key_norm, eps, scales);
    if (cache.value)
      convert(values + h * value_dim, cache.value + h * cache.value_strides.head, value_dim, scales + 1);
    else if (EightBits<Cache>::kIs)
      scales[1] = scales[0];
  }
}

}  // namespace headrace

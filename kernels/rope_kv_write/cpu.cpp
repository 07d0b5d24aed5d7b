// Rotation of queries and keys with head normalisation, and the write of keys and values into the cache; see token.h.

#include "../abi.h"
#include "token.h"

namespace headrace {

// What a step rotates and writes.
struct RotationArguments {
  void* qkv;
  const void* values;  // Of the type of qkv; null where qkv holds them, or there are none.
  const int64_t* positions;
  const float* cos_sin;
  void* key_cache;    // Null where there are neither keys nor values.
  void* value_cache;  // Null where there are no values.
  void* kv_scales;  // Null unless the cache has eight bits.
  const int64_t* slots;
  const void* query_norm;  // Of the type of qkv, as is key_norm; null when heads are not normalised.
  const void* key_norm;
  int64_t qkv_stride, values_stride;
  CacheStrides key_strides, value_strides;
  HeadSizes sizes;
  Pairing pairing;
  int32_t value_dim, num_tokens, block_size;
  float eps;
};

namespace {

constexpr int64_t kSerialElements = 1 << 14;  // Waking other threads costs more than it saves below this.

template <typename T, typename Cache>
void run_token(const RotationArguments& a, int64_t token) {
  const HeadSizes& sizes = a.sizes;
  const TokenCache<Cache> cache(a.key_cache, a.value_cache, a.kv_scales, a.slots[token], sizes.num_kv_heads,
                                a.block_size, a.key_strides, a.value_strides);
  T* qkv = static_cast<T*>(a.qkv) + token * a.qkv_stride;
  const T* values = a.values ? static_cast<const T*>(a.values) + token * a.values_stride
                             : qkv + (sizes.num_heads + sizes.num_kv_heads) * sizes.head_dim;
  rotate_token(qkv, values, a.value_dim, sizes, a.pairing, a.cos_sin + a.positions[token] * sizes.rotated_dim,
               static_cast<const T*>(a.query_norm), static_cast<const T*>(a.key_norm), a.eps, cache);
}

using RunToken = void (*)(const RotationArguments&, int64_t);

template <typename T>
RunToken choose(int32_t cache_dtype) {
  switch (cache_dtype) {
    case kFloat32: return run_token<T, float>;
    case kBFloat16: return run_token<T, bfloat16>;
    case kFloat16: return run_token<T, _Float16>;
    case kInt8: return run_token<T, int8_t>;
    default: return run_token<T, float8>;
  }
}

}  // namespace
}  // namespace headrace

EXPORTED void headrace_rope_kv_write(const headrace::RotationArguments* arguments, int32_t dtype, int32_t cache_dtype,
                                     int32_t num_threads) {
  using namespace headrace;
  const RotationArguments& a = *arguments;
  const RunToken run = dtype == kFloat32    ? choose<float>(cache_dtype)
                       : dtype == kBFloat16 ? choose<bfloat16>(cache_dtype)
                                            : choose<_Float16>(cache_dtype);
  const bool is_serial = a.num_tokens * a.qkv_stride < kSerialElements;
#pragma omp parallel for num_threads(is_serial ? 1 : num_threads)
  for (int64_t token = 0; token < a.num_tokens; ++token) run(a, token);
}

EXPORT_SIGNATURE(rope_kv_write)

EXPORT_STRUCTURE(RotationArguments, FIELD(qkv), FIELD(values), FIELD(positions), FIELD(cos_sin), FIELD(key_cache),
                 FIELD(value_cache), FIELD(kv_scales), FIELD(slots), FIELD(query_norm), FIELD(key_norm),
                 FIELD(qkv_stride), FIELD(values_stride), FIELD(key_strides), FIELD(value_strides),
                 FIELD_AT(num_heads, sizes.num_heads), FIELD_AT(num_kv_heads, sizes.num_kv_heads),
                 FIELD_AT(head_dim, sizes.head_dim), FIELD_AT(rotated_dim, sizes.rotated_dim),
                 FIELD_AT(first_rotated, pairing.first_rotated), FIELD_AT(is_interleaved, pairing.is_interleaved),
                 FIELD(value_dim), FIELD(num_tokens), FIELD(block_size), FIELD(eps))

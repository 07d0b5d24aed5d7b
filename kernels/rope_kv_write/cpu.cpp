// Rotation of queries and keys with head normalisation, and the write of keys and values into the cache; see token.h.

#include "token.h"

namespace headrace {
namespace {

constexpr int64_t kSerialElements = 1 << 14;  // Waking other threads costs more than it saves below this.

struct Arguments {
  void* qkv;
  const int64_t* positions;
  const float* cos_sin;
  void* key_cache;
  void* value_cache;
  const int64_t* slots;
  const void* query_norm;  // Of the type of qkv, as is key_norm; null when heads are not normalised.
  const void* key_norm;
  int64_t qkv_stride;
  HeadSizes sizes;
  float eps;
};

template <typename T, typename Cache>
void run_token(const Arguments& a, int64_t token) {
  const int64_t slot_size = int64_t{a.sizes.num_kv_heads} * a.sizes.head_dim, slot = a.slots[token];
  Cache* key = slot < 0 ? nullptr : static_cast<Cache*>(a.key_cache) + slot * slot_size;
  Cache* value = slot < 0 ? nullptr : static_cast<Cache*>(a.value_cache) + slot * slot_size;
  rotate_token(static_cast<T*>(a.qkv) + token * a.qkv_stride, a.sizes,
               a.cos_sin + a.positions[token] * a.sizes.rotated_dim, static_cast<const T*>(a.query_norm),
               static_cast<const T*>(a.key_norm), a.eps, key, value);
}

using RunToken = void (*)(const Arguments&, int64_t);

template <typename T>
RunToken choose(int32_t cache_dtype) {
  return cache_dtype == kFloat32 ? run_token<T, float>
         : cache_dtype == kBFloat16 ? run_token<T, bfloat16>
                                    : run_token<T, _Float16>;
}

}  // namespace
}  // namespace headrace

extern "C" __attribute__((visibility("default"))) void headrace_rope_kv_write(
    void* qkv, const int64_t* positions, const float* cos_sin, void* key_cache, void* value_cache, const int64_t* slots,
    const void* query_norm, const void* key_norm, int64_t qkv_stride, float eps, int32_t num_tokens, int32_t num_heads,
    int32_t num_kv_heads, int32_t head_dim, int32_t rotated_dim, int32_t dtype, int32_t cache_dtype,
    int32_t num_threads) {
  using namespace headrace;
  const Arguments a{qkv,        positions, cos_sin,    key_cache, value_cache, slots,
                    query_norm, key_norm,  qkv_stride, {num_heads, num_kv_heads, head_dim, rotated_dim}, eps};
  const RunToken run = dtype == kFloat32    ? choose<float>(cache_dtype)
                       : dtype == kBFloat16 ? choose<bfloat16>(cache_dtype)
                                            : choose<_Float16>(cache_dtype);
  const bool is_serial = num_tokens * qkv_stride < kSerialElements;
#pragma omp parallel for num_threads(is_serial ? 1 : num_threads)
  for (int64_t token = 0; token < num_tokens; ++token) run(a, token);
}

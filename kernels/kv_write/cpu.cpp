// Writes keys and values into their slots of the paged cache, converting to the cache's type.

#include "../simd.h"

namespace headrace {
namespace {

template <typename Source, typename Target>
void convert(const Source* source, Target* target, int64_t count) {
  for (int64_t i = 0; i < count; ++i) store_scalar(target + i, to_float(source[i]));
}

template <typename Source>
void write(const Source* source, char* cache, DType cache_dtype, int64_t slot, int64_t width) {
  switch (cache_dtype) {
    case kFloat32: return convert(source, reinterpret_cast<float*>(cache) + slot * width, width);
    case kBFloat16: return convert(source, reinterpret_cast<bfloat16*>(cache) + slot * width, width);
    case kFloat16: return convert(source, reinterpret_cast<_Float16*>(cache) + slot * width, width);
  }
}

void write(const char* source, DType dtype, int64_t offset, char* cache, DType cache_dtype, int64_t slot, int64_t width) {
  if (dtype == cache_dtype) {
    const int64_t size = dtype == kFloat32 ? 4 : 2;
    std::memcpy(cache + slot * width * size, source + offset * size, width * size);
    return;
  }
  switch (dtype) {
    case kFloat32: return write(reinterpret_cast<const float*>(source) + offset, cache, cache_dtype, slot, width);
    case kBFloat16: return write(reinterpret_cast<const bfloat16*>(source) + offset, cache, cache_dtype, slot, width);
    case kFloat16: return write(reinterpret_cast<const _Float16*>(source) + offset, cache, cache_dtype, slot, width);
  }
}

}  // namespace
}  // namespace headrace

// `width` is num_kv_heads * head_dim; strides are elements from one token to the next.
extern "C" __attribute__((visibility("default"))) void headrace_kv_write(
    const char* key, const char* value, char* key_cache, char* value_cache, const int64_t* slot_mapping,
    int64_t key_stride, int64_t value_stride, int32_t num_tokens, int32_t width, int32_t dtype, int32_t cache_dtype) {
  using namespace headrace;
  const auto type = static_cast<DType>(dtype), cache_type = static_cast<DType>(cache_dtype);
  for (int64_t token = 0; token < num_tokens; ++token) {
    write(key, type, token * key_stride, key_cache, cache_type, slot_mapping[token], width);
    write(value, type, token * value_stride, value_cache, cache_type, slot_mapping[token], width);
  }
}

// Paged attention for the team of threads that computes a step; see cpu.cpp.
#pragma once

#include "../cache_strides.h"
#include "../quantized_kv.h"
#include "../team.h"

namespace headrace {

struct AttentionArguments {
  const char* query;
  void* result;  // Contiguous, of the query's type.
  const char* key_cache;
  const char* value_cache;
  const int32_t* kv_scales;  // Pairs; null unless the cache has eight bits.
  const int32_t* block_tables;
  const int32_t* query_starts;
  const int32_t* context_lens;
  const float* sinks;  // Of each head a logit without a value; null where there are none.
  float* lse;  // Logs of the sums of exponentials, `[num_tokens, num_heads]`; where asked for, the result is of floats.
  int64_t query_stride;  // Elements from one query token to the next.
  CacheStrides key_strides, value_strides;
  int32_t num_seqs, max_blocks, num_heads, num_kv_heads, head_dim, value_dim, block_size;
  int32_t sliding_window, chunk_size;  // 0 is unlimited.
  int32_t first, step;                 // The cache has every step-th token of a sequence, from the first on.
  float scale, soft_cap;               // A cap of 0 is none.
};

// Every thread of the team calls it.
void attend_items(const AttentionArguments& a, DType query_dtype, DType cache_dtype, Operation& operation);

}  // namespace headrace

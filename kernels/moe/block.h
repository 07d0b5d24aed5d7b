// The memory of a mixture of experts within the decoder stack, between routing and the experts' results.
#pragma once

#include "mixture.h"
#include "routing.h"

namespace headrace {

template <typename T>
struct MixtureMemory {
  float* logits;
  int32_t* ids;
  float* weights;
  char* experts;
  int64_t bytes;

  MixtureMemory(const Routing& routing, const Mixture& mixture, int64_t num_tokens, char* memory) {
    Pieces pieces{memory};
    logits = pieces.take<float>(num_tokens * routing.num_experts);
    ids = pieces.take<int32_t>(num_tokens * routing.top_k);
    weights = pieces.take<float>(num_tokens * routing.top_k);
    experts = pieces.take<char>(MixtureScratch<T>(mixture, num_tokens, routing.top_k, nullptr).bytes);
    bytes = pieces.bytes;
  }
};

// Adds vectors of a row to `total`.
inline void add_columns(float* total, int count, Floats sum) {
  if (count == kLanes) return store(total, load(total) + sum);
  for (int i = 0; i < count; ++i) total[i] += sum[i];
}

}  // namespace headrace

// Routing, and a layer's experts; see routing.h and mixture.h.

#include "../abi.h"
#include "mixture.h"
#include "routing.h"

namespace headrace {
namespace {

constexpr int64_t kSerialLogits = 1 << 13;  // Waking other threads costs more than it saves below this.

template <typename T>
void run_experts(const Mixture& mixture, const Chosen& chosen, const T* x, int64_t x_stride, T* result, char* memory,
                 const AdapterRows* adapters, int num_threads) {
  Operation operations[kMixtureOperations];
  const MixtureScratch<T> scratch(mixture, chosen.num_tokens, chosen.top_k, memory);
#pragma omp parallel num_threads(num_threads)
  MixtureWalk<T>{mixture, chosen, scratch, x, x_stride, operations, adapters}.run(
      [&](int64_t token, int column, int count, Floats sum) {
        put<1>(result + token * mixture.hidden_size + column, &sum, count);
      });
}

}  // namespace
}  // namespace headrace

EXPORTED void headrace_route(const headrace::Routing* routing, const float* logits, int32_t* ids, float* weights,
                             int32_t num_tokens, int32_t num_threads) {
  using namespace headrace;
  const bool is_serial = int64_t{num_tokens} * routing->num_experts < kSerialLogits;
#pragma omp parallel for num_threads(is_serial ? 1 : num_threads)
  for (int64_t token = 0; token < num_tokens; ++token)
    route_row(*routing, logits + token * routing->num_experts, ids + token * routing->top_k,
              weights + token * routing->top_k);
}

EXPORTED int64_t headrace_experts_scratch(const headrace::Mixture* mixture, int32_t dtype, int32_t num_tokens,
                                          int32_t top_k) {
  using namespace headrace;
  if (dtype == kBFloat16) return MixtureScratch<bfloat16>(*mixture, num_tokens, top_k, nullptr).bytes;
  return MixtureScratch<float>(*mixture, num_tokens, top_k, nullptr).bytes;
}

EXPORTED void headrace_experts(const headrace::Mixture* mixture, const void* x, const int32_t* ids,
                               const float* weights, void* result, int64_t x_stride, int32_t dtype,
                               int32_t num_tokens, int32_t top_k, char* scratch,
                               const headrace::AdapterRows* adapters, int32_t num_threads) {
  using namespace headrace;
  const Chosen chosen{ids, weights, num_tokens, top_k};
  if (dtype == kBFloat16)
    run_experts(*mixture, chosen, static_cast<const bfloat16*>(x), x_stride, static_cast<bfloat16*>(result), scratch,
                adapters, num_threads);
  else
    run_experts(*mixture, chosen, static_cast<const float*>(x), x_stride, static_cast<float*>(result), scratch,
                adapters, num_threads);
}

EXPORT_SIGNATURE(route)
EXPORT_SIGNATURE(experts_scratch)
EXPORT_SIGNATURE(experts)

EXPORT_STRUCTURE(Routing, FIELD(bias), FIELD(num_experts), FIELD(top_k), FIELD(score), FIELD(is_renormalized),
                 FIELD(num_groups), FIELD(top_k_groups), FIELD(num_best), FIELD(scale))
EXPORT_STRUCTURE(Mixture, FIELD(gate_up), FIELD(down), FIELD(tokens_per_expert), FIELD(num_experts),
                 FIELD(first_expert), FIELD(hidden_size), FIELD(intermediate_size), FIELD(slope), FIELD(cubic),
                 FIELD(limit), FIELD(up_shift), FIELD(has_gate), FIELD(gate_up_adapters), FIELD(down_adapters))

// A step of the decoder stack, see stack.h, and a chain of steps, see chain.h.

#include "chain.h"

extern "C" __attribute__((visibility("default"))) int64_t headrace_decoder_stack_scratch(const headrace::Stack* stack,
                                                                                       int64_t num_tokens) {
  using namespace headrace;
  if (stack->dtype == kBFloat16) return Scratch<bfloat16>(*stack, num_tokens, nullptr).bytes;
  return Scratch<float>(*stack, num_tokens, nullptr).bytes;
}

extern "C" __attribute__((visibility("default"))) int32_t headrace_decoder_stack(const headrace::Stack* stack,
                                                                               const headrace::Step* step,
                                                                               char* scratch, void* result,
                                                                               int32_t num_threads) {
  using namespace headrace;
  if (const Fault fault = find_fault(*stack, *step)) return fault;
  if (stack->dtype == kBFloat16)
    run_stack(*stack, *step, scratch, static_cast<bfloat16*>(result), num_threads);
  else
    run_stack(*stack, *step, scratch, static_cast<float*>(result), num_threads);
  return kNone;
}

extern "C" __attribute__((visibility("default"))) int64_t headrace_draft_chain_scratch(
    const headrace::Stack* stack, const headrace::ChainRequest* request, int64_t num_tokens, int64_t max_blocks) {
  using namespace headrace;
  if (stack->dtype == kBFloat16) return ChainScratch<bfloat16>(*stack, *request, num_tokens, max_blocks, nullptr).bytes;
  return ChainScratch<float>(*stack, *request, num_tokens, max_blocks, nullptr).bytes;
}

extern "C" __attribute__((visibility("default"))) int32_t headrace_draft_chain(
    const headrace::Stack* stack, const headrace::ChainRequest* request, const headrace::Step* step, char* scratch,
    int32_t* token_ids, float* scores, int32_t* num_places, int32_t num_threads) {
  using namespace headrace;
  if (const Fault fault = find_fault(*stack, *step)) return fault;
  const Candidates candidates{token_ids, scores, num_places};
  if (stack->dtype == kBFloat16)
    run_chain<bfloat16>(*stack, *request, *step, scratch, candidates, num_threads);
  else
    run_chain<float>(*stack, *request, *step, scratch, candidates, num_threads);
  return kNone;
}

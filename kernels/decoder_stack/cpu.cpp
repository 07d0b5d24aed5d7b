// A step of the decoder stack, see stack.h.

#include "../abi.h"
#include "stack.h"

EXPORTED int64_t headrace_decoder_stack_scratch(const headrace::Stack* stack,
                                                                                       int64_t num_tokens) {
  using namespace headrace;
  if (stack->dtype == kBFloat16) return Scratch<bfloat16>(*stack, num_tokens, nullptr).bytes;
  return Scratch<float>(*stack, num_tokens, nullptr).bytes;
}

EXPORTED int32_t headrace_decoder_stack(const headrace::Stack* stack,
                                                                               const headrace::Step* step,
                                                                               char* scratch, void* result,
                                                                               int32_t num_threads) {
  using namespace headrace;
  if (const Fault fault = find_fault(*stack, *step)) return fault;
  if (stack->dtype == kBFloat16) return run_stack(*stack, *step, scratch, static_cast<bfloat16*>(result), num_threads);
  return run_stack(*stack, *step, scratch, static_cast<float*>(result), num_threads);
}

EXPORT_SIGNATURE(decoder_stack_scratch)
EXPORT_SIGNATURE(decoder_stack)

EXPORT_STRUCTURE(Matrix, FIELD_AT(weight, dense.weight), FIELD_AT(bias, dense.bias),
                 FIELD_AT(num_inputs, dense.num_inputs), FIELD_AT(num_outputs, dense.num_outputs),
                 FIELD_AT(dtype, dense.dtype), FIELD(quantized))
EXPORT_STRUCTURE(Layer, FIELD(attention_norm), FIELD(mlp_norm), FIELD(query_norm), FIELD(key_norm), FIELD(qkv),
                 FIELD(gate_up), FIELD(output), FIELD(down), FIELD(key_cache), FIELD(value_cache), FIELD(kv_scales),
                 FIELD(router), FIELD(routing), FIELD(mixture), FIELD(sliding_window), FIELD(num_qkv), FIELD(num_gate_up),
                 FIELD(qkv_adapters), FIELD(gate_up_adapters), FIELD(output_adapters), FIELD(down_adapters),
                 FIELD(router_adapters))
EXPORT_STRUCTURE(Stack, FIELD(embedding), FIELD(cos_sin),
                 FIELD(final_norm), FIELD(layers), FIELD(tapped_layers), FIELD(num_tapped),
                 FIELD(num_layers), FIELD(vocab_size), FIELD(max_positions), FIELD(hidden_size),
                 FIELD(intermediate_size), FIELD_AT(num_heads, heads.num_heads),
                 FIELD_AT(num_kv_heads, heads.num_kv_heads), FIELD_AT(head_dim, heads.head_dim),
                 FIELD_AT(rotated_dim, heads.rotated_dim), FIELD(dtype), FIELD(embedding_dtype),
                 FIELD(cache_dtype), FIELD(eps), FIELD(scale), FIELD(key_strides), FIELD(value_strides),
                 FIELD(exchange), FIELD(first_token), FIELD(num_own_tokens), FIELD(embedding_adapters),
                 FIELD(interrupt))
EXPORT_STRUCTURE(Step, FIELD(token_ids), FIELD(positions), FIELD(slots), FIELD(block_tables), FIELD(query_starts),
                 FIELD(context_lens), FIELD(adapters), FIELD(query_rows), FIELD(queries), FIELD(num_query_rows),
                 FIELD(num_tokens), FIELD(num_seqs), FIELD(max_blocks), FIELD(block_size))

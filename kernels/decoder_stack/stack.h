// All layers of a decoder for the tokens of one step, in one call: nothing is dispatched between operations. The residual
// stream is fp32 throughout, and what a multiplication adds to it is added from its accumulators, as SiLU and the gate
// are taken from them. So a value is rounded only where it becomes the input of a multiplication.
//
// The operations are those of the neighbouring folders; cpu.py describes the structures field by field.
#pragma once

#include <atomic>
#include <new>

#include "../collectives/exchange.h"
#include "../linear/matrix.h"
#include "../low_rank/product.h"
#include "../moe/block.h"
#include "../paged_attention/attention.h"
#include "../rope_kv_write/token.h"
#include "../activation/functions.h"

namespace headrace {

constexpr int kItemTokens = 4;  // Tokens that a thread takes at a time where each is little work.
constexpr int kMaxParts = 3;
constexpr int kOperationsPerLayer = 35;  // At most: in parts, with experts, quantized, divided, and with adapters.
constexpr int kOtherOperations = 7;      // Before and behind the layers, at most.

struct Layer {
  const float* attention_norm;  // Null, as is the stack's last one, where the stream is taken as it is.
  const float* mlp_norm;
  const float* query_norm;  // Null, as is key_norm, where heads are not normalised.
  const float* key_norm;
  Matrix qkv[kMaxParts];  // Side by side, where no single form holds all features.
  Matrix gate_up[2];      // One, in panels of gates and their up projections, or the two of them.
  Matrix output, down;
  void* key_cache;
  void* value_cache;
  void* kv_scales;  // Null unless the cache has eight bits.
  Matrix router;  // Of a layer with experts, which has neither gate_up nor down.
  const Routing* routing;
  const Mixture* mixture;  // Null where there are none.
  int32_t sliding_window;
  int32_t num_qkv, num_gate_up;
  LowRankTable qkv_adapters[kMaxParts];  // Null, as are the others, where no adapter can be beside the matrix.
  LowRankTable gate_up_adapters[2];
  LowRankTable output_adapters, down_adapters, router_adapters;
};

struct Stack {
  const void* embedding;
  const float* cos_sin;
  const float* final_norm;
  const Layer* layers;
  const int32_t* tapped_layers;  // The streams before them follow the result of each token, in the stack's type.
  int32_t num_tapped;
  int32_t num_layers, vocab_size, max_positions, hidden_size, intermediate_size;
  HeadSizes heads;
  int32_t dtype, embedding_dtype, cache_dtype;
  float eps, scale;
  CacheStrides key_strides, value_strides;  // Of all layers.
  // Where processes divide heads, inner features and the vocabulary: what each adds to the stream is put into memory that
  // they share, where a step's stream has room, and all add up the same. Else null.
  const Exchange* exchange;
  int32_t first_token, num_own_tokens;  // Of the embedding.
  LowRankTable embedding_adapters;      // Null where none can be.
  // Numbers of two steps: a step with prompts ends before its next layer once they are equal. Null where none can.
  const std::atomic<int64_t>* interrupt;

  int num_operations() const { return kOperationsPerLayer * num_layers + kOtherOperations + num_tapped; }
  int64_t result_size() const { return int64_t{1 + num_tapped} * hidden_size; }
};

struct Step {
  const int64_t* token_ids;
  const int64_t* positions;
  const int64_t* slots;
  const int32_t* block_tables;
  const int32_t* query_starts;
  const int32_t* context_lens;
  const AdapterRows* adapters;  // Null where no token has an adapter.
  // Where the rotated queries of some tokens are copied to, layer by layer: the row of each token, below zero of none.
  const int32_t* query_rows;  // Null where none are.
  void* queries;
  int32_t num_query_rows;
  int32_t num_tokens, num_seqs, max_blocks, block_size;
};

enum Fault : int32_t { kNone = 0, kTokenId = 1, kPosition = 2, kEnded = 3 };

// Memory for the prepared inputs of any quantized matrix.
template <typename T>
int64_t prepared_bytes(const Stack& stack, int64_t num_tokens) {
  int64_t bytes = 0;
  const auto include = [&](const Matrix& matrix) { bytes = std::max(bytes, matrix.prepared_bytes<T>(num_tokens)); };
  for (int i = 0; i < stack.num_layers; ++i) {
    const Layer& layer = stack.layers[i];
    for (int part = 0; part < layer.num_qkv; ++part) include(layer.qkv[part]);
    for (int part = 0; part < layer.num_gate_up; ++part) include(layer.gate_up[part]);
    include(layer.output);
    include(layer.router);
    include(layer.down);
  }
  return bytes;
}

// Memory for the experts of any layer.
template <typename T>
int64_t mixture_bytes(const Stack& stack, int64_t num_tokens) {
  int64_t bytes = 0;
  for (int i = 0; i < stack.num_layers; ++i) {
    const Layer& layer = stack.layers[i];
    if (!layer.mixture) continue;
    bytes = std::max(bytes, MixtureMemory<T>(*layer.routing, *layer.mixture, num_tokens, nullptr).bytes);
  }
  return bytes;
}

// The memory between operations.
template <typename T>
struct Scratch {
  Operation* operations;
  float* residual;
  T *normed, *qkv, *attended, *gated;
  float* gate_up;
  char *prepared, *experts;
  std::atomic<int32_t>* has_ended;  // The processes that sum have been told to do nothing together any more.
  int64_t bytes;

  Scratch(const Stack& stack, int64_t num_tokens, char* memory) {
    const int64_t heads = stack.heads.num_heads + 2 * stack.heads.num_kv_heads;
    Pieces pieces{memory};
    operations = pieces.take<Operation>(stack.num_operations());
    residual = pieces.take<float>(num_tokens * stack.hidden_size);
    normed = pieces.take<T>(num_tokens * stack.hidden_size);
    qkv = pieces.take<T>(num_tokens * heads * stack.heads.head_dim);
    attended = pieces.take<T>(num_tokens * stack.heads.num_heads * stack.heads.head_dim);
    gated = pieces.take<T>(num_tokens * stack.intermediate_size);
    const bool has_parts = std::any_of(stack.layers, stack.layers + stack.num_layers,
                                       [](const Layer& layer) { return layer.num_gate_up > 1; });
    gate_up = pieces.take<float>(has_parts ? num_tokens * stack.intermediate_size * 2 : 0);
    prepared = pieces.take<char>(prepared_bytes<T>(stack, num_tokens));
    experts = pieces.take<char>(mixture_bytes<T>(stack, num_tokens));
    has_ended = pieces.take<std::atomic<int32_t>>(1);
    bytes = pieces.bytes;
  }
};

// One thread's walk through the layers; all threads of the team make it together.
template <typename T>
struct Walk {
  const Stack& stack;
  const Step& step;
  const Scratch<T>& scratch;
  Operation* operation;  // The next one.
  int64_t turn = 0;      // Of the last sum, where processes sum.

  // Where a block puts what it adds to the stream: it is added at once, or summed over processes first.
  float* added() const {
    const Exchange* exchange = stack.exchange;
    return exchange ? reinterpret_cast<float*>(exchange->slot(turn + 1, exchange->rank)) : scratch.residual;
  }

  template <typename Function>
  void each_token(Function function) {
    const int64_t items = (step.num_tokens + kItemTokens - 1) / kItemTokens;
    share(*operation++, items, [&](int64_t item) {
      const int64_t end = std::min<int64_t>((item + 1) * kItemTokens, step.num_tokens);
      for (int64_t token = item * kItemTokens; token < end; ++token) function(token);
    });
  }

  Rows rows_of(const QuantizedLinear& linear) const {
    return Rows(linear, inputs_of<T>(linear), step.num_tokens, scratch.prepared);
  }

  void prepare(const Matrix& matrix, const T* x) {
    if (!matrix.quantized) return;
    const Rows rows = rows_of(*matrix.quantized);
    each_token([&](int64_t token) {
      prepare_row(*matrix.quantized, rows, x + token * matrix.quantized->num_inputs, token);
    });
  }

  // Multiplies rows, which have been prepared where the matrix is quantized, and adds the products of adapters.
  template <Finish kFinish, typename Target>
  void multiply_rows(const Matrix& matrix, const T* x, Target* target, int64_t stride, LowRankTable adapters) {
    if (!step.adapters || !adapters) return multiply_rows<kFinish>(matrix, x, target, stride, NothingMore{});
    multiply_down(adapters, *step.adapters, x, matrix.num_inputs(), *operation++);
    const AddedAdapters<T> added{adapters, *step.adapters, step.num_tokens, matrix.num_panels()};
    multiply_rows<kFinish>(matrix, x, target, stride, added);
  }

  template <Finish kFinish, typename Target, typename More>
  void multiply_rows(const Matrix& matrix, const T* x, Target* target, int64_t target_stride, More more) {
    if (!matrix.quantized)
      return multiply<T, kFinish>(matrix.dense, x, matrix.dense.num_inputs, target, target_stride, step.num_tokens,
                                  *operation++, more);
    const Rows rows = rows_of(*matrix.quantized);
    multiply_quantized<T, kFinish>(*matrix.quantized, rows, target, target_stride, step.num_tokens, *operation++, more);
  }

  template <typename W>
  void embed_from(const W* embedding) {
    const int size = stack.hidden_size;
    each_token([&](int64_t token) {
      const int64_t row = step.token_ids[token] - stack.first_token;
      float* stream = added() + token * size;
      if (row < 0 || row >= stack.num_own_tokens) return std::fill(stream, stream + size, 0.0f);
      widen(embedding + row * size, stream, size, size);
    });
  }

  // Adds to the stream what all processes have put down, which is the stream if it is new; says whether they still do.
  bool sum_stream(bool is_new = false) {
    if (!stack.exchange) return true;
    ++turn;
    share(*operation++, 1, [&](int64_t) {
      if (!stack.exchange->publish(turn)) *scratch.has_ended = 1;
    });
    if (*scratch.has_ended != 0) return false;
    const int64_t size = stack.hidden_size;
    each_token([&](int64_t token) {
      add_slots(*stack.exchange, turn, token * size, size, scratch.residual + token * size, is_new);
    });
    return true;
  }

  void add_product(const Matrix& matrix, const T* x, LowRankTable adapters) {
    if (stack.exchange) return multiply_rows<Finish::kStoreFloat>(matrix, x, added(), stack.hidden_size, adapters);
    multiply_rows<Finish::kAddTo>(matrix, x, added(), stack.hidden_size, adapters);
  }

  void embed() {
    if (stack.embedding_dtype == kBFloat16) return embed_from(static_cast<const bfloat16*>(stack.embedding));
    if (stack.embedding_dtype == kFloat16) return embed_from(static_cast<const _Float16*>(stack.embedding));
    embed_from(static_cast<const float*>(stack.embedding));
  }

  // Adds to embeddings what the adapters of tokens have for them.
  void adapt_embedding() {
    if (!step.adapters || !stack.embedding_adapters) return;
    const AdapterRows& adapters = *step.adapters;
    share(*operation++, adapters.num_rows, [&](int64_t place) {
      const LowRank* adapter = adapter_in(stack.embedding_adapters, adapters.slots[place]);
      if (!adapter) return;
      const int32_t row = adapters.rows[place];
      T* products = adapters.products_at<T>(place);
      look_up(*adapter, step.token_ids[row], products);
      for (int panel = 0; panel * kPanel < stack.hidden_size; ++panel) {
        Floats sums[kPanelVectors] = {};
        add_up(*adapter, products, panel, sums);
        float* stream = added() + int64_t{row} * stack.hidden_size + panel * kPanel;
        add_to(stream, sums, std::min(kPanel, stack.hidden_size - panel * kPanel));
      }
    });
  }

  void normalise_token(int64_t token, const float* weight, T* target) {
    const float* stream = scratch.residual + token * stack.hidden_size;
    if (!weight) return narrow(stream, target, stack.hidden_size);
    rms_norm_row(stream, weight, stack.eps, target, stack.hidden_size);
  }

  // Normalises, and prepares the result for the matrix that it is multiplied by.
  void normalise_for(const Matrix& matrix, const float* weight) {
    const int size = stack.hidden_size;
    if (!matrix.quantized)
      return each_token([&](int64_t token) { normalise_token(token, weight, scratch.normed + token * size); });
    const Rows rows = rows_of(*matrix.quantized);
    each_token([&](int64_t token) {
      normalise_token(token, weight, scratch.normed + token * size);
      prepare_row(*matrix.quantized, rows, scratch.normed + token * size, token);
    });
  }

  void project(const Layer& layer) {
    const HeadSizes& heads = stack.heads;
    const int64_t stride = int64_t{heads.num_heads + 2 * heads.num_kv_heads} * heads.head_dim;
    T* target = scratch.qkv;
    normalise_for(layer.qkv[0], layer.attention_norm);
    for (int part = 0; part < layer.num_qkv; ++part) {
      if (part > 0) prepare(layer.qkv[part], scratch.normed);
      multiply_rows<Finish::kStore>(layer.qkv[part], scratch.normed, target, stride, layer.qkv_adapters[part]);
      target += layer.qkv[part].num_outputs();
    }
  }

  template <typename Cache>
  void rotate(const Layer& layer) {
    const HeadSizes& heads = stack.heads;
    const int64_t stride = int64_t{heads.num_heads + 2 * heads.num_kv_heads} * heads.head_dim;
    each_token([&](int64_t token) {
      const TokenCache<Cache> cache(layer.key_cache, layer.value_cache, layer.kv_scales, step.slots[token],
                                    heads.num_kv_heads, step.block_size, stack.key_strides, stack.value_strides);
      T* qkv = scratch.qkv + token * stride;
      const T* values = qkv + (heads.num_heads + heads.num_kv_heads) * heads.head_dim;
      rotate_token(qkv, values, heads.head_dim, heads, Pairing{},
                   stack.cos_sin + step.positions[token] * heads.rotated_dim, layer.query_norm, layer.key_norm,
                   stack.eps, cache);
      if (!step.query_rows || step.query_rows[token] < 0) return;
      const int64_t row = (&layer - stack.layers) * int64_t{step.num_query_rows} + step.query_rows[token];
      const int64_t size = int64_t{heads.num_heads} * heads.head_dim;
      std::copy_n(qkv, size, static_cast<T*>(step.queries) + row * size);
    });
  }

  void attend(const Layer& layer) {
    const HeadSizes& heads = stack.heads;
    const AttentionArguments arguments{
        reinterpret_cast<const char*>(scratch.qkv),
        scratch.attended,
        static_cast<const char*>(layer.key_cache),
        static_cast<const char*>(layer.value_cache),
        static_cast<const int32_t*>(layer.kv_scales),
        step.block_tables,
        step.query_starts,
        step.context_lens,
        nullptr,
        nullptr,
        int64_t{heads.num_heads + 2 * heads.num_kv_heads} * heads.head_dim,
        stack.key_strides,
        stack.value_strides,
        step.num_seqs,
        step.max_blocks,
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        heads.head_dim,
        step.block_size,
        layer.sliding_window,
        0,
        0,
        1,
        stack.scale,
        0.0f,
    };
    attend_items(arguments, static_cast<DType>(stack.dtype), static_cast<DType>(stack.cache_dtype), *operation++);
  }

  void gate(const Layer& layer) {
    const int size = stack.intermediate_size;
    const Matrix* parts = layer.gate_up;
    normalise_for(parts[0], layer.mlp_norm);
    const LowRankTable* adapters = layer.gate_up_adapters;
    if (layer.num_gate_up == 1)
      return multiply_rows<Finish::kGate>(parts[0], scratch.normed, scratch.gated, size, adapters[0]);
    float* target = scratch.gate_up;
    multiply_rows<Finish::kStoreFloat>(parts[0], scratch.normed, target, 2 * size, adapters[0]);
    prepare(parts[1], scratch.normed);
    target += size;
    multiply_rows<Finish::kStoreFloat>(parts[1], scratch.normed, target, 2 * size, adapters[1]);
    each_token([&](int64_t token) {
      silu_mul_row(scratch.gate_up + 2 * token * size, scratch.gated + token * size, size);
    });
  }

  // Scores the experts, routes each token to some of them, and adds their results to the stream.
  void mix(const Layer& layer) {
    const Routing& routing = *layer.routing;
    const int count = routing.num_experts, top_k = routing.top_k, size = stack.hidden_size;
    const MixtureMemory<T> memory(routing, *layer.mixture, step.num_tokens, scratch.experts);
    normalise_for(layer.router, layer.mlp_norm);
    multiply_rows<Finish::kStoreFloat>(layer.router, scratch.normed, memory.logits, count, layer.router_adapters);
    each_token([&](int64_t token) {
      route_row(routing, memory.logits + token * count, memory.ids + token * top_k, memory.weights + token * top_k);
    });
    const Chosen chosen{memory.ids, memory.weights, step.num_tokens, top_k};
    const MixtureScratch<T> rows(*layer.mixture, step.num_tokens, top_k, memory.experts);
    MixtureWalk<T> walk{*layer.mixture, chosen, rows, scratch.normed, size, operation,
                        layer.mixture->gate_up_adapters ? step.adapters : nullptr};
    walk.run([&](int64_t token, int column, int columns, Floats sum) {
      float* target = added() + token * size + column;
      if (!stack.exchange) return add_columns(target, columns, sum);
      if (columns == kLanes) return store(target, sum);
      alignas(64) float spilled[kLanes];
      store(spilled, sum);
      std::copy(spilled, spilled + columns, target);
    });
    operation = walk.operation;
  }

  // Says whether to compute another layer.
  bool goes_on() {
    if (!stack.interrupt || step.num_tokens == step.num_seqs) return true;
    share(*operation++, 1, [&](int64_t) {
      if (stack.interrupt[0] == stack.interrupt[1]) *scratch.has_ended = 1;
    });
    return *scratch.has_ended == 0;
  }

  // Says whether to go on.
  bool run(const Layer& layer) {
    project(layer);
    switch (stack.cache_dtype) {
      case kFloat32: rotate<float>(layer); break;
      case kBFloat16: rotate<bfloat16>(layer); break;
      case kFloat16: rotate<_Float16>(layer); break;
      case kInt8: rotate<int8_t>(layer); break;
      case kFloat8: rotate<float8>(layer); break;
    }
    attend(layer);
    prepare(layer.output, scratch.attended);
    add_product(layer.output, scratch.attended, layer.output_adapters);
    if (!sum_stream()) return false;
    if (layer.mixture) {
      mix(layer);
      return sum_stream();
    }
    gate(layer);
    prepare(layer.down, scratch.gated);
    add_product(layer.down, scratch.gated, layer.down_adapters);
    return sum_stream();
  }

  // Copies the stream before a layer to the result, if the layer is tapped.
  void tap(int layer, T* result) {
    const int size = stack.hidden_size;
    for (int number = 0; number < stack.num_tapped; ++number) {
      if (stack.tapped_layers[number] != layer) continue;
      each_token([&](int64_t token) {
        T* target = result + token * stack.result_size() + int64_t{1 + number} * size;
        narrow(scratch.residual + token * size, target, size);
      });
    }
  }

  void run_all(T* result) {
    embed();
    adapt_embedding();
    if (!sum_stream(true)) return;
    for (int i = 0; i < stack.num_layers; ++i) {
      tap(i, result);
      if (!goes_on() || !run(stack.layers[i])) return;
    }
    each_token([&](int64_t token) { normalise_token(token, stack.final_norm, result + token * stack.result_size()); });
  }
};

template <typename T>
Fault run_stack(const Stack& stack, const Step& step, char* memory, T* result, int num_threads) {
  const Scratch<T> scratch(stack, step.num_tokens, memory);
  new (scratch.has_ended) std::atomic<int32_t>{0};
  for (int i = 0; i < stack.num_operations(); ++i) new (scratch.operations + i) Operation;
  // All processes have put down as much: who waits for their slots waits for the next turn.
  const int64_t turn = stack.exchange ? *stack.exchange->counter(stack.exchange->rank) : 0;
#pragma omp parallel num_threads(num_threads)
  Walk<T>{stack, step, scratch, scratch.operations, turn}.run_all(result);
  return *scratch.has_ended && stack.exchange ? kEnded : kNone;
}

inline Fault find_fault(const Stack& stack, const Step& step) {
  for (int i = 0; i < step.num_tokens; ++i) {
    if (step.token_ids[i] < 0 || step.token_ids[i] >= stack.vocab_size) return kTokenId;
    if (step.positions[i] < 0 || step.positions[i] >= stack.max_positions) return kPosition;
  }
  return kNone;
}

}  // namespace headrace

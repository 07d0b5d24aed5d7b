// Paged attention on a CPU: one pass over the blocks with online softmax, fp32 accumulation.
//
// A work item is one KV head of a few neighbouring query tokens of one sequence, or all KV heads of a single one: its
// *rows* are those tokens times the query heads that share the KV heads. Keys are taken in tiles that never cross a
// block, and a few tiles, a span, are packed as the matrix that the rows are multiplied with, unless they lie so
// already. All arithmetic of a row is ordered by the row's own position and the block size alone, so its result is the
// same bits whichever batch, chunk or thread computes it, and whether it is decoded or prefilled.

#include <omp.h>

#include <algorithm>
#include <type_traits>

#include "../abi.h"
#include "attention.h"
#include "query_rows.h"

namespace headrace {
namespace {

constexpr int kItemRows = 48;             // Rows of an item at most, unless more heads share one KV head.
constexpr int kItemsPerThread = 2;        // Decodes: an item takes as many KV heads as leave this many items a thread.
constexpr int64_t kSerialWork = 1 << 17;  // Multiply-adds below which waking other threads costs more than it saves.

// Whether queries of bf16 are multiplied with keys of bf16, which those in eight bits become.
template <typename Query, typename Cache>
constexpr bool can_multiply_pairs() {
#ifdef __AVX512BF16__
  return std::is_same_v<Query, bfloat16> && (std::is_same_v<Cache, bfloat16> || EightBits<Cache>::kIs);
#else
  return false;
#endif
}

// How the heads of a call are divided. Where one KV head has more query heads than an item has rows, it is taken in parts.
struct Division {
  int width, value_width;  // Of a head of keys, and of values, up to whole panels.
  int max_rows;            // Of an item.
  int parts;               // Of the query heads that share a KV head,
  int group;               // and query heads of a part.

  explicit Division(const AttentionArguments& a)
      : width(up_to_panels(a.head_dim)), value_width(up_to_panels(a.value_dim)), parts(1) {
    max_rows = std::min(kMaxRows, kRowElements / std::max(width, value_width));
    const int heads = a.num_heads / a.num_kv_heads;
    while (heads % parts || heads / parts > max_rows) ++parts;
    group = heads / parts;
  }

  static int up_to_panels(int size) { return (size + kPanel - 1) / kPanel * kPanel; }
};

struct Item {
  int sequence, kv_head, num_kv_heads;  // KV heads, or parts of them.
  int first_token, num_tokens;          // Counted from the sequence's first query token.
};

// Where the query of an item's row is: rows of one KV head lie together, those of one token within them.
struct Place {
  int token, head;
};

inline Place place_of(int row, const Item& item, int group) {
  const int rows_per_head = item.num_tokens * group, within = row % rows_per_head;
  return {item.first_token + within / group, (item.kv_head + row / rows_per_head) * group + within % group};
}

// How many of the first tokens of a sequence are in the cache.
inline int num_cached(const AttentionArguments& a, int num_tokens) {
  return a.step == 1 ? num_tokens : (num_tokens - a.first + a.step - 1) / a.step;
}

// Which keys a row sees, by their places in the cache.
template <typename Word>
void begin_row(const AttentionArguments& a, QueryRows<Word>& rows, int row, int position) {
  int first = 0;
  if (a.sliding_window) first = std::max(first, position - a.sliding_window + 1);
  if (a.chunk_size) first = std::max(first, position - position % a.chunk_size);
  rows.first_position[row] = num_cached(a, first);
  rows.last_position[row] = num_cached(a, position + 1) - 1;
}

template <typename Query, typename Word>
void begin_rows(const AttentionArguments& a, const Division& division, const Item& item, QueryRows<Word>& rows) {
  const int num_queries = a.query_starts[item.sequence + 1] - a.query_starts[item.sequence];
  rows.width = division.width;
  rows.value_width = division.value_width;
  rows.count = item.num_kv_heads * item.num_tokens * division.group;
  rows.scale = a.soft_cap > 0.0f ? a.soft_cap : a.scale;
  rows.cap_scale = a.soft_cap > 0.0f ? a.scale / a.soft_cap : 0.0f;
  for (int row = 0; row < rows.count; ++row) {
    const auto [token, head] = place_of(row, item, division.group);
    const int64_t query_row = a.query_starts[item.sequence] + token;
    begin_row(a, rows, row, a.context_lens[item.sequence] - num_queries + token);
    // A sink is a key that was seen before all others, without a value.
    rows.maximum[row] = a.sinks ? a.sinks[head] : -INFINITY;
    rows.sum[row] = Floats{};
    rows.sum[row][0] = rows.maximum[row] > -INFINITY ? 1.0f : 0.0f;
    const int64_t offset = query_row * a.query_stride + int64_t{head} * a.head_dim;
    alignas(64) float query[kMaxHeadDim];
    widen(reinterpret_cast<const Query*>(a.query) + offset, query, a.head_dim, rows.width);
    narrow(query, rows.query + row * rows.width, rows.width);
    std::memset(rows.output + row * rows.value_width, 0, rows.value_width * sizeof(float));
  }
}

template <typename Query, typename Word>
void end_rows(const AttentionArguments& a, const Division& division, const Item& item, const QueryRows<Word>& rows) {
  for (int row = 0; row < rows.count; ++row) {
    const auto [token, head] = place_of(row, item, division.group);
    const int64_t result_row = int64_t{a.query_starts[item.sequence] + token} * a.num_heads + head;
    const float sum = horizontal_sum(rows.sum[row]);
    const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;  // Zeros for a row that saw no token.
    const float* output = rows.output + row * rows.value_width;
    alignas(64) float scaled[kMaxValueDim];
    for (int i = 0; i < a.value_dim; ++i) scaled[i] = output[i] * factor;
    if (a.lse) {
      a.lse[result_row] = sum == 0.0f ? -INFINITY : rows.maximum[row] + std::log(sum);
      std::memcpy(static_cast<float*>(a.result) + result_row * a.value_dim, scaled, a.value_dim * sizeof(float));
    } else {
      narrow(scaled, static_cast<Query*>(a.result) + result_row * a.value_dim, a.value_dim);
    }
  }
}

// The keys and values of an item's sequence, from the item's first KV head on.
template <typename Cache>
struct Sequence {
  const AttentionArguments& a;
  const int32_t* table;
  const Cache *keys, *values;
  int kv_head;
  int begin, end;  // Positions that the item sees.
  int tiles_per_block;

  Sequence(const AttentionArguments& arguments, const Item& item, int first_kv_head, int first_position,
           int last_position)
      : a(arguments),
        table(a.block_tables + int64_t{item.sequence} * a.max_blocks),
        keys(reinterpret_cast<const Cache*>(a.key_cache) + first_kv_head * a.key_strides.head),
        values(reinterpret_cast<const Cache*>(a.value_cache) + first_kv_head * a.value_strides.head),
        kv_head(first_kv_head),
        begin(first_position),
        end(last_position + 1),
        tiles_per_block((a.block_size + kTile - 1) / kTile) {}

  int span_of(int position) const {
    return (position / a.block_size * tiles_per_block + position % a.block_size / kTile) / kSpanTiles;
  }

  Tile<Cache> tile(int number) const {
    const int block = number / tiles_per_block, within = number % tiles_per_block * kTile;
    const int start = block * a.block_size + within;
    const int stop = std::min(start + std::min(kTile, a.block_size - within), end);
    if (stop <= begin || stop <= start) return {keys, values, a.kv_scales, start, 0};
    const CacheStrides &key = a.key_strides, &value = a.value_strides;
    const Cache* first_key = keys + table[block] * key.block + within * key.token;
    const Cache* first_value = values + table[block] * value.block + within * value.token;
    const int32_t* scales = a.kv_scales;
    if (EightBits<Cache>::kIs) scales += (int64_t{table[block]} * a.num_kv_heads + kv_head) * a.block_size + within;
    return {first_key, first_value, scales, start, stop - start};
  }

  Span<Cache> span(int number) const {
    Span<Cache> span{{}, a.key_strides, a.value_strides, a.head_dim, a.value_dim, a.block_size, true};
    for (int t = 0; t < kSpanTiles; ++t) {
      span.tiles[t] = tile(number * kSpanTiles + t);
      span.is_whole &= span.tiles[t].count == kTile;
    }
    return span;
  }
};

// The rows of a prompt find their keys in the cache, where the item before has left them; only those of a single token
// ask memory for the next span.
template <typename Query, typename Cache>
void attend(const AttentionArguments& a, const Division& division, const Item& item) {
  using Word = std::conditional_t<can_multiply_pairs<Query, Cache>(), bfloat16, float>;
  QueryRows<Word> rows;
  PackedSpan<Word> packed;
  begin_rows<Query>(a, division, item, rows);
  const int first_position = *std::min_element(rows.first_position, rows.first_position + rows.count);
  const int kv_head = item.kv_head / division.parts, last_position = rows.last_position[rows.count - 1];
  const Sequence<Cache> sequence(a, item, kv_head, first_position, last_position);
  const int rows_per_head = rows.count / item.num_kv_heads, last = sequence.span_of(sequence.end - 1);
  for (int number = sequence.span_of(sequence.begin); number <= last; ++number) {
    const Span<Cache> span = sequence.span(number);
    const bool can_ask = number < last && item.num_tokens == 1;
    const Span<Cache> next = can_ask ? sequence.span(number + 1) : span;
    for (int head = 0; head < item.num_kv_heads; ++head) {
      const Span<Cache> of_one = of_head(span, head), next_of_one = of_head(next, head);
      const Span<Cache>* ahead = can_ask ? &next_of_one : nullptr;
      pack(of_one, packed, ahead);
      advance_all(rows, head * rows_per_head, (head + 1) * rows_per_head, of_one, packed, ahead);
    }
  }
  end_rows<Query>(a, division, item, rows);
}

template <typename Query>
void run_item(const AttentionArguments& a, const Division& division, const Item& item, DType cache_dtype) {
  switch (cache_dtype) {
    case kFloat32: return attend<Query, float>(a, division, item);
    case kBFloat16: return attend<Query, bfloat16>(a, division, item);
    case kFloat16: return attend<Query, _Float16>(a, division, item);
    case kInt8: return attend<Query, int8_t>(a, division, item);
    case kFloat8: return attend<Query, float8>(a, division, item);
  }
}

void run_item(const AttentionArguments& a, const Division& division, const Item& item, DType query_dtype,
              DType cache_dtype) {
  switch (query_dtype) {
    case kFloat32: return run_item<float>(a, division, item, cache_dtype);
    case kBFloat16: return run_item<bfloat16>(a, division, item, cache_dtype);
    case kFloat16: return run_item<_Float16>(a, division, item, cache_dtype);
    default: __builtin_unreachable();
  }
}

// Hands out items: consecutive numbers map to (sequence, tile of tokens, KV head) through a running position.
struct Cursor {
  const AttentionArguments& a;
  int num_kv_heads;  // Or parts of them.
  int tokens_per_item;
  int heads_per_decode;  // KV heads of an item of a sequence with a single query token.
  int sequence = 0;
  int64_t items_before = 0;  // Items of the sequences before `sequence`.

  int64_t items_of(int s) const {
    const int tokens = a.query_starts[s + 1] - a.query_starts[s];
    if (tokens == 1) return num_kv_heads / heads_per_decode;
    return int64_t{(tokens + tokens_per_item - 1) / tokens_per_item} * num_kv_heads;
  }

  int64_t count() const {
    int64_t items = 0;
    for (int s = 0; s < a.num_seqs; ++s) items += items_of(s);
    return items;
  }

  // Finds item `number`; numbers must not decrease from call to call.
  Item find(int64_t number) {
    while (number >= items_before + items_of(sequence)) items_before += items_of(sequence++);
    Item item;
    const int local = static_cast<int>(number - items_before);
    const int tokens = a.query_starts[sequence + 1] - a.query_starts[sequence];
    const int item_heads = tokens == 1 ? heads_per_decode : 1, parts = num_kv_heads / item_heads;
    item.sequence = sequence;
    item.kv_head = local % parts * item_heads;
    item.num_kv_heads = item_heads;
    item.first_token = local / parts * tokens_per_item;
    item.num_tokens = std::min(tokens_per_item, tokens - item.first_token);
    return item;
  }
};

// A sequence's KV heads lie side by side in memory, so an item takes as many of them as leave work to all threads.
int heads_per_decode(const AttentionArguments& a, const Division& division) {
  const int num_threads = omp_get_num_threads(), num_items = num_threads == 1 ? 1 : kItemsPerThread * num_threads;
  int heads = division.parts == 1 ? a.num_kv_heads : 1;
  while (heads > 1 && (a.num_kv_heads % heads || heads * division.group > division.max_rows ||
                       a.num_seqs * (a.num_kv_heads / heads) < num_items))
    --heads;
  return heads;
}

bool is_serial(const AttentionArguments& a, int num_threads) {
  if (num_threads <= 1) return true;
  int64_t work = 0;
  for (int s = 0; s < a.num_seqs && work < kSerialWork; ++s)
    work += int64_t{a.query_starts[s + 1] - a.query_starts[s]} * a.context_lens[s] * a.num_heads * (a.head_dim + a.value_dim);
  return work < kSerialWork;
}

}  // namespace

void attend_items(const AttentionArguments& a, DType query_dtype, DType cache_dtype, Operation& operation) {
  const Division division(a);
  const int tokens_per_item = std::max(std::min(kItemRows, division.max_rows) / division.group, 1);
  Cursor cursor{a, a.num_kv_heads * division.parts, tokens_per_item, heads_per_decode(a, division)};
  share(operation, cursor.count(), [&](int64_t number) {
    run_item(a, division, cursor.find(number), query_dtype, cache_dtype);
  });
}

}  // namespace headrace

EXPORTED void headrace_paged_attention(const headrace::AttentionArguments* arguments, int32_t query_dtype,
                                       int32_t cache_dtype, int32_t num_threads) {
  using namespace headrace;
  const AttentionArguments& a = *arguments;
  const auto query_type = static_cast<DType>(query_dtype), cache_type = static_cast<DType>(cache_dtype);
  Operation operation;
  if (is_serial(a, num_threads)) return attend_items(a, query_type, cache_type, operation);
#pragma omp parallel num_threads(num_threads)
  attend_items(a, query_type, cache_type, operation);
}

EXPORT_SIGNATURE(paged_attention)

EXPORT_STRUCTURE(AttentionArguments, FIELD(query), FIELD(result), FIELD(key_cache), FIELD(value_cache),
                 FIELD(kv_scales), FIELD(block_tables), FIELD(query_starts), FIELD(context_lens),
                 FIELD(sinks), FIELD(lse), FIELD(query_stride), FIELD(key_strides), FIELD(value_strides),
                 FIELD(num_seqs), FIELD(max_blocks), FIELD(num_heads), FIELD(num_kv_heads), FIELD(head_dim),
                 FIELD(value_dim), FIELD(block_size), FIELD(sliding_window), FIELD(chunk_size), FIELD(first),
                 FIELD(step), FIELD(scale), FIELD(soft_cap))

// Paged attention on a CPU: one pass over the blocks with online softmax, fp32 accumulation.
//
// A work item is one KV head of a few neighbouring query tokens of one sequence, or all KV heads of a single one: its
// *rows* are those tokens times the query heads that share the KV heads. Keys are taken in tiles that never cross a block. All arithmetic of a row is
// ordered by the row's own position and the block size alone, so its result is the same bits whichever batch, chunk or
// thread computes it, and whether it is decoded or prefilled.

#include <omp.h>

#include <algorithm>
#include <type_traits>

#include "attention.h"
#include "tile.h"

namespace headrace {
namespace {

constexpr int kMaxRows = 16;  // Rows of an item at most, unless more heads share one KV head.
constexpr int kSequencesPerThread = 4;  // From which on an item takes all KV heads of a decoded sequence.
constexpr int64_t kSerialWork = 1 << 17;  // Multiply-adds below which waking other threads costs more than it saves.

// Whether bf16 queries and keys are multiplied without widening them.
template <typename Query, typename Cache>
constexpr bool can_multiply_pairs() {
#ifdef __AVX512BF16__
  return std::is_same_v<Query, bfloat16> && std::is_same_v<Cache, bfloat16>;
#else
  return false;
#endif
}

struct Item {
  int sequence, kv_head, num_kv_heads;
  int first_token, num_tokens;  // Counted from the sequence's first query token.
};

// Where the query of an item's row is: rows of one KV head lie together, those of one token within them.
struct Place {
  int token, head;
};

inline Place place_of(int row, const Item& item, int group) {
  const int rows_per_head = item.num_tokens * group, within = row % rows_per_head;
  return {item.first_token + within / group, (item.kv_head + row / rows_per_head) * group + within % group};
}

template <typename Query>
void begin_rows(const AttentionArguments& a, const Item& item, Rows& rows) {
  const int group = a.num_heads / a.num_kv_heads;
  const int width = rows.head_dim_padded;
  const int num_queries = a.query_starts[item.sequence + 1] - a.query_starts[item.sequence];
  rows.count = item.num_kv_heads * item.num_tokens * group;
  rows.scale = a.scale;
  for (int row = 0; row < rows.count; ++row) {
    const auto [token, head] = place_of(row, item, group);
    const int position = a.context_lens[item.sequence] - num_queries + token;
    rows.last_position[row] = position;
    rows.first_position[row] = a.sliding_window ? std::max(position - a.sliding_window + 1, 0) : 0;
    rows.maximum[row] = -INFINITY;
    rows.sum[row] = Floats{};
    const int64_t offset = (a.query_starts[item.sequence] + token) * a.query_stride + int64_t{head} * a.head_dim;
    float* query = rows.query + row * width;
    widen(reinterpret_cast<const Query*>(a.query) + offset, query, a.head_dim, width);
    narrow(query, rows.narrow_query + row * width, width);
    std::memset(rows.output + row * width, 0, width * sizeof(float));
  }
}

template <typename Query>
void end_rows(const AttentionArguments& a, const Item& item, const Rows& rows) {
  const int group = a.num_heads / a.num_kv_heads;
  for (int row = 0; row < rows.count; ++row) {
    const auto [token, head] = place_of(row, item, group);
    const int64_t result_row = int64_t{a.query_starts[item.sequence] + token} * a.num_heads + head;
    Query* target = static_cast<Query*>(a.result) + result_row * a.head_dim;
    const float sum = horizontal_sum(rows.sum[row]);
    const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;  // Zeros for a row that saw no token.
    const float* output = rows.output + row * rows.head_dim_padded;
    alignas(64) float scaled[kMaxHeadDim];
    for (int i = 0; i < a.head_dim; ++i) scaled[i] = output[i] * factor;
    narrow(scaled, target, a.head_dim);
  }
}

// Copies a tile whose heads do not fill vectors, and lets it point at the copy.
template <typename Cache>
void pad(Tile<Cache>& tile, int head_dim, int width, Cache* keys, Cache* values) {
  for (int j = 0; j < tile.count; ++j) {
    for (int i = 0; i < width; ++i) {
      keys[j * width + i] = i < head_dim ? tile.keys[j * tile.stride + i] : Cache{};
      values[j * width + i] = i < head_dim ? tile.values[j * tile.stride + i] : Cache{};
    }
  }
  tile.keys = keys;
  tile.values = values;
  tile.stride = width;
}

template <typename Query, typename Cache>
void attend(const AttentionArguments& a, const Item& item, Rows& rows) {
  alignas(64) Cache padded_keys[kTile * kMaxHeadDim], padded_values[kTile * kMaxHeadDim];
  const int width = rows.head_dim_padded, rows_per_head = rows.count / item.num_kv_heads;
  const int64_t key_stride = int64_t{a.num_kv_heads} * a.head_dim;
  const int64_t block_stride = key_stride * a.block_size;
  const int32_t* table = a.block_tables + int64_t{item.sequence} * a.max_blocks;
  const auto* key_cache = reinterpret_cast<const Cache*>(a.key_cache) + int64_t{item.kv_head} * a.head_dim;
  const auto* value_cache = reinterpret_cast<const Cache*>(a.value_cache) + int64_t{item.kv_head} * a.head_dim;
  const int end = rows.last_position[rows.count - 1] + 1;
  const auto offset_of = [&](int position) {
    return table[position / a.block_size] * block_stride + position % a.block_size * key_stride;
  };
  Tile<Cache> tile{};
  tile.next_stride_bytes = key_stride * sizeof(Cache);
  tile.row_bytes = a.head_dim * sizeof(Cache);
  int start = rows.first_position[0] / a.block_size * a.block_size;
  start += (rows.first_position[0] - start) / kTile * kTile;
  while (start < end) {
    const int block_end = (start / a.block_size + 1) * a.block_size;
    const int stop = std::min({start + kTile, block_end, end});
    const int64_t offset = offset_of(start);
    tile.start = start;
    tile.count = stop - start;
    for (int head = 0; head < item.num_kv_heads; ++head) {
      const int64_t head_offset = int64_t{head} * a.head_dim;
      tile.next_keys = nullptr;
      if (stop < end && item.num_tokens == 1) {
        const int64_t next = offset_of(stop) + head_offset;
        tile.next_keys = reinterpret_cast<const char*>(key_cache + next);
        tile.next_values = reinterpret_cast<const char*>(value_cache + next);
      }
      tile.keys = key_cache + offset + head_offset;
      tile.values = value_cache + offset + head_offset;
      tile.stride = key_stride;
      if (width != a.head_dim) pad(tile, a.head_dim, width, padded_keys, padded_values);
      advance_all<can_multiply_pairs<Query, Cache>()>(rows, head * rows_per_head, (head + 1) * rows_per_head, tile);
    }
    start = stop;
  }
}

template <typename Query>
void run_item(const AttentionArguments& a, const Item& item, DType cache_dtype, Rows& rows) {
  begin_rows<Query>(a, item, rows);
  switch (cache_dtype) {
    case kFloat32: attend<Query, float>(a, item, rows); break;
    case kBFloat16: attend<Query, bfloat16>(a, item, rows); break;
    case kFloat16: attend<Query, _Float16>(a, item, rows); break;
  }
  end_rows<Query>(a, item, rows);
}

void run_item(const AttentionArguments& a, const Item& item, DType query_dtype, DType cache_dtype, Rows& rows) {
  switch (query_dtype) {
    case kFloat32: return run_item<float>(a, item, cache_dtype, rows);
    case kBFloat16: return run_item<bfloat16>(a, item, cache_dtype, rows);
    case kFloat16: return run_item<_Float16>(a, item, cache_dtype, rows);
  }
}

// Hands out items: consecutive numbers map to (sequence, tile of tokens, KV head) through a running position.
struct Cursor {
  const AttentionArguments& a;
  int tokens_per_item;
  int heads_per_decode;  // KV heads of an item of a sequence with a single query token.
  int sequence = 0;
  int64_t items_before = 0;  // Items of the sequences before `sequence`.

  int64_t items_of(int s) const {
    const int tokens = a.query_starts[s + 1] - a.query_starts[s];
    if (tokens == 1) return a.num_kv_heads / heads_per_decode;
    return int64_t{(tokens + tokens_per_item - 1) / tokens_per_item} * a.num_kv_heads;
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
    const int num_kv_heads = tokens == 1 ? heads_per_decode : 1, parts = a.num_kv_heads / num_kv_heads;
    item.sequence = sequence;
    item.kv_head = local % parts * num_kv_heads;
    item.num_kv_heads = num_kv_heads;
    item.first_token = local / parts * tokens_per_item;
    item.num_tokens = std::min(tokens_per_item, tokens - item.first_token);
    return item;
  }
};

// A sequence's KV heads lie side by side in memory, so one item takes all of them where there are sequences enough to
// keep all threads busy.
int heads_per_decode(const AttentionArguments& a) {
  return a.num_seqs >= kSequencesPerThread * omp_get_num_threads() && a.num_heads <= kMaxGroup ? a.num_kv_heads : 1;
}

bool is_serial(const AttentionArguments& a, int num_threads) {
  if (num_threads <= 1) return true;
  int64_t work = 0;
  for (int s = 0; s < a.num_seqs && work < kSerialWork; ++s)
    work += int64_t{a.query_starts[s + 1] - a.query_starts[s]} * a.context_lens[s] * a.num_heads * a.head_dim * 2;
  return work < kSerialWork;
}

}  // namespace

void attend_items(const AttentionArguments& a, DType query_dtype, DType cache_dtype, Operation& operation) {
  const int group = a.num_heads / a.num_kv_heads;
  Cursor cursor{a, std::max(kMaxRows / group, 1), heads_per_decode(a)};
  Rows rows;
  rows.head_dim_padded = (a.head_dim + kLanes - 1) / kLanes * kLanes;
  share(operation, cursor.count(), [&](int64_t number) {
    run_item(a, cursor.find(number), query_dtype, cache_dtype, rows);
  });
}

}  // namespace headrace

extern "C" __attribute__((visibility("default"))) void headrace_paged_attention(
    const char* query, void* result, const char* key_cache, const char* value_cache, const int32_t* block_tables,
    const int32_t* query_starts, const int32_t* context_lens, int64_t query_stride, int32_t num_seqs,
    int32_t max_blocks, int32_t num_heads, int32_t num_kv_heads, int32_t head_dim, int32_t block_size,
    int32_t sliding_window, float scale, int32_t query_dtype, int32_t cache_dtype, int32_t num_threads) {
  using namespace headrace;
  const AttentionArguments a{query, result, key_cache, value_cache, block_tables, query_starts, context_lens, query_stride,
                    num_seqs, max_blocks, num_heads, num_kv_heads, head_dim, block_size, sliding_window, scale};
  const auto query_type = static_cast<DType>(query_dtype), cache_type = static_cast<DType>(cache_dtype);
  Operation operation;
  if (is_serial(a, num_threads)) return attend_items(a, query_type, cache_type, operation);
#pragma omp parallel num_threads(num_threads)
  attend_items(a, query_type, cache_type, operation);
}

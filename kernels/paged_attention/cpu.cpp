// Paged attention on a CPU: one pass over the blocks with online softmax, fp32 accumulation.
//
// A work item is one KV head of a few neighbouring query tokens of one sequence: its *rows* are those tokens times the
// query heads that share the KV head. Keys are taken in tiles that never cross a block. All arithmetic of a row is
// ordered by the row's own position and the block size alone, so its result is the same bits whichever batch, chunk or
// thread computes it, and whether it is decoded or prefilled.

#include <algorithm>
#include <cmath>

#include "attention.h"

namespace headrace {
namespace {

constexpr int kTile = kLanes;      // Keys a tile at most: their scores fill one vector.
constexpr int kMaxRows = 16;       // Rows of an item at most, unless more heads share one KV head.
constexpr int kMaxHeadDim = 256;
constexpr int kMaxGroup = 64;
constexpr int64_t kSerialWork = 1 << 17;  // Multiply-adds below which waking other threads costs more than it saves.

// State of one item's rows, all in the first two cache levels.
struct Rows {
  int count;
  int head_dim_padded;
  int first_position[kMaxGroup];  // First key each row sees,
  int last_position[kMaxGroup];   // and the last: its own.
  float maximum[kMaxGroup];
  alignas(64) Floats sum[kMaxGroup];
  alignas(64) float query[kMaxGroup * kMaxHeadDim];
  alignas(64) float output[kMaxGroup * kMaxHeadDim];
};

struct Tile {
  const float* keys;
  const float* values;
  int64_t stride;  // Elements from one key to the next.
  int start;       // Position of the first key.
  int count;
  const char* next_keys;  // The tile after this one, to prefetch; null when there is none.
  const char* next_values;
  int64_t next_stride_bytes;
  int row_bytes;
};

// Sums the lanes of each of kTile vectors: lane j of the result is the sum of partial[j].
template <int kGroup>
inline Floats reduce_each(Floats* partial) {
  if constexpr (kGroup == 1) {
    return partial[0];
  } else {
    constexpr Ints low = pairing_mask<kGroup>(0), high = pairing_mask<kGroup>(kGroup / 2);
    for (int i = 0; i < kGroup / 2; ++i) {
      const Floats a = partial[i], b = partial[i + kGroup / 2];
      partial[i] = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
    }
    return reduce_each<kGroup / 2>(partial);
  }
}

// Asks for the key and value `j` of the next tile, so that memory works while this tile is computed. Only for items of
// one token: those of a prompt find the keys in the cache, where the item before has left them.
inline void prefetch(const Tile& tile, int j) {
  const int64_t offset = j * tile.next_stride_bytes;
  for (int byte = 0; byte < tile.row_bytes; byte += 64) {
    __builtin_prefetch(tile.next_keys + offset + byte);
    __builtin_prefetch(tile.next_values + offset + byte);
  }
}

// Advances R rows by one tile. kVectors is the padded head_dim in vectors, or 0 when only known at run time.
template <int kVectors, int R>
inline void advance(Rows& rows, int row, const Tile& tile) {
  const int vectors = kVectors ? kVectors : rows.head_dim_padded / kLanes;
  const int width = vectors * kLanes;
  const float* query = rows.query + row * width;
  Floats partial[R][kTile];
  for (int j = 0; j < tile.count; ++j) {
    const float* key = tile.keys + j * tile.stride;
    if (tile.next_keys) prefetch(tile, j);
    Floats dot[R] = {};
    for (int v = 0; v < vectors; ++v) {
      const Floats k = load(key + v * kLanes);
      for (int r = 0; r < R; ++r) dot[r] += load(query + r * width + v * kLanes) * k;
    }
    for (int r = 0; r < R; ++r) partial[r][j] = dot[r];
  }
  for (int j = tile.count; j < kTile; ++j)
    for (int r = 0; r < R; ++r) partial[r][j] = Floats{};

  alignas(64) float weights[R][kTile];
  int begin[R], end[R];
  for (int r = 0; r < R; ++r) {
    begin[r] = std::max(rows.first_position[row + r] - tile.start, 0);
    end[r] = std::min(rows.last_position[row + r] + 1 - tile.start, tile.count);
    if (begin[r] >= end[r]) continue;
    const Ints lanes = kLaneNumbers;
    const Ints seen = (lanes >= begin[r]) & (lanes < end[r]);
    const Floats scores = seen ? reduce_each<kLanes>(partial[r]) : splat(-INFINITY);
    const float previous = rows.maximum[row + r];
    const float maximum = std::max(previous, horizontal_max(scores));
    const Floats weight = seen ? exp_nonpositive(scores - maximum) : Floats{};
    if (maximum != previous) {
      const Floats correction = exp_nonpositive(splat(previous - maximum));
      rows.maximum[row + r] = maximum;
      rows.sum[row + r] *= correction;
      float* output = rows.output + (row + r) * width;
      for (int v = 0; v < vectors; ++v) {
        const Floats rescaled = load(output + v * kLanes) * correction;
        std::memcpy(output + v * kLanes, &rescaled, sizeof(rescaled));
      }
    }
    rows.sum[row + r] += weight;
    std::memcpy(weights[r], &weight, sizeof(weight));
  }

  for (int r = 0; r < R; ++r) {
    if (begin[r] >= end[r]) continue;
    float* output = rows.output + (row + r) * width;
    if constexpr (kVectors > 0) {
      Floats sums[kVectors];
      for (int v = 0; v < kVectors; ++v) sums[v] = load(output + v * kLanes);
      for (int j = begin[r]; j < end[r]; ++j) {
        const float* value = tile.values + j * tile.stride;
        for (int v = 0; v < kVectors; ++v) sums[v] += load(value + v * kLanes) * weights[r][j];
      }
      for (int v = 0; v < kVectors; ++v) std::memcpy(output + v * kLanes, &sums[v], sizeof(Floats));
    } else {
      for (int v = 0; v < vectors; ++v) {
        Floats sums = load(output + v * kLanes);
        for (int j = begin[r]; j < end[r]; ++j)
          sums += load(tile.values + j * tile.stride + v * kLanes) * weights[r][j];
        std::memcpy(output + v * kLanes, &sums, sizeof(sums));
      }
    }
  }
}

template <int kVectors>
void advance_all(Rows& rows, Tile& tile) {
  constexpr int kTogether = kVectors == 0 || kVectors > 8 ? 1 : kVectors > 4 ? 2 : 4;
  int row = 0;
  for (; row + kTogether <= rows.count; row += kTogether) {
    advance<kVectors, kTogether>(rows, row, tile);
    tile.next_keys = nullptr;
  }
  for (; row < rows.count; ++row) {
    advance<kVectors, 1>(rows, row, tile);
    tile.next_keys = nullptr;
  }
}

void advance_all(Rows& rows, Tile& tile) {
  switch (rows.head_dim_padded / kLanes) {
    case 2: return advance_all<2>(rows, tile);
    case 4: return advance_all<4>(rows, tile);
    case 8: return advance_all<8>(rows, tile);
    default: return advance_all<0>(rows, tile);
  }
}

struct Item {
  int sequence, kv_head, first_token, num_tokens;  // Tokens are counted from the sequence's first query token.
};

template <typename Query>
void begin_rows(const AttentionArguments& a, const Item& item, Rows& rows) {
  const int group = a.num_heads / a.num_kv_heads;
  const int width = rows.head_dim_padded;
  const int num_queries = a.query_starts[item.sequence + 1] - a.query_starts[item.sequence];
  rows.count = item.num_tokens * group;
  for (int row = 0; row < rows.count; ++row) {
    const int token = item.first_token + row / group;
    const int head = item.kv_head * group + row % group;
    const int position = a.context_lens[item.sequence] - num_queries + token;
    rows.last_position[row] = position;
    rows.first_position[row] = a.sliding_window ? std::max(position - a.sliding_window + 1, 0) : 0;
    rows.maximum[row] = -INFINITY;
    rows.sum[row] = Floats{};
    const int64_t offset = (a.query_starts[item.sequence] + token) * a.query_stride + int64_t{head} * a.head_dim;
    float* query = rows.query + row * width;
    widen(reinterpret_cast<const Query*>(a.query) + offset, query, a.head_dim, width);
    for (int i = 0; i < width; ++i) query[i] *= a.scale;
    std::memset(rows.output + row * width, 0, width * sizeof(float));
  }
}

template <typename Query>
void end_rows(const AttentionArguments& a, const Item& item, const Rows& rows) {
  const int group = a.num_heads / a.num_kv_heads;
  for (int row = 0; row < rows.count; ++row) {
    const int64_t token = a.query_starts[item.sequence] + item.first_token + row / group;
    const int head = item.kv_head * group + row % group;
    Query* target = static_cast<Query*>(a.result) + (token * a.num_heads + head) * a.head_dim;
    const float factor = 1.0f / horizontal_sum(rows.sum[row]);
    const float* output = rows.output + row * rows.head_dim_padded;
    for (int i = 0; i < a.head_dim; ++i) store_scalar(target + i, output[i] * factor);
  }
}

template <typename Cache>
void attend(const AttentionArguments& a, const Item& item, Rows& rows) {
  alignas(64) float wide_keys[kTile * kMaxHeadDim], wide_values[kTile * kMaxHeadDim];
  const int width = rows.head_dim_padded;
  const int64_t key_stride = int64_t{a.num_kv_heads} * a.head_dim;
  const int64_t block_stride = key_stride * a.block_size;
  const int32_t* table = a.block_tables + int64_t{item.sequence} * a.max_blocks;
  const auto* key_cache = reinterpret_cast<const Cache*>(a.key_cache) + int64_t{item.kv_head} * a.head_dim;
  const auto* value_cache = reinterpret_cast<const Cache*>(a.value_cache) + int64_t{item.kv_head} * a.head_dim;
  const int end = rows.last_position[rows.count - 1] + 1;
  const auto offset_of = [&](int position) {
    return table[position / a.block_size] * block_stride + position % a.block_size * key_stride;
  };
  Tile tile;
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
    tile.next_keys = nullptr;
    if (stop < end && item.num_tokens == 1) {
      const int64_t next = offset_of(stop);
      tile.next_keys = reinterpret_cast<const char*>(key_cache + next);
      tile.next_values = reinterpret_cast<const char*>(value_cache + next);
    }
    if constexpr (sizeof(Cache) == sizeof(float)) {
      tile.keys = key_cache + offset;
      tile.values = value_cache + offset;
      tile.stride = key_stride;
    }
    if (sizeof(Cache) != sizeof(float) || width != a.head_dim) {
      for (int j = 0; j < tile.count; ++j) {
        widen(key_cache + offset + j * key_stride, wide_keys + j * width, a.head_dim, width);
        widen(value_cache + offset + j * key_stride, wide_values + j * width, a.head_dim, width);
      }
      tile.keys = wide_keys;
      tile.values = wide_values;
      tile.stride = width;
    }
    advance_all(rows, tile);
    start = stop;
  }
}

template <typename Query>
void run_item(const AttentionArguments& a, const Item& item, DType cache_dtype, Rows& rows) {
  begin_rows<Query>(a, item, rows);
  switch (cache_dtype) {
    case kFloat32: attend<float>(a, item, rows); break;
    case kBFloat16: attend<bfloat16>(a, item, rows); break;
    case kFloat16: attend<_Float16>(a, item, rows); break;
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
  int sequence = 0;
  int64_t items_before = 0;  // Items of the sequences before `sequence`.

  int64_t items_of(int s) const {
    const int tokens = a.query_starts[s + 1] - a.query_starts[s];
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
    const int64_t local = number - items_before;
    const int tokens = a.query_starts[sequence + 1] - a.query_starts[sequence];
    item.sequence = sequence;
    item.kv_head = static_cast<int>(local % a.num_kv_heads);
    item.first_token = static_cast<int>(local / a.num_kv_heads) * tokens_per_item;
    item.num_tokens = std::min(tokens_per_item, tokens - item.first_token);
    return item;
  }
};

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
  Cursor cursor{a, std::max(kMaxRows / group, 1)};
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

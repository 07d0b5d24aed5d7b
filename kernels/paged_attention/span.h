// Keys and values of neighbouring positions, packed as panels: what a few rows of queries are multiplied with.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../cache_strides.h"
#include "../panel.h"
#include "../quantized_kv.h"

namespace headrace {

constexpr int kTile = kLanes;  // Keys a tile at most: their scores fill one vector.
constexpr int kSpanTiles = kPanelVectors;
constexpr int kSpanKeys = kPanel;
constexpr int kMaxHeadDim = 576;   // Of keys,
constexpr int kMaxValueDim = 512;  // and of values.

// Keys that lie one after another: those of a block, or some of them.
template <typename Cache>
struct Tile {
  const Cache* keys;
  const Cache* values;
  const int32_t* scales;  // Pairs, in eight bits.
  int start;              // Position of the first key.
  int count;              // 0 where the item sees none of them.
};

// Neighbouring tiles of a sequence. The first one's number is a multiple of kSpanTiles, so that the spans of a row are
// the same in whichever item it is computed.
template <typename Cache>
struct Span {
  Tile<Cache> tiles[kSpanTiles];
  CacheStrides key, value;
  int head_dim, value_dim, block_size;
  bool is_whole;  // All tiles are full, and no position lies between them.
};

// The span for a KV head that is `head` after the one of `span`.
template <typename Cache>
Span<Cache> of_head(Span<Cache> span, int head) {
  for (Tile<Cache>& tile : span.tiles) {
    tile.keys += head * span.key.head;
    tile.values += head * span.value.head;
    if (EightBits<Cache>::kIs) tile.scales += int64_t{head} * span.block_size;
  }
  return span;
}

// The same in the order of multiplication, in words of type Word: a panel of keys, to multiply queries with, and panels
// of values, to multiply the keys' weights with. Keys that a tile lacks are zeros: their places may never have been
// written.
template <typename Word>
struct PackedSpan {
  int num_keys;               // Up to the last that is there.
  Scales scales[kSpanTiles];  // Of keys and values in eight bits, with what `load` left to be multiplied.
  alignas(64) int32_t keys[kMaxHeadDim / kPerWord<Word> * kPanel];
  alignas(64) int32_t values[kMaxValueDim * kSpanKeys / kPerWord<Word>];
};

// Swaps rows and lanes, by swapping each bit of their numbers.
template <int kDistance = kLanes / 2>
[[gnu::always_inline]] inline void transpose(Ints* block) {
  if constexpr (kDistance > 0) {
    constexpr Ints low = make_ints([](int lane) { return lane & kDistance ? kLanes + lane - kDistance : lane; });
    constexpr Ints high = make_ints([](int lane) { return lane & kDistance ? kLanes + lane : lane + kDistance; });
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & kDistance) continue;
      const Ints a = block[i], b = block[i + kDistance];
      block[i] = __builtin_shuffle(a, b, low);
      block[i + kDistance] = __builtin_shuffle(a, b, high);
    }
    transpose<kDistance / 2>(block);
  }
}

#ifdef __AVX512BF16__
inline Ints pairs_of(const int8_t* source) {
  return (Ints)_mm512_cvtne2ps_pbh((__m512)load(source + kLanes), (__m512)load(source));
}

// A word of each of kLanes keys, from two elements of theirs.
template <typename Cache>
inline Ints pairs_of_elements(const Cache* first, const Cache* second) {
  return ((Ints)load(first) >> 16 & 0xffff) | ((Ints)load(second) & ~0xffff);
}

inline Ints pairs_of_elements(const bfloat16* first, const bfloat16* second) {
  constexpr Ints kOrder = kLaneNumbers | (kLaneNumbers + kLanes) << 16;
  const __m512i low = _mm512_castsi256_si512(load_raw<__m256i>(first));
  const __m512i both = _mm512_inserti64x4(low, load_raw<__m256i>(second), 1);
  return (Ints)_mm512_permutexvar_epi16((__m512i)kOrder, both);
}

// In the unit of `load`: the bits of a float8 are those of a bfloat16 but for the offset of its exponent, unless it
// has no leading one.
inline Ints pairs_of(const float8* source) {
  const __m512i codes = _mm512_cvtepi8_epi16(load_raw<__m256i>(source));
  const __m512i magnitudes = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
  const __m512i numbers = _mm512_add_epi16(_mm512_slli_epi16(magnitudes, 4), _mm512_set1_epi16(0x3800));
  const __m512i small = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860));
  const __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitudes, _mm512_set1_epi16(8));
  const __m512i result = _mm512_mask_permutexvar_epi16(numbers, is_small, magnitudes, small);
  return (Ints)_mm512_or_si512(result, _mm512_and_si512(codes, _mm512_set1_epi16(static_cast<int16_t>(0x8000))));
}
#endif

// A vector of words from as many elements in eight bits as fill it: all of them are exact in bfloat16.
template <typename Word, typename Cache>
inline Ints words_of(const Cache* source) {
#ifdef __AVX512BF16__
  if constexpr (kPerWord<Word> == 2) return pairs_of(source);
#endif
  return (Ints)load(source);
}

// A vector of words from `count` elements, more or less than fill it; the others are zero.
template <typename Word, typename Cache>
inline Ints load_words(const Cache* source, int count) {
  constexpr int kElements = kLanes * kPerWord<Word>;
  if constexpr (std::is_same_v<Word, Cache>) {
    if (count >= kElements) return load_raw<Ints>(source);
    Ints words{};
    std::memcpy(&words, source, count * sizeof(Cache));
    return words;
  } else if constexpr (EightBits<Cache>::kIs) {
    if (count >= kElements) return words_of<Word>(source);
    Cache elements[kElements]{};
    std::memcpy(elements, source, count);
    return words_of<Word>(elements);
  } else {
    static_assert(std::is_same_v<Word, float>);
    alignas(64) float wide[kLanes];
    if (count >= kElements) return (Ints)load(source);
    widen(source, wide, count, kLanes);
    return (Ints)load(wide);
  }
}

// The same word of kLanes keys that lie transposed, `stride` between their elements. Places without a token are read
// too: they change only their own scores, which are never used.
template <typename Word, typename Cache>
inline Ints words_of_keys(const Cache* keys, int64_t stride) {
#ifdef __AVX512BF16__
  if constexpr (kPerWord<Word> == 2) return pairs_of_elements(keys, keys + stride);
#endif
  return (Ints)load(keys);
}

// Asks memory for what the same row of the span after this one holds. The processor drops requests that come all at once,
// so each row that is packed asks for one; a row that is not there is harmless.
template <typename Cache>
struct RowsAhead {
  const Cache* rows;  // Null where nothing is asked for.
  int64_t stride;

  void ask(int row, int first) const {
    if (rows) __builtin_prefetch(rows + row * stride + first, 0, 2);
  }
};

// Lays keys side by side: a vector of each word, with that word of every key of the tile. Words that are whole stay in
// registers: where some may be missing, the block goes through memory.
template <typename Word, bool kIsWhole, typename Cache>
inline void pack_key_words(const Tile<Cache>& tile, const Span<Cache>& span, int first, int32_t* target,
                           RowsAhead<Cache> ahead) {
  Ints block[kLanes];
  const Cache* key = tile.keys + first;
  const int count = kIsWhole ? kLanes * kPerWord<Word> : span.head_dim - first;
#pragma GCC unroll 16
  for (int j = 0; j < kLanes; ++j, key += span.key.token) {
    block[j] = kIsWhole || j < tile.count ? load_words<Word>(key, count) : Ints{};
    ahead.ask(j, first);
  }
  transpose(block);
#pragma GCC unroll 16
  for (int word = 0; word < kLanes; ++word) std::memcpy(target + word * kPanel, &block[word], sizeof(Ints));
}

template <typename Word, typename Cache>
inline void pack_keys(const Tile<Cache>& tile, const Span<Cache>& span, int32_t* target, RowsAhead<Cache> ahead) {
  constexpr int kElements = kLanes * kPerWord<Word>;
  for (int first = 0; first < span.head_dim; first += kElements, target += kLanes * kPanel) {
    if (tile.count == kTile && span.head_dim - first >= kElements)
      pack_key_words<Word, true>(tile, span, first, target, ahead);
    else
      pack_key_words<Word, false>(tile, span, first, target, ahead);
  }
}

// Two vectors of words, each of the same element of two keys, from a vector of elements of either key.
inline void interleave(Ints a, Ints b, Ints* low, Ints* high) {
  typedef uint16_t Elements __attribute__((vector_size(kLanes * 4)));
  constexpr Ints kLow = kLaneNumbers | (kLaneNumbers + 2 * kLanes) << 16;
  constexpr Ints kHigh = kLow + (kLanes | kLanes << 16);
  *low = (Ints)__builtin_shuffle((Elements)a, (Elements)b, (Elements)kLow);
  *high = (Ints)__builtin_shuffle((Elements)a, (Elements)b, (Elements)kHigh);
}

template <typename Word, bool kIsWhole, typename Cache>
inline void pack_value_rows(const Tile<Cache>& tile, const Span<Cache>& span, int first, int32_t* place,
                            RowsAhead<Cache> ahead) {
  const Cache* value = tile.values + first;
  const int count = kIsWhole ? kLanes * kPerWord<Word> : span.value_dim - first;
  for (int j = 0; j < kTile; j += kPerWord<Word>, place += kPanel) {
    Ints words[kPerWord<Word>];
    for (int k = 0; k < kPerWord<Word>; ++k, value += span.value.token) {
      words[k] = kIsWhole || j + k < tile.count ? load_words<Word>(value, count) : Ints{};
      ahead.ask(j + k, first);
    }
    if constexpr (kPerWord<Word> == 2) interleave(words[0], words[1], &words[0], &words[1]);
    std::memcpy(place, words, sizeof(words));
  }
}

template <typename Word, typename Cache>
inline void pack_values(const Tile<Cache>& tile, const Span<Cache>& span, int32_t* target, RowsAhead<Cache> ahead) {
  constexpr int kElements = kLanes * kPerWord<Word>;
  for (int first = 0; first < span.value_dim; first += kElements) {
    int32_t* place = target + first / kPanel * (kSpanKeys / kPerWord<Word>) * kPanel + first % kPanel;
    if (tile.count == kTile && span.value_dim - first >= kElements)
      pack_value_rows<Word, true>(tile, span, first, place, ahead);
    else
      pack_value_rows<Word, false>(tile, span, first, place, ahead);
  }
}

// Packs a span, but for keys that are transposed, and asks memory for the one that follows; null where nothing does.
template <typename Word, typename Cache>
inline void pack(const Span<Cache>& span, PackedSpan<Word>& packed, const Span<Cache>* next) {
  packed.num_keys = 0;
  for (int t = 0; t < kSpanTiles; ++t) {
    const Tile<Cache>& tile = span.tiles[t];
    const RowsAhead<Cache> keys{next ? next->tiles[t].keys : nullptr, span.key.token};
    const RowsAhead<Cache> values{next ? next->tiles[t].values : nullptr, span.value.token};
    if (!span.key.is_transposed()) pack_keys<Word>(tile, span, packed.keys + t * kTile, keys);
    pack_values<Word>(tile, span, packed.values + t * kTile / kPerWord<Word> * kPanel, values);
    if (tile.count) packed.num_keys = t * kTile + tile.count;
    if constexpr (EightBits<Cache>::kIs) {
      packed.scales[t] = load_scales<Cache>(tile.scales, tile.count);
      if (next) __builtin_prefetch(next->tiles[t].scales, 0, 2);
    }
  }
}

}  // namespace headrace

// The inner product of all CPU kernels: rows times a panel of neighbouring features.
//
// A panel holds kPanel features: for each word of the input (one fp32 number or two bf16 numbers), that word of each
// feature's weights. Rows are multiplied with one accumulator per row and feature, and the words are taken in order:
// a row's bits depend neither on the other rows nor on the number of threads.
#pragma once

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "simd.h"

namespace headrace {

constexpr int kPanelVectors = 4;
constexpr int kPanel = kPanelVectors * kLanes;
constexpr int kTileRows = kLanes == 16 ? 6 : 2;  // As many as the registers hold.
constexpr int kLine = 64;                        // Bytes of a cache line.

template <typename T>
constexpr int kPerWord = 4 / sizeof(T);

inline Floats multiply_word(Floats sum, Ints weights, int32_t word, const float*) {
  float x;
  std::memcpy(&x, &word, 4);
  return sum + (Floats)weights * x;
}

inline Floats multiply_word(Floats sum, Ints weights, int32_t word, const bfloat16*) {
#ifdef __AVX512BF16__
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(word));
#else
  const Ints x = Ints{} + word;
  sum += (Floats)(weights << 16) * (Floats)(x << 16);
  return sum + (Floats)(weights & ~0xffff) * (Floats)(x & ~0xffff);
#endif
}

// What a multiplication prefetches with each word: nothing.
struct NothingAhead {
  void ask(const int32_t*) {}
};

// The weights two pages further: the processor reads ahead by itself, but not across pages.
struct PagesAhead {
  void ask(const int32_t* weights) {
    for (int v = 0; v < kPanelVectors; ++v) __builtin_prefetch(weights + v * kLanes + 2048);
  }
};

// A cache line of other memory, one after the other. It goes to the second level, which takes half the time that a
// prefetch to the first does (Zen 4).
struct LinesAhead {
  const char* line;

  void ask(const int32_t*) {
    __builtin_prefetch(line, 0, 2);
    line += kLine;
  }
};

// Ranges of other memory that may lie anywhere, one for each row of a tile.
struct RangeList {
  struct Range {
    const char *begin, *end;
  };

  Range ranges[kTileRows + 1];  // What stands behind the last one is read, and not used.
  int count = 0;

  void add(const void* memory, int64_t begin, int64_t end) {
    const char* bytes = static_cast<const char*>(memory);
    ranges[count] = {bytes + begin, bytes + end};
    count += end > begin;
  }
};

// Two cache lines of a list with each word, beside the requests of another one: few enough not to keep others waiting.
// Where a range ends is not foreseen, so the step to the next one is no branch.
template <typename Ahead>
struct ListAhead {
  Ahead others;
  const RangeList::Range* range;
  const RangeList::Range* last;
  const char* line;

  ListAhead(Ahead others, const RangeList& list)
      : others(others), range(list.ranges), last(range + list.count), line(list.count ? range->begin : nullptr) {}

  void ask(const int32_t* weights) {
    others.ask(weights);
    if (range == last) return;
    __builtin_prefetch(line, 0, 2);
    __builtin_prefetch(line + kLine, 0, 2);
    line += 2 * kLine;
    const bool has_ended = line >= range->end;
    range += has_ended;
    line = has_ended ? range->begin : line;
  }
};

// Adds the products of R rows and a panel to `sums`.
template <typename T, int R, typename Ahead>
inline void multiply_panel(Floats (*sums)[kPanelVectors], const int32_t* panel, int words, const T* x, int64_t x_stride,
                           Ahead& ahead) {
  for (int word = 0; word < words; ++word) {
    Ints weight[kPanelVectors];
    const int32_t* weights = panel + int64_t{word} * kPanel;
    for (int v = 0; v < kPanelVectors; ++v) weight[v] = load_raw<Ints>(weights + v * kLanes);
    ahead.ask(weights);
    for (int r = 0; r < R; ++r) {
      const int32_t input = load_raw<int32_t>(x + r * x_stride + word * kPerWord<T>);
      for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = multiply_word(sums[r][v], weight[v], input, x);
    }
  }
}

}  // namespace headrace

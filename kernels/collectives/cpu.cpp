// Sums and gathers of processes that share memory; see exchange.h.

#include "../abi.h"
#include "exchange.h"

namespace headrace {
namespace {

// Puts the columns of all side by side: those of `width` bytes, from `first` on, of `num_rows` rows.
bool gather_piece(const Exchange& exchange, const char* data, char* result, int64_t num_rows, int64_t row_bytes,
                  int64_t first, int64_t width) {
  const int64_t turn = exchange.put(data + first, num_rows, width, row_bytes);
  if (turn == 0) return false;
  for (int32_t other = 0; other < exchange.size; ++other)
    for (int64_t row = 0; row < num_rows; ++row)
      std::memcpy(result + (row * exchange.size + other) * row_bytes + first,
                  exchange.slot(turn, other) + row * width, width);
  return true;
}

}  // namespace
}  // namespace headrace

// Overwrites `count` numbers by their sums over all processes; returns 1 when the group has ended.
EXPORTED int32_t headrace_exchange_sum(const int64_t* ended, int64_t* counters, void* slots, void* data, int64_t capacity,
                                       int64_t count, int32_t rank, int32_t size, int32_t is_bfloat16) {
  using namespace headrace;
  const Exchange exchange{ended, counters, static_cast<char*>(slots), capacity, rank, size};
  const bool is_done = is_bfloat16 ? sum(exchange, static_cast<bfloat16*>(data), count)
                                   : sum(exchange, static_cast<float*>(data), count);
  return is_done ? 0 : 1;
}

// Puts rows of all processes side by side: `[num_rows, size * row_bytes]` bytes.
EXPORTED int32_t headrace_exchange_gather(const int64_t* ended, int64_t* counters, void* slots, const void* data,
                                          void* result, int64_t capacity, int64_t num_rows, int64_t row_bytes,
                                          int32_t rank, int32_t size) {
  using namespace headrace;
  const Exchange exchange{ended, counters, static_cast<char*>(slots), capacity, rank, size};
  const char* source = static_cast<const char*>(data);
  char* target = static_cast<char*>(result);
  const int64_t most_rows = std::max<int64_t>(1, capacity / std::max<int64_t>(1, row_bytes));
  for (int64_t row = 0; row < num_rows; row += most_rows) {
    const int64_t rows = std::min(most_rows, num_rows - row);
    for (int64_t first = 0; first < row_bytes; first += capacity) {
      const int64_t width = std::min(capacity, row_bytes - first);
      if (!gather_piece(exchange, source + row * row_bytes, target + row * size * row_bytes, rows, row_bytes, first,
                        width))
        return 1;
    }
  }
  return 0;
}

EXPORT_SIGNATURE(exchange_sum)
EXPORT_SIGNATURE(exchange_gather)
EXPORT_STRUCTURE(Exchange, FIELD(ended), FIELD(counters), FIELD(slots), FIELD(capacity), FIELD(rank), FIELD(size))

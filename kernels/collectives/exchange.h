// Sums of processes that share memory. Each has a counter of what it has put down, on a line of its own, and two slots,
// which it fills by turns: a slot is written again when all have put down what came between, for which they must have
// read it.
#pragma once

#include "../simd.h"
#include "../team.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>

namespace headrace {
constexpr int kCounterLine = 64 / sizeof(int64_t);
constexpr int64_t kPatienceNs = 5000000;  // Behind which a waiting process sleeps.
constexpr int64_t kSummedAtOnce = 512;        // Floats that are summed at a time.

inline int64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000 + now.tv_nsec;
}

// Sleeps until the number is another, or for ten milliseconds, behind which the end of the group is looked for.
inline void sleep_while(int64_t* number, int64_t value) {
  const timespec most{0, 10000000};
#if defined(__linux__)
  syscall(SYS_futex, number, FUTEX_WAIT, static_cast<int32_t>(value), &most, nullptr, 0);
#else
  const timespec pause{0, 50000};
  nanosleep(&pause, nullptr);
#endif
}

inline void wake(int64_t* number) {
#if defined(__linux__)
  syscall(SYS_futex, number, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

struct Exchange {
  const int64_t* ended;  // Not zero: no thread waits any more.
  int64_t* counters;
  char* slots;
  int64_t capacity;  // Bytes of a slot.
  int32_t rank, size;

  char* slot(int64_t turn, int32_t of) const { return slots + ((turn & 1) * size + of) * capacity; }

  int64_t* counter(int32_t of) const { return counters + of * kCounterLine; }

  // How many processes sleep until a counter changes: beside it.
  int64_t* sleepers(int32_t of) const { return counter(of) + 1; }

  // Waits until all have put down as many things; says whether they have.
  bool wait(int64_t turn) const {
    for (int32_t other = 0; other < size; ++other)
      if (other != rank && !wait_for(other, turn)) return false;
    return true;
  }

  bool wait_for(int32_t other, int64_t turn) const {
    // Within a step who waits offers its core but does not leave it: to be woken takes longer than others are late.
    int64_t since = 0;
    for (int spins = 0; __atomic_load_n(counter(other), __ATOMIC_ACQUIRE) < turn;) {
      relax(spins);
      if (spins < kSpins) continue;
      const int64_t now = nanoseconds();
      if (since == 0) since = now;
      if (now - since > kPatienceNs) break;
    }
    if (__atomic_load_n(counter(other), __ATOMIC_ACQUIRE) >= turn) return true;
    __atomic_fetch_add(sleepers(other), 1, __ATOMIC_SEQ_CST);
    bool has_ended = false;
    // Who counts up looks for sleepers behind that, and who sleeps looks at the counter behind saying so.
    for (int64_t seen; (seen = __atomic_load_n(counter(other), __ATOMIC_SEQ_CST)) < turn;) {
      if ((has_ended = __atomic_load_n(ended, __ATOMIC_RELAXED) != 0)) break;
      sleep_while(counter(other), seen);
    }
    __atomic_fetch_sub(sleepers(other), 1, __ATOMIC_SEQ_CST);
    return !has_ended;
  }

  // Puts bytes down, as many rows of as many, and returns the turn; 0 when the group has ended.
  int64_t put(const char* data, int64_t num_rows, int64_t row_bytes, int64_t stride) const {
    const int64_t turn = *counter(rank) + 1;
    if (!wait(turn - 1)) return 0;
    char* target = slot(turn, rank);
    for (int64_t row = 0; row < num_rows; ++row) std::memcpy(target + row * row_bytes, data + row * stride, row_bytes);
    return publish(turn) ? turn : 0;
  }

  // Says that the slot of a turn is filled, and waits for those of all others; says whether they are.
  bool publish(int64_t turn) const {
    __atomic_store_n(counter(rank), turn, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(sleepers(rank), __ATOMIC_SEQ_CST) > 0) wake(counter(rank));
    return wait(turn);
  }
};

// Adds up the slots of a turn in the order of ranks, so that all have the same bits.
template <typename T>
void sum_slots(const Exchange& exchange, int64_t turn, T* result, int64_t count) {
  float sums[kSummedAtOnce];
  for (int64_t first = 0; first < count; first += kSummedAtOnce) {
    const int64_t num = std::min(kSummedAtOnce, count - first);
    for (int32_t other = 0; other < exchange.size; ++other) {
      const T* values = reinterpret_cast<const T*>(exchange.slot(turn, other)) + first;
      for (int64_t i = 0; i < num; ++i) {
        if constexpr (std::is_same_v<T, float>)
          sums[i] = other == 0 ? values[i] : sums[i] + values[i];
        else
          sums[i] = other == 0 ? to_float(values[i]) : sums[i] + to_float(values[i]);
      }
    }
    for (int64_t i = 0; i < num; ++i) store_scalar(result + first + i, sums[i]);
  }
}

// Adds the floats of all slots of a turn to a total, or overwrites it by them.
inline void add_slots(const Exchange& exchange, int64_t turn, int64_t first, int64_t count, float* total, bool is_new) {
  float sums[kSummedAtOnce];
  for (int64_t done = 0; done < count; done += kSummedAtOnce) {
    const int64_t num = std::min(kSummedAtOnce, count - done);
    for (int32_t other = 0; other < exchange.size; ++other) {
      const float* values = reinterpret_cast<const float*>(exchange.slot(turn, other)) + first + done;
      if (other == 0) {
        std::memcpy(sums, values, num * sizeof(float));
        continue;
      }
      for (int64_t i = 0; i < num; ++i) sums[i] += values[i];
    }
    float* target = total + done;
    if (is_new) {
      std::memcpy(target, sums, num * sizeof(float));
      continue;
    }
    for (int64_t i = 0; i < num; ++i) target[i] += sums[i];
  }
}

template <typename T>
bool sum(const Exchange& exchange, T* data, int64_t count) {
  const int64_t most = exchange.capacity / static_cast<int64_t>(sizeof(T));
  for (int64_t first = 0; first < count; first += most) {
    const int64_t num = std::min(most, count - first), num_bytes = num * static_cast<int64_t>(sizeof(T));
    const int64_t turn = exchange.put(reinterpret_cast<const char*>(data + first), 1, num_bytes, 0);
    if (turn == 0) return false;
    sum_slots(exchange, turn, data + first, num);
  }
  return true;
}

}  // namespace headrace

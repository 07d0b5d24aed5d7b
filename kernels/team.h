// Sharing the items of an operation among the threads of a team.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

namespace headrace {

// An operation is over when its items are done, not when all threads have come: a thread that lost its core to another
// process between two items delays no other, since the others take its share. With a barrier, a step would wait for
// that thread after each of its operations.
struct alignas(64) Operation {
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  int64_t count{0};  // Items, where these are known by an earlier operation only, which writes it.
};

constexpr int kSpins = 4000;  // Some 50 µs, after which the core is offered to other threads.

inline void relax(int& spins) {
  if (++spins > kSpins) {
    sched_yield();
  } else {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

// Takes items until none is left, then waits until those that other threads took are done. Every thread calls it.
// `count` must not be read from memory that later operations write: a thread may come when all the others are far ahead.
template <typename Function>
inline void share(Operation& operation, int64_t count, Function function) {
  for (int64_t item; (item = operation.next.fetch_add(1, std::memory_order_relaxed)) < count;) {
    function(item);
    operation.done.fetch_add(1, std::memory_order_release);
  }
  for (int spins = 0; operation.done.load(std::memory_order_acquire) < count;) relax(spins);
}

}  // namespace headrace

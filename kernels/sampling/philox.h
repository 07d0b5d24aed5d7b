// Counter-based random numbers: Philox4x32 with 10 rounds (Salmon et al., SC 2011).
#pragma once

#include <cstdint>

namespace headrace {

// The uniform number in [0, 1) with 53 random bits whose counter is the position and whose key is the seed.
inline double uniform_number(int64_t seed, int64_t position) {
  uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53u} * counter[0], second = uint64_t{0xCD9E8D57u} * counter[2];
    counter[0] = static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key[0];
    counter[1] = static_cast<uint32_t>(second);
    counter[2] = static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key[1];
    counter[3] = static_cast<uint32_t>(first);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  const uint64_t mantissa = uint64_t{counter[0] >> 5} << 26 | counter[1] >> 6;
  return static_cast<double>(mantissa) * 0x1p-53;
}

}  // namespace headrace

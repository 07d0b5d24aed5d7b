// SiLU of one half of each row times the other half; see rows.h.

#include "../abi.h"
#include "rows.h"

namespace headrace {
namespace {

constexpr int64_t kSerialElements = 1 << 15;  // Waking other threads costs more than it saves below this.

template <typename T>
void gate_row(const void* gate_up, void* result, int size, int64_t row) {
  silu_mul_row(static_cast<const T*>(gate_up) + row * 2 * size, static_cast<T*>(result) + row * size, size);
}

}  // namespace
}  // namespace headrace

EXPORTED void headrace_silu_mul(const void* gate_up, void* result,
                                                                         int32_t num_rows, int32_t size, int32_t dtype,
                                                                         int32_t num_threads) {
  using namespace headrace;
  const auto run = dtype == kFloat32 ? gate_row<float> : dtype == kBFloat16 ? gate_row<bfloat16> : gate_row<_Float16>;
  const bool is_serial = int64_t{num_rows} * size < kSerialElements;
#pragma omp parallel for num_threads(is_serial ? 1 : num_threads)
  for (int64_t row = 0; row < num_rows; ++row) run(gate_up, result, size, row);
}

EXPORT_SIGNATURE(silu_mul)

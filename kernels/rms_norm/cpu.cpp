// RMS normalisation of rows, after adding them to their residuals; see rows.h.

#include "../abi.h"
#include "rows.h"

#include "../team.h"

namespace headrace {
namespace {

constexpr int64_t kSerialElements = 1 << 15;  // Waking other threads costs more than it saves below this.

template <typename T>
void normalise(const void* x, int64_t x_stride, const void* weight, void* residual, void* result, float eps, int size,
               int64_t row) {
  const T* source = static_cast<const T*>(x) + row * x_stride;
  if (residual) {
    T* total = static_cast<T*>(residual) + row * size;
    add_row(source, total, size);
    source = total;
  }
  rms_norm_row(source, static_cast<const T*>(weight), eps, static_cast<T*>(result) + row * size, size);
}

}  // namespace
}  // namespace headrace

EXPORTED void headrace_rms_norm(const void* x, const void* weight,
                                                                         void* residual, void* result,
                                                                         int64_t x_stride, float eps, int32_t num_rows,
                                                                         int32_t size, int32_t dtype,
                                                                         int32_t num_threads) {
  using namespace headrace;
  const auto run = dtype == kFloat32 ? normalise<float> : dtype == kBFloat16 ? normalise<bfloat16> : normalise<_Float16>;
  const bool is_serial = int64_t{num_rows} * size < kSerialElements;
#pragma omp parallel for num_threads(is_serial ? 1 : num_threads)
  for (int64_t row = 0; row < num_rows; ++row) run(x, x_stride, weight, residual, result, eps, size, row);
}

EXPORT_SIGNATURE(rms_norm)

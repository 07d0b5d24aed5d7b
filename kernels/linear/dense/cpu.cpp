// A linear layer on packed weights: multiplication of rows, with bias; see packed.h.

#include "../../abi.h"
#include "packed.h"

namespace headrace {
namespace {

template <typename T>
void multiply_all(const PackedLinear& linear, const void* x, int64_t x_stride, void* result, int64_t result_stride,
                  bool to_float, int num_rows, Operation& operation) {
  const T* rows = static_cast<const T*>(x);
  if (to_float) return multiply<T, Finish::kStoreFloat>(linear, rows, x_stride, result, result_stride, num_rows, operation);
  multiply<T, Finish::kStore>(linear, rows, x_stride, result, result_stride, num_rows, operation);
}

}  // namespace
}  // namespace headrace

EXPORTED int32_t headrace_panel_width() { return headrace::kPanel; }

EXPORTED void headrace_linear(
    const void* x, const void* weight, const float* bias, void* result, int64_t x_stride, int32_t num_rows,
    int32_t num_inputs, int32_t num_outputs, int32_t dtype, int32_t weight_dtype, int32_t to_float, int32_t num_threads) {
  using namespace headrace;
  const PackedLinear linear{weight, bias, num_inputs, num_outputs, weight_dtype};
  Operation operation;
#pragma omp parallel num_threads(num_threads)
  {
    if (dtype == kBFloat16)
      multiply_all<bfloat16>(linear, x, x_stride, result, num_outputs, to_float, num_rows, operation);
    else
      multiply_all<float>(linear, x, x_stride, result, num_outputs, to_float, num_rows, operation);
  }
}

EXPORT_SIGNATURE(panel_width)
EXPORT_SIGNATURE(linear)

// A linear layer on quantized weights: inputs are prepared row by row, then multiplied; see weight.h.

#include <new>

#include "../../abi.h"
#include "multiply.h"

namespace headrace {
namespace {

template <typename T>
int64_t scratch_bytes(const QuantizedLinear& linear, int64_t num_rows) {
  return 2 * sizeof(Operation) + Rows(linear, inputs_of<T>(linear), num_rows, nullptr).bytes;
}

template <typename T>
void run(const QuantizedLinear& linear, const void* x, int64_t x_stride, void* result, bool to_float, int num_rows,
         char* scratch, int num_threads) {
  auto* operations = reinterpret_cast<Operation*>(scratch);
  for (int i = 0; i < 2; ++i) new (operations + i) Operation;
  const Rows rows(linear, inputs_of<T>(linear), num_rows, scratch + 2 * sizeof(Operation));
#pragma omp parallel num_threads(num_threads)
  {
    share(operations[0], num_rows, [&](int64_t row) {
      prepare_row(linear, rows, static_cast<const T*>(x) + row * x_stride, row);
    });
    const int64_t stride = linear.num_outputs;
    if (to_float)
      multiply_quantized<T, Finish::kStoreFloat>(linear, rows, result, stride, num_rows, operations[1]);
    else
      multiply_quantized<T, Finish::kStore>(linear, rows, result, stride, num_rows, operations[1]);
  }
}

}  // namespace
}  // namespace headrace

EXPORTED int64_t headrace_quantized_linear_scratch(
    const headrace::QuantizedLinear* linear, int32_t dtype, int64_t num_rows) {
  using namespace headrace;
  if (dtype == kBFloat16) return scratch_bytes<bfloat16>(*linear, num_rows);
  return scratch_bytes<float>(*linear, num_rows);
}

EXPORTED void headrace_quantized_linear(
    const headrace::QuantizedLinear* linear, const void* x, void* result, int64_t x_stride, int32_t dtype,
    int32_t to_float, int32_t num_rows, char* scratch, int32_t num_threads) {
  using namespace headrace;
  if (dtype == kBFloat16)
    run<bfloat16>(*linear, x, x_stride, result, to_float, num_rows, scratch, num_threads);
  else if (dtype == kFloat16)
    run<_Float16>(*linear, x, x_stride, result, to_float, num_rows, scratch, num_threads);
  else
    run<float>(*linear, x, x_stride, result, to_float, num_rows, scratch, num_threads);
}

EXPORT_SIGNATURE(quantized_linear_scratch)
EXPORT_SIGNATURE(quantized_linear)

EXPORT_STRUCTURE(QuantizedLinear, FIELD(weight), FIELD(scales), FIELD(offsets), FIELD(bias), FIELD(input_order),
                 FIELD(num_inputs), FIELD(num_outputs), FIELD(group_size), FIELD(number), FIELD(scale_dtype),
                 FIELD(offset), FIELD(zero_point), FIELD(rounding), FIELD(activation_scale))

// A nonlinear function of every number of rows, times another number where there is one, in fp32, rounded once.
//
// A number's bits depend on its place in the row alone. torch's own operators take vectors over all rows and the rest one
// by one, with functions that round otherwise: there they depend on how many rows come together.

#include "../abi.h"
#include "functions.h"

namespace headrace {
namespace {

constexpr int64_t kSerialElements = 1 << 15;  // Waking other threads costs more than it saves below this.

// The numbers of functions, as in cpu.py.
enum FunctionNumber : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kSigmoid = 3 };

template <typename T>
struct Rows {
  const T* x;
  const T* factor;  // Null where there is none.
  T* result;
  int64_t x_stride, factor_stride;
  int num_rows, size;
};

template <typename T, typename Function>
void apply_to_row(const Rows<T>& rows, int64_t row, Function function) {
  const T* x = rows.x + row * rows.x_stride;
  const T* factor = rows.factor ? rows.factor + row * rows.factor_stride : nullptr;
  T* result = rows.result + row * rows.size;
  int i = 0;
  for (; i + kLanes <= rows.size; i += kLanes) {
    const Floats value = function(load(x + i));
    store(result + i, factor ? value * load(factor + i) : value);
  }
  if (i == rows.size) return;
  const int count = rows.size - i;
  alignas(64) float rest[kLanes], factors[kLanes];
  widen(x + i, rest, count, kLanes);
  Floats value = function(load(rest));
  if (factor) {
    widen(factor + i, factors, count, kLanes);
    value = value * load(factors);
  }
  store(rest, value);
  narrow(rest, result + i, count);
}

template <typename T, typename Function>
void apply(const Rows<T>& rows, int num_threads, Function function) {
  const bool is_serial = int64_t{rows.num_rows} * rows.size < kSerialElements;
#pragma omp parallel for num_threads(is_serial ? 1 : num_threads)
  for (int64_t row = 0; row < rows.num_rows; ++row) apply_to_row(rows, row, function);
}

template <typename T>
void apply(const Rows<T>& rows, int32_t number, int num_threads) {
  if (number == kSilu) return apply(rows, num_threads, [](Floats x) { return silu(x); });
  if (number == kGelu) return apply(rows, num_threads, [](Floats x) { return gelu(x); });
  if (number == kGeluTanh) return apply(rows, num_threads, [](Floats x) { return gelu_tanh(x); });
  apply(rows, num_threads, [](Floats x) { return sigmoid(x); });
}

template <typename T>
void gate_row(const void* gate_up, void* result, int size, int64_t row) {
  silu_mul_row(static_cast<const T*>(gate_up) + row * 2 * size, static_cast<T*>(result) + row * size, size);
}

template <typename T>
Rows<T> rows_of(const void* x, const void* factor, void* result, int64_t x_stride, int64_t factor_stride, int num_rows,
                int size) {
  return {static_cast<const T*>(x), static_cast<const T*>(factor), static_cast<T*>(result), x_stride, factor_stride,
          num_rows, size};
}

}  // namespace
}  // namespace headrace

EXPORTED void headrace_activation(const void* x, const void* factor, void* result, int64_t x_stride,
                                  int64_t factor_stride, int32_t num_rows, int32_t size, int32_t function,
                                  int32_t dtype, int32_t num_threads) {
  using namespace headrace;
  const auto run = [&](auto number) {
    using T = decltype(number);
    apply(rows_of<T>(x, factor, result, x_stride, factor_stride, num_rows, size), function, num_threads);
  };
  if (dtype == kFloat32) return run(float{});
  if (dtype == kBFloat16) return run(bfloat16{});
  run(_Float16{});
}

EXPORT_SIGNATURE(activation)

EXPORTED void headrace_silu_mul(const void* gate_up, void* result, int32_t num_rows, int32_t size, int32_t dtype,
                                int32_t num_threads) {
  using namespace headrace;
  const auto run = dtype == kFloat32 ? gate_row<float> : dtype == kBFloat16 ? gate_row<bfloat16> : gate_row<_Float16>;
  const bool is_serial = int64_t{num_rows} * size < kSerialElements;
#pragma omp parallel for num_threads(is_serial ? 1 : num_threads)
  for (int64_t row = 0; row < num_rows; ++row) run(gate_up, result, size, row);
}

EXPORT_SIGNATURE(silu_mul)

// The products of adapters, added to results that are there; see product.h.

#include "../abi.h"
#include "product.h"

namespace headrace {
namespace {

constexpr int kAddedRows = 8;  // Of a panel that a thread takes at a time.

// Adds vectors to the first `count` features of a panel of a row.
template <typename T>
void add_panel(T* target, const Floats* sums, int count) {
  alignas(64) float before[kPanel];
  widen(target, before, count, kPanel);
  Floats total[kPanelVectors];
  for (int v = 0; v < kPanelVectors; ++v) total[v] = load(before + v * kLanes) + sums[v];
  put<kPanelVectors>(target, total, count);
}

template <typename T, typename Result>
void run(LowRankTable table, const AdapterRows& adapters, const T* x, int64_t x_stride, Result* result,
         int64_t result_stride, int num_outputs, int num_threads) {
  Operation operations[2];
  const int panels = (num_outputs + kPanel - 1) / kPanel;
  const int64_t parts = (adapters.num_rows + kAddedRows - 1) / kAddedRows;
#pragma omp parallel num_threads(num_threads)
  {
    multiply_down(table, adapters, x, x_stride, operations[0]);
    share(operations[1], parts * panels, [&](int64_t item) {
      const int panel = static_cast<int>(item / parts), count = std::min(kPanel, num_outputs - panel * kPanel);
      const int end = std::min<int>((item % parts + 1) * kAddedRows, adapters.num_rows);
      for (int place = static_cast<int>(item % parts) * kAddedRows; place < end; ++place) {
        const LowRank* adapter = adapter_in(table, adapters.slots[place]);
        if (!adapter) continue;
        Floats sums[kPanelVectors] = {};
        add_up(*adapter, adapters.products_at<T>(place), panel, sums);
        add_panel(result + adapters.rows[place] * result_stride + panel * kPanel, sums, count);
      }
    });
  }
}

template <typename T>
void run_to(LowRankTable table, const AdapterRows& adapters, const void* x, int64_t x_stride, void* result,
            int64_t result_stride, int result_dtype, int num_outputs, int num_threads) {
  const T* rows = static_cast<const T*>(x);
  if (result_dtype == kBFloat16)
    return run(table, adapters, rows, x_stride, static_cast<bfloat16*>(result), result_stride, num_outputs, num_threads);
  run(table, adapters, rows, x_stride, static_cast<float*>(result), result_stride, num_outputs, num_threads);
}

}  // namespace
}  // namespace headrace

EXPORTED void headrace_low_rank(const headrace::LowRank* table, const headrace::AdapterRows* adapters,
                                const void* x, void* result, int64_t x_stride, int64_t result_stride, int32_t dtype,
                                int32_t result_dtype, int32_t num_outputs, int32_t num_threads) {
  using namespace headrace;
  if (dtype == kBFloat16)
    run_to<bfloat16>(table, *adapters, x, x_stride, result, result_stride, result_dtype, num_outputs, num_threads);
  else
    run_to<float>(table, *adapters, x, x_stride, result, result_stride, result_dtype, num_outputs, num_threads);
}

EXPORT_SIGNATURE(low_rank)

EXPORT_STRUCTURE(LowRankHalf, FIELD(offset), FIELD(first), FIELD(count))
EXPORT_STRUCTURE(LowRank, FIELD(halves), FIELD(scales), FIELD(down), FIELD(up), FIELD(rank), FIELD(num_inputs),
                 FIELD(dtype))
EXPORT_STRUCTURE(AdapterRows, FIELD(rows), FIELD(slots), FIELD(places), FIELD(products), FIELD(num_rows),
                 FIELD(stride))

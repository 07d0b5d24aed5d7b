// Each head's part of a row times a matrix of that head's own. The matrices are packed one behind the other, each in whole
// panels, as one matrix of packed.h: an item of work is a panel, and the panel says which head's inputs it takes.

#include "../../abi.h"
#include "packed.h"

namespace headrace {
namespace {

// Rows with a part for each head; the numbers of a part are neighbours.
template <typename T>
struct HeadRows {
  T* data;
  int64_t row_stride, head_stride;
};

// What packed.h multiplies by: `all` counts the features of all heads, padded.
struct HeadMatrices {
  PackedLinear all;
  int32_t num_heads, num_outputs;  // Of a head, not padded.

  int panels_of_head() const { return all.num_panels() / num_heads; }
};

template <typename W, typename T>
void multiply_heads_by(const HeadMatrices& heads, HeadRows<const T> x, HeadRows<T> result, int num_rows,
                       Operation& operation) {
  const int panels = heads.all.num_panels(), num_threads = omp_get_num_threads();
  const int parts = (num_rows + kItemRows - 1) / kItemRows;
  share(operation, int64_t{panels} * parts, [&](int64_t item) {
    const int panel = static_cast<int>(item / parts), row = static_cast<int>(item % parts) * kItemRows;
    const int head = panel / heads.panels_of_head(), of_head = panel % heads.panels_of_head();
    const int64_t next = (item + num_threads) / parts;
    const char* next_panel = static_cast<const char*>(heads.all.weight) + next * heads.all.panel_bytes(sizeof(W));
    const bool can_ask = next != panel && next < panels;
    const PanelProduct<T> product{heads.all, panel, x.data + head * x.head_stride, x.row_stride};
    T* target = result.data + head * result.head_stride;
    multiply_rows<W>(product, row, std::min(row + kItemRows, num_rows), can_ask ? next_panel : nullptr,
                     [&](int64_t of, Floats* sums) {
                       finish_row<T, Finish::kStore>(target, of * result.row_stride, of_head, heads.num_outputs, sums);
                     });
  });
}

template <typename T>
void multiply_heads(const HeadMatrices& heads, HeadRows<const T> x, HeadRows<T> result, int num_rows,
                    Operation& operation) {
  if constexpr (std::is_same_v<T, float>) {
    if (heads.all.dtype == kFloat16) return multiply_heads_by<_Float16>(heads, x, result, num_rows, operation);
  }
  multiply_heads_by<T>(heads, x, result, num_rows, operation);
}

}  // namespace
}  // namespace headrace

// Weights have the type of the rows, or are float16 beside rows of fp32.
EXPORTED void headrace_head_linear(const void* x, const void* weight, void* result, int64_t x_row_stride,
                                   int64_t x_head_stride, int64_t result_row_stride, int64_t result_head_stride,
                                   int32_t num_rows, int32_t num_heads, int32_t num_inputs, int32_t num_outputs,
                                   int32_t dtype, int32_t weight_dtype, int32_t num_threads) {
  using namespace headrace;
  const int padded = (num_outputs + kPanel - 1) / kPanel * kPanel;
  const HeadMatrices heads{{weight, nullptr, num_inputs, num_heads * padded, weight_dtype}, num_heads, num_outputs};
  Operation operation;
#pragma omp parallel num_threads(num_threads)
  {
    if (dtype == kBFloat16)
      multiply_heads<bfloat16>(heads, {static_cast<const bfloat16*>(x), x_row_stride, x_head_stride},
                               {static_cast<bfloat16*>(result), result_row_stride, result_head_stride}, num_rows,
                               operation);
    else
      multiply_heads<float>(heads, {static_cast<const float*>(x), x_row_stride, x_head_stride},
                            {static_cast<float*>(result), result_row_stride, result_head_stride}, num_rows, operation);
  }
}

EXPORT_SIGNATURE(head_linear)

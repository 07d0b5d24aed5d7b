// The experts of a layer for the tokens of a step. Tokens are sorted by expert, so the weights of each chosen expert are
// read once; a panel of an expert is an item that threads share, whichever expert it belongs to. A row's bits depend
// neither on the tokens beside it nor on the number of threads.
#pragma once

#include <new>

#include "../linear/matrix.h"
#include "../low_rank/product.h"

namespace headrace {

struct Mixture {
  const Matrix* gate_up;  // Of each expert, in panels of gates and up projections, if it has gates; all of one form.
  const Matrix* down;
  int64_t* tokens_per_expert;  // Counts all steps.
  int32_t num_experts, first_expert, hidden_size, intermediate_size;
  float slope, cubic, limit, up_shift;  // As GatedActivation has them.
  int32_t has_gate;                     // Without, features become the squares of their positive parts.
  const LowRankTable* gate_up_adapters;  // Of each expert; null, as is the other, where no adapter can be.
  const LowRankTable* down_adapters;
};

// The experts of each token and their weights; those that are not among the mixture's contribute nothing.
struct Chosen {
  const int32_t* ids;
  const float* weights;
  int32_t num_tokens, top_k;

  int64_t num_pairs() const { return int64_t{num_tokens} * top_k; }
};

constexpr int kMixtureOperations = 8;
constexpr int kMovedRows = 4;  // Of an item of an operation that only copies or prepares rows.

// The memory between operations. A row is a pair of a token and an expert, and rows are sorted by expert.
template <typename T>
struct MixtureScratch {
  int32_t *starts, *experts, *pairs;  // First row of each expert, and of each row its expert and pair.
  int32_t* row_of;                     // Of each pair; below zero where its expert is not here.
  int32_t *active, *parts_before;      // Experts with rows, and how many items a panel has for those before.
  int32_t* num_active;
  T *gathered, *gated;
  float* outputs;
  char* prepared;
  int64_t bytes;

  MixtureScratch(const Mixture& mixture, int64_t num_tokens, int64_t top_k, char* memory) {
    const int64_t rows = num_tokens * top_k;
    Pieces pieces{memory};
    starts = pieces.take<int32_t>(mixture.num_experts + 1);
    active = pieces.take<int32_t>(mixture.num_experts);
    parts_before = pieces.take<int32_t>(mixture.num_experts + 1);
    num_active = pieces.take<int32_t>(1);
    experts = pieces.take<int32_t>(rows);
    pairs = pieces.take<int32_t>(rows);
    row_of = pieces.take<int32_t>(rows);
    gathered = pieces.take<T>(mixture.gate_up->quantized || num_tokens == 1 ? 0 : rows * mixture.hidden_size);
    gated = pieces.take<T>(rows * mixture.intermediate_size);
    outputs = pieces.take<float>(rows * mixture.hidden_size);
    prepared = pieces.take<char>(
        std::max(mixture.gate_up->prepared_bytes<T>(rows), mixture.down->prepared_bytes<T>(rows)));
    bytes = pieces.bytes;
  }

  int num_rows(const Mixture& mixture) const { return starts[mixture.num_experts]; }
};

template <typename T>
void sort_by_expert(const Mixture& mixture, const Chosen& chosen, const MixtureScratch<T>& scratch) {
  const int count = mixture.num_experts;
  const auto local = [&](int64_t pair) {
    const int expert = chosen.ids[pair] - mixture.first_expert;
    return expert >= 0 && expert < count ? expert : -1;
  };
  std::fill(scratch.starts, scratch.starts + count + 1, 0);
  for (int64_t pair = 0; pair < chosen.num_pairs(); ++pair)
    if (const int expert = local(pair); expert >= 0) ++scratch.starts[expert + 1];
  int& active = *scratch.num_active = 0;
  scratch.parts_before[0] = 0;
  for (int expert = 0; expert < count; ++expert) {
    const int rows = scratch.starts[expert + 1];
    mixture.tokens_per_expert[expert] += rows;
    scratch.starts[expert + 1] += scratch.starts[expert];
    if (rows == 0) continue;
    scratch.active[active] = expert;
    scratch.parts_before[active + 1] = scratch.parts_before[active] + (rows + kItemRows - 1) / kItemRows;
    ++active;
  }
  // Each expert's start moves to its end while its rows are put down, and then back.
  for (int64_t pair = 0; pair < chosen.num_pairs(); ++pair) {
    const int expert = local(pair);
    scratch.row_of[pair] = expert < 0 ? -1 : scratch.starts[expert]++;
    if (expert < 0) continue;
    scratch.experts[scratch.row_of[pair]] = expert;
    scratch.pairs[scratch.row_of[pair]] = static_cast<int32_t>(pair);
  }
  std::copy_backward(scratch.starts, scratch.starts + count, scratch.starts + count + 1);
  scratch.starts[0] = 0;
}

inline Floats gated_activation(const Mixture& mixture, Floats gate, Floats up) {
  const float limit = mixture.limit;
  gate = gate > limit ? splat(limit) : gate;
  up = up > limit ? splat(limit) : up;
  up = up < -limit ? splat(-limit) : up;
  const Floats exponent = gate * (mixture.slope + mixture.cubic * gate * gate);
  const Floats e = exp_nonpositive(exponent < 0.0f ? exponent : -exponent);
  return gate * (exponent < 0.0f ? e : splat(1.0f)) / (1.0f + e) * (up + mixture.up_shift);
}

// One thread's walk through the operations; all threads of the team make it together.
template <typename T>
struct MixtureWalk {
  const Mixture& mixture;
  const Chosen& chosen;
  const MixtureScratch<T>& scratch;
  const T* x;
  int64_t x_stride;
  Operation* operation;                   // The next one.
  const AdapterRows* adapters = nullptr;  // Null where no token has an adapter; with room for each of its experts.

  const T* input_of(int row) const { return x + scratch.pairs[row] / chosen.top_k * x_stride; }

  // What a row's adapter adds beside a matrix of its expert, and where the products of the first of its matrices are.
  struct Added {
    const LowRank* adapter;
    T* products;
  };

  Added added_to(const LowRankTable* tables, int64_t row) const {
    const int32_t pair = scratch.pairs[row], place = adapters->places[pair / chosen.top_k];
    if (place < 0) return {nullptr, nullptr};
    const LowRank* adapter = adapter_in(tables[scratch.experts[row]], adapters->slots[place]);
    return {adapter, adapters->products_at<T>(int64_t{place} * chosen.top_k + pair % chosen.top_k)};
  }

  // Multiplies each row by the first matrix of its adapter beside its expert's.
  template <typename Inputs>
  void multiply_first(const LowRankTable* tables, Inputs inputs) {
    if (!adapters) return;
    each_row([&](int row) {
      auto [adapter, products] = added_to(tables, row);
      if (!adapter) return;
      const T* input = inputs(row);
      multiply_down<T>(*adapter, adapter->down, 1, &input, &products, 0, adapter->rank);
      // A rank more is read where their number is odd; here may be what another type of numbers has left.
      if (adapter->rank % 2) store_scalar(products + adapter->rank, 0.0f);
    });
  }

  void add_second(const LowRankTable* tables, int64_t row, int panel, Floats* sums) const {
    if (!adapters) return;
    const auto [adapter, products] = added_to(tables, row);
    if (adapter) add_up(*adapter, products, panel, sums);
  }

  // Rows of inputs, and of intermediate values, are copied into memory of their own before they are multiplied.
  bool gathers() const { return mixture.gate_up->quantized || chosen.num_tokens != 1; }
  bool prepares_gated() const { return mixture.down->quantized; }

  // Writes how many items the operations after the sorting have. A thread that counted them when it gets there might
  // count those of the next layer, which other threads have sorted by then.
  void count_items() const {
    const int64_t rows = (scratch.num_rows(mixture) + kMovedRows - 1) / kMovedRows;
    const int64_t parts = scratch.parts_before[*scratch.num_active];
    Operation* next = operation;
    if (adapters) next++->count = rows;
    if (gathers()) next++->count = rows;
    next++->count = parts * mixture.gate_up->num_panels();
    if (adapters) next++->count = rows;
    if (prepares_gated()) next++->count = rows;
    next->count = parts * mixture.down->num_panels();
  }

  template <typename Function>
  void each_row(Function function) {
    Operation& rows = *operation++;
    share(rows, rows.count, [&](int64_t item) {
      const int end = std::min<int>((item + 1) * kMovedRows, scratch.num_rows(mixture));
      for (int row = item * kMovedRows; row < end; ++row) function(row);
    });
  }

  // A panel of an expert and the rows that are multiplied by it.
  struct Item {
    int expert, panel, row, end;
  };

  Item item_at(int64_t index, int panels) const {
    const int32_t* parts = scratch.parts_before;
    const int64_t before = index / panels;
    const int place = std::upper_bound(parts, parts + *scratch.num_active, before) - parts - 1;
    const int count = parts[place + 1] - parts[place], expert = scratch.active[place];
    const int64_t inside = index - int64_t{parts[place]} * panels;
    const int row = scratch.starts[expert] + static_cast<int>(inside % count) * kItemRows;
    return {expert, static_cast<int>(inside / count), row, std::min(row + kItemRows, scratch.starts[expert + 1])};
  }

  template <typename W, typename Finisher>
  void multiply_dense(const Matrix* matrices, const T* rows, int64_t stride, Finisher finish) {
    const int panels = matrices->num_panels(), num_threads = omp_get_num_threads();
    Operation& products = *operation++;
    const int64_t count = products.count;
    const auto weights_of = [&](const Item& item) {
      const PackedLinear& linear = matrices[item.expert].dense;
      return static_cast<const char*>(linear.weight) + item.panel * linear.panel_bytes(sizeof(W));
    };
    share(products, count, [&](int64_t index) {
      const Item item = item_at(index, panels);
      // The weights of the item that this thread likely takes next: as many further as there are threads.
      const char* next = nullptr;
      if (item.end - item.row > kTileRows && index + num_threads < count)
        next = weights_of(item_at(index + num_threads, panels));
      if (next == weights_of(item)) next = nullptr;
      multiply_rows<W>(PanelProduct<T>{matrices[item.expert].dense, item.panel, rows, stride}, item.row, item.end, next,
                       [&](int64_t row, Floats* sums) { finish(item.panel, row, sums); });
    });
  }

  template <typename Finisher>
  void multiply_prepared(const Matrix* matrices, Finisher finish) {
    const int panels = matrices->num_panels();
    const Rows rows = rows_of(*matrices);
    Operation& products = *operation++;
    share(products, products.count, [&](int64_t index) {
      const Item item = item_at(index, panels);
      multiply_quantized_rows(*matrices[item.expert].quantized, rows, item.panel, item.row, item.end,
                              [&](int64_t row, Floats* sums) { finish(item.panel, row, sums); });
    });
  }

  Rows rows_of(const Matrix& matrix) const {
    return Rows(*matrix.quantized, inputs_of<T>(*matrix.quantized), chosen.num_pairs(), scratch.prepared);
  }

  // Multiplies rows by the matrix of their expert; `finish` gets each panel, row and its sums.
  template <typename Finisher>
  void multiply(const Matrix* matrices, const T* rows, int64_t stride, Finisher finish) {
    if constexpr (std::is_same_v<T, float>) {
      if (matrices->dense.dtype == kBFloat16) return multiply_dense<bfloat16>(matrices, rows, stride, finish);
      if (matrices->dense.dtype == kFloat16) return multiply_dense<_Float16>(matrices, rows, stride, finish);
    }
    multiply_dense<T>(matrices, rows, stride, finish);
  }

  void gate_up() {
    const int size = mixture.intermediate_size;
    multiply_first(mixture.gate_up_adapters, [&](int row) { return input_of(row); });
    const auto finish = [&](int panel, int64_t row, Floats* sums) {
      add_second(mixture.gate_up_adapters, row, panel, sums);
      if (!mixture.has_gate) {
        for (int v = 0; v < kPanelVectors; ++v) {
          const Floats positive = sums[v] < 0.0f ? splat(0.0f) : sums[v];
          sums[v] = positive * positive;
        }
        const int begin = panel * kPanel;
        return put<kPanelVectors>(scratch.gated + row * size + begin, sums, std::min(kPanel, size - begin));
      }
      for (int v = 0; v < kHalf; ++v) sums[v] = gated_activation(mixture, sums[v], sums[v + kHalf]);
      const int first = panel * kPanel / 2;
      put<kHalf>(scratch.gated + row * size + first, sums, std::min(kPanel / 2, size - first));
    };
    const Matrix* matrices = mixture.gate_up;
    if (matrices->quantized) {
      const Rows rows = rows_of(*matrices);
      each_row([&](int row) {
        prepare_row(*matrices[scratch.experts[row]].quantized, rows, input_of(row), row);
      });
      return multiply_prepared(matrices, finish);
    }
    if (!gathers()) return multiply(matrices, x, 0, finish);
    const int64_t columns = mixture.hidden_size;
    each_row([&](int row) {
      std::memcpy(scratch.gathered + row * columns, input_of(row), columns * sizeof(T));
    });
    multiply(matrices, scratch.gathered, columns, finish);
  }

  void down() {
    const int size = mixture.hidden_size;
    const int64_t columns = mixture.intermediate_size;
    multiply_first(mixture.down_adapters, [&](int row) { return scratch.gated + row * columns; });
    const auto finish = [&](int panel, int64_t row, Floats* sums) {
      add_second(mixture.down_adapters, row, panel, sums);
      const int first = panel * kPanel;
      put<kPanelVectors>(scratch.outputs + row * size + first, sums, std::min(kPanel, size - first));
    };
    const Matrix* matrices = mixture.down;
    if (!prepares_gated()) return multiply(matrices, scratch.gated, columns, finish);
    const Rows rows = rows_of(*matrices);
    each_row([&](int row) {
      prepare_row(*matrices[scratch.experts[row]].quantized, rows, scratch.gated + row * columns, row);
    });
    multiply_prepared(matrices, finish);
  }

  // Adds up the weighted results of each token, in the order in which it has its experts.
  template <typename Finisher>
  void combine(Finisher finish) {
    const int size = mixture.hidden_size;
    share(*operation++, chosen.num_tokens, [&](int64_t token) {
      const int32_t* rows = scratch.row_of + token * chosen.top_k;
      const float* weights = chosen.weights + token * chosen.top_k;
      for (int column = 0; column < size; column += kLanes) {
        const int count = std::min(kLanes, size - column);
        Floats sum{};
        for (int place = 0; place < chosen.top_k; ++place) {
          if (rows[place] < 0) continue;
          const float* output = scratch.outputs + int64_t{rows[place]} * size + column;
          alignas(64) float last[kLanes];
          if (count < kLanes) widen(output, last, count, kLanes);
          sum += weights[place] * load(count < kLanes ? last : output);
        }
        finish(token, column, count, sum);
      }
    });
  }

  // Calls `finish` with each token, column, number of columns and their results.
  template <typename Finisher>
  void run(Finisher finish) {
    share(*operation++, 1, [&](int64_t) {
      sort_by_expert(mixture, chosen, scratch);
      count_items();
    });
    gate_up();
    down();
    combine(finish);
  }
};

}  // namespace headrace

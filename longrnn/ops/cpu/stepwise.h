// Cells that compute one token after another, Elman, GRU and LSTM, with a change of every update.
//
// Notable choices:
// - A cell is a struct of vector functions: its gates give `keep` and `add` of memory ← keep memory + add,
//   and an output is read from the new memory. The loop over tokens is the same for every cell.
// - The recurrent weights are packed once per call into panels of the columns that a product computes at
//   once, because with the stride of a whole row every read would be on another page. Calls of few tokens
//   read the weights as they are.
// - Rows of the batch are independent and are divided among threads, which never wait for each other
//   within a call. One row runs on one thread.

#pragma once
#include "signatures.h"
#include "products.h"

namespace {

inline Vec<float> hyperbolic_tangent(Vec<float> x) {  // relative error 2e-7
  const Vec<float> square = x * x;
  Vec<float> p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Vec<float> small = x + x * square * p, large = 1.0f - 2.0f / (exponential(x + x) + 1.0f);
  return (x < 0.625f) & (x > -0.625f) ? small : large;
}
inline Vec<double> hyperbolic_tangent(Vec<double> x) {
  for (int i = 0; i < Lane<double>::W; i++) x[i] = std::tanh(x[i]);
  return x;
}

// One token of the recurrence, in vectors: x and h are the parts of the two projections, one per gate.
struct Gru {
  static constexpr int GATES = 3;
  static constexpr bool GATED = true;
  template <class V> static void update(const V *x, const V *h, V &keep, V &add, V &) {
    keep = sigmoid(x[1] + h[1]);
    add = (1 - keep) * hyperbolic_tangent(x[2] + sigmoid(x[0] + h[0]) * h[2]);
  }
  template <class V> static V read(V memory, V) { return memory; }
};

struct Lstm {
  static constexpr int GATES = 4;
  static constexpr bool GATED = true;
  template <class V> static void update(const V *x, const V *h, V &keep, V &add, V &open) {
    keep = sigmoid(x[1] + h[1]);
    add = sigmoid(x[0] + h[0]) * hyperbolic_tangent(x[2] + h[2]);
    open = sigmoid(x[3] + h[3]);
  }
  template <class V> static V read(V memory, V open) { return open * hyperbolic_tangent(memory); }
};

enum Activation { TANH, RELU, IDENTITY };

template <Activation ACTIVATION> struct Elman {  // `add` is the new memory
  static constexpr int GATES = 1;
  static constexpr bool GATED = false;
  template <class V> static void update(const V *x, const V *h, V &, V &add, V &) {
    add = x[0] + h[0];
    if constexpr (ACTIVATION == TANH) add = hyperbolic_tangent(add);
    if constexpr (ACTIVATION == RELU) add = add < 0 ? V{} : add;  // keeps a NaN
  }
  template <class V> static V read(V memory, V) { return memory; }
};

// The recurrent weights, (d, gates padded) in panels of `WIDTH` columns, or as they are.
template <class T> struct Recurrent {
  static constexpr long WIDTH = COLUMNS * Lane<T>::W, FEW_TOKENS = 8;
  const Stepwise<T> &s;
  const long gates, dp, columns;  // columns: of all gates, each padded, in whole panels
  const bool packed;
  Buffer<T> panels;
  Recurrent(const Stepwise<T> &s, long gates)
      : s(s), gates(gates), dp(padded<T>(s.d)), columns((gates * dp + WIDTH - 1) / WIDTH * WIDTH),
        packed(s.t >= FEW_TOKENS), panels(packed ? s.d * columns : 0) {
    if (!packed) return;
    std::memset(panels.data, 0, s.d * columns * sizeof(T));
    for (long gate = 0; gate < gates; gate++)
      for (long i = 0; i < s.d; i++) {
        const long column = gate * dp + i;
        T *to = panels + column / WIDTH * s.d * WIDTH + column % WIDTH;
        const T *from = s.weight + (gate * s.d + i) * s.d;
        for (long k = 0; k < s.d; k++) to[k * WIDTH] = from[k];
      }
  }
  // out (rows, columns) += h (rows, dp) W_hhᵀ
  void product_of(long rows, const T *h, T *out) {
    if (packed) {
      for (long column = 0; column < columns; column += WIDTH)
        product<T>(rows, WIDTH, s.d, {h, dp, 1}, {panels + column * s.d, WIDTH}, {out + column, columns}, true);
      return;
    }
    for (long gate = 0; gate < gates; gate++)
      for (long i = 0; i < s.d; i++)
        for (long row = 0; row < rows; row++)
          out[row * columns + gate * dp + i] += dot<T>(s.weight + (gate * s.d + i) * s.d, h + row * dp, s.d);
  }
};

template <class T> struct RowsWork {  // of the rows of one thread
  Buffer<T> h, memory, out, bias, x, open;
  RowsWork(long rows, long dp, long columns, long gates)
      : h(rows * dp), memory(rows * dp), out(rows * columns), bias(columns), x(gates * dp), open(dp) {}
};

// All tokens of the rows from `first`, one token of all of them after the other.
template <class T, class Cell>
void rows_of_cell(const Stepwise<T> &s, Recurrent<T> &recurrent, RowsWork<T> &w, long first, long rows) {
  constexpr int W = Lane<T>::W, G = Cell::GATES;
  const long d = s.d, dp = recurrent.dp, columns = recurrent.columns;
  auto &[h, memory, out, bias, x, open] = w;
  std::memset(bias.data, 0, columns * sizeof(T));
  std::memset(x.data, 0, G * dp * sizeof(T));
  std::memset(h.data, 0, rows * dp * sizeof(T));
  std::memset(memory.data, 0, rows * dp * sizeof(T));
  for (long gate = 0; gate < G; gate++) std::memcpy(bias + gate * dp, s.bias + gate * d, d * sizeof(T));
  for (long row = 0; row < rows; row++) {
    std::memcpy(h + row * dp, s.h + (first + row) * d, d * sizeof(T));
    std::memcpy(memory + row * dp, s.memory + (first + row) * d, d * sizeof(T));
  }
  const T keep_factor = T(s.keep), add_factor = T(s.add);
  for (long token = 0; token < s.t; token++) {
    for (long row = 0; row < rows; row++) std::memcpy(out + row * columns, bias.data, columns * sizeof(T));
    recurrent.product_of(rows, h, out);
    for (long row = 0; row < rows; row++) {
      const T *from = s.projected + ((first + row) * s.t + token) * G * d, *gates = out + row * columns;
      for (long gate = 0; gate < G; gate++) std::memcpy(x + gate * dp, from + gate * d, d * sizeof(T));
      T *mine = memory + row * dp, *output = h + row * dp;
      for (long i = 0; i < dp; i += W) {
        Vec<T> xs[G], hs[G], keep{}, add{}, gate{};
        for (int g = 0; g < G; g++) xs[g] = load<T>(x + g * dp + i), hs[g] = load<T>(gates + g * dp + i);
        Cell::update(xs, hs, keep, add, gate);
        keep *= keep_factor, add *= add_factor;
        store<T>(open + i, gate);
        store<T>(mine + i, Cell::GATED ? add + keep * load<T>(mine + i) : add);
      }
      const double scale = s.limit < INFINITY ? scale_of(mine, d, s.limit, dot<T>(mine, mine, d)) : 1;
      if (scale != 1)
        for (long i = 0; i < d; i++) mine[i] = T(double(mine[i]) * scale);
      for (long i = 0; i < dp; i += W) store<T>(output + i, Cell::read(load<T>(mine + i), load<T>(open + i)));
      std::memcpy(s.y + ((first + row) * s.t + token) * d, output, d * sizeof(T));
    }
  }
  for (long row = 0; row < rows; row++) {
    std::memcpy(s.h_after + (first + row) * d, h + row * dp, d * sizeof(T));
    std::memcpy(s.memory_after + (first + row) * d, memory + row * dp, d * sizeof(T));
  }
}

template <class T, class Cell> void stepwise_cell(const Stepwise<T> &s) {
  const double work = double(s.b) * s.t * Cell::GATES * s.d * s.d;
  const long parts = std::min<long>(s.b, threads_for(work)), each = (s.b + parts - 1) / parts;
  Recurrent<T> recurrent(s, Cell::GATES);
  PerThread<RowsWork<T>> works(int(parts), each, recurrent.dp, recurrent.columns, long(Cell::GATES));
#pragma omp parallel for schedule(static) num_threads(int(parts))
  for (long part = 0; part < parts; part++)
    if (part * each < s.b)
      rows_of_cell<T, Cell>(s, recurrent, *works.all[part], part * each, std::min(each, s.b - part * each));
}

// In the order of `STEPWISE_CELLS` in tokens.py.
template <class T> void stepwise(const Stepwise<T> &s) {
  static constexpr void (*cells[])(const Stepwise<T> &) = {
      stepwise_cell<T, Elman<TANH>>, stepwise_cell<T, Elman<RELU>>, stepwise_cell<T, Elman<IDENTITY>>,
      stepwise_cell<T, Gru>, stepwise_cell<T, Lstm>};
  cells[s.cell](s);
}

}  // namespace

// One token of all residual layers, x + out_proj(cell(in_proj(norm(x)))) one after another, in one call.

#pragma once
#include "cell.h"
#include "few_rows.h"

namespace {

struct Projection {  // y = x weightᵀ + bias
  Kind kind;
  const void *weight;
  Mixed bias;  // or null
};

struct Layer {
  Given<float> cell;                // one token per row; without `projected` and `y`
  long d;                           // width of x
  float eps;                        // of the norm
  Projection in, out;
  Mixed norm_weight;                // (d,)
  Mixed x, x_after;                 // (b, d), may be the same
};

struct States {  // of one layer: those before and after the token
  void *conv, *conv_after;  // in the dtype that the layer's `conv` has
  const float *state;
  float *state_after;
};

struct Stack {
  long count, b;
  const Layer *layers;      // (count,) without b, x and states
  const States *states;     // (count,)
  Mixed x, x_after;         // (b, d)
};

// y (rows, m) from x (rows, k)
inline void project(const Projection &s, long rows, long m, long k, const float *x, float *y) {
  few({rows, m, k, s.kind, s.weight, x, y});
  if (!s.bias.data) return;
  const Wide<float> bias(s.bias, m);
  for (long row = 0; row < rows; row++)
    for (long i = 0; i < m; i++) y[row * m + i] += bias[i];
}

// to (rows, d) = x / rms(x) weight
inline void rms_norm(const float *x, const float *weight, long rows, long d, float eps, float *to) {
  constexpr int W = Lane<float>::W;
  for (long row = 0; row < rows; row++, x += d, to += d) {
    Vec<float> squares{};
    float square = 0;
    long i = 0;
    for (; i + W <= d; i += W) squares += load<float>(x + i) * load<float>(x + i);
    for (; i < d; i++) square += x[i] * x[i];
    const float scale = 1 / std::sqrt((square + total(squares)) / float(d) + eps);
    for (i = 0; i < d; i++) to[i] = x[i] * scale * weight[i];
  }
}

void layer(const Layer &s) {
  const long rows = s.cell.b, inner = s.cell.h * s.cell.p;
  const long width = 2 * inner + 2 * s.cell.g * s.cell.n + s.cell.h;
  const Wide<float> x(s.x, rows * s.d), norm_weight(s.norm_weight, s.d);
  Buffer<float> normed(rows * s.d), projected(rows * width), y(rows * inner), out(rows * s.d);
  rms_norm(x, norm_weight, rows, s.d, s.eps, normed);
  project(s.in, rows, width, s.d, normed, projected);
  Given<float> between = s.cell;
  between.projected = {projected.data, 0};
  between.y = {y.data, 0};
  cell<float>(between);
  project(s.out, rows, s.d, inner, y, out);
  Narrowed<float> after(s.x_after, rows * s.d);
  for (long i = 0; i < rows * s.d; i++) after[i] = x[i] + out[i];
}

void layers(const Stack &s) {
  for (long i = 0; i < s.count; i++) {
    Layer one = s.layers[i];
    const States &states = s.states[i];
    one.cell.b = s.b;
    one.cell.state = states.state, one.cell.state_after = states.state_after;
    one.cell.conv.data = states.conv, one.cell.conv_after.data = states.conv_after;
    one.x = i ? s.x_after : s.x, one.x_after = s.x_after;
    layer(one);
  }
}

}  // namespace

// One token of all residual layers, x + out_proj(cell(in_proj(norm(x)))) one after another, in one call.

#pragma once
#include "cell.h"
#include "few_rows.h"

namespace {

// y (rows, m) = x (rows, k) weightᵀ + bias
inline void project(const Mixed &weight, const Mixed &bias, long rows, long m, long k, float *x, float *y) {
  few_rows({rows, m, k, weight, x, y});
  if (!bias.data) return;
  const Wide<float> wide(bias, m);
  for (long row = 0; row < rows; row++)
    for (long i = 0; i < m; i++) y[row * m + i] += wide[i];
}

// to (rows, d) = x / rms(x) weight
inline void rms_norm(const float *x, const float *weight, long rows, long d, float eps, float *to) {
  for (long row = 0; row < rows; row++, x += d, to += d) {
    const float scale = 1 / std::sqrt(dot<float>(x, x, d) / float(d) + eps);
    for (long i = 0; i < d; i++) to[i] = x[i] * scale * weight[i];
  }
}

inline void layer(const Layer<float> &s, const States<float> &states, long rows, const Mixed &before,
                  const Mixed &after) {
  CellCall<float> cell_call = s.of;
  const long inner = cell_call.h * cell_call.p, width = 2 * inner + 2 * cell_call.g * cell_call.n + cell_call.h;
  const Wide<float> x(before, rows * s.d), weight(s.norm, s.d);
  Buffer<float> normed(rows * s.d), projected(rows * width), y(rows * inner), out(rows * s.d);
  rms_norm(x, weight, rows, s.d, s.eps, normed);
  project(s.in_weight, s.in_bias, rows, width, s.d, normed, projected);
  cell_call.b = rows;
  cell_call.projected = {projected.data, 0};
  cell_call.y = {y.data, 0};
  cell_call.state = states.state, cell_call.state_after = states.state_after;
  cell_call.conv = states.conv, cell_call.conv_after = states.conv_after;
  cell<float>(cell_call, &states.window);
  project(s.out_weight, s.out_bias, rows, s.d, inner, y, out);
  Narrowed<float> to(after, rows * s.d);
  for (long i = 0; i < rows * s.d; i++) to[i] = x[i] + out[i];
}

int layers(const Stack &s) {
  const Layer<float> *all = static_cast<const Layer<float> *>(s.layers);
  const States<float> *states = static_cast<const States<float> *>(s.states);
  for (long i = 0; i < s.count; i++) layer(all[i], states[i], s.rows, i ? s.x_after : s.x, s.x_after);
  return 1;
}

}  // namespace

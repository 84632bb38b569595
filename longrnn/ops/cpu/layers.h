// One token of all residual layers, x + out_proj(cell(in_proj(norm(x)))) one after another, in one call.

#pragma once
#include "mamba.h"
#include "mamba2.h"

namespace {

// to (rows, d) = x / rms(x) weight
inline void rms_norm(const float *x, const float *weight, long rows, long d, float eps, float *to) {
  for (long row = 0; row < rows; row++, x += d, to += d) {
    const float scale = 1 / std::sqrt(dot<float>(x, x, d) / float(d) + eps);
    for (long i = 0; i < d; i++) to[i] = x[i] * scale * weight[i];
  }
}

template <class L>
void layer(const L &call, const States<float> &states, long rows, const Mixed &before, const Mixed &after) {
  const Block<float> &s = call.block;
  const long inner = inner_of(call.of), width = width_of(call.of);
  const Wide<float> x(before, rows * s.d), weight(s.norm, s.d);
  Buffer<float> normed(rows * s.d), projected(rows * width), y(rows * inner), out(rows * s.d);
  rms_norm(x, weight, rows, s.d, s.eps, normed);
  project(s.in_weight, s.in_bias, rows, width, s.d, normed, projected);
  mix_token(call.of, states, rows, projected, y);
  project(s.out_weight, s.out_bias, rows, s.d, inner, y, out);
  Narrowed<float> to(after, rows * s.d);
  for (long i = 0; i < rows * s.d; i++) to[i] = x[i] + out[i];
}

template <class L> void all_layers(const Stack &s) {
  const L *all = static_cast<const L *>(s.layers);
  const States<float> *states = static_cast<const States<float> *>(s.states);
  for (long i = 0; i < s.count; i++) layer(all[i], states[i], s.rows, i ? s.x_after : s.x, s.x_after);
}
void mamba2_layers(const Stack &s) { all_layers<Mamba2Layer<float>>(s); }
void mamba_layers(const Stack &s) { all_layers<MambaLayer<float>>(s); }

}  // namespace

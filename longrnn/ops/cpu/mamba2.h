// What is between the projections of a Mamba-2, for one token per row; see `longrnn/cells/mamba2.py`.

#pragma once
#include "edited.h"
#include "parts.h"

namespace {

inline long inner_of(const Mamba2<float> &s) { return s.h * s.p; }
inline long mixed_of(const Mamba2<float> &s) { return inner_of(s) + 2 * s.g * s.n; }
inline long width_of(const Mamba2<float> &s) { return inner_of(s) + mixed_of(s) + s.h; }

// The steps of a token, from their projections, and what they make of gains and log decays.
inline void steps_of(const Mamba2<float> &s, const float *raw, const float *bias, const float *A_log, float *gain,
                     float *log_decay) {
  for (long head = 0; head < s.h; head++) {
    const double addition = s.edit ? s.edit[BIAS * s.h + head] : 0;
    float step = softplus<float>(raw[head] + bias[head] + float(addition));
    // Comparisons keep a NaN.
    step = step < s.dt_least ? s.dt_least : step > s.dt_largest ? s.dt_largest : step;
    const float rate = s.edit ? edited_rate(s.edit, s.h, head, A_log[head]) : -std::exp(A_log[head]);
    gain[head] = step;
    if (s.edit) change_step(s.edit, s.h, head, step, gain[head]);
    log_decay[head] = step * rate + (s.edit ? float(s.edit[LOG_KEEP * s.h + head]) : 0.0f);
  }
}

inline void mix_token(const Mamba2<float> &s, const States<float> &states, long rows, float *projected, float *y) {
  const long d = inner_of(s), c = mixed_of(s), width = width_of(s);
  const Wide<float> dt_bias(s.dt_bias, s.h), A_log(s.A_log, s.h), D(s.D, s.h), weight(s.norm_weight, d);
  Buffer<float> mixed(rows * c), gain(rows * s.h), log_decay(rows * s.h);
  convolve_token(states, s.conv_weight, s.conv_bias, rows, c, s.k, projected + d, width, mixed);
  for (long row = 0; row < rows; row++)
    steps_of(s, projected + row * width + d + c, dt_bias, A_log, gain + row * s.h, log_decay + row * s.h);

  Scan<float> scan_call{};
  scan_call.b = rows, scan_call.t = 1, scan_call.h = s.h, scan_call.p = s.p, scan_call.g = s.g, scan_call.n = s.n;
  scan_call.decays = 1;
  scan_call.x = {mixed, c, c}, scan_call.B = {mixed + d, c, c}, scan_call.C = {mixed + d + s.g * s.n, c, c};
  scan_call.gain = gain, scan_call.log_decay = log_decay;
  scan_call.state = states.state, scan_call.final_state = states.state_after;
  scan_call.y = y;
  Buffer<float> inputs(s.edit ? rows * c : 0);
  if (s.edit) {
    std::memcpy(inputs, mixed, rows * c * sizeof(float));
    for (long i = 0; i < rows * s.h; i++)  // 0 times an infinite input would be NaN
      if (gain[i] == 0) std::fill_n(inputs + i / s.h * c + i % s.h * s.p, s.p, 0.0f);
    scan_call.x.data = inputs, scan_call.limit = s.edit + LIMIT * s.h;
    edited_token<float>(scan_call, states.window);
  } else {
    scan<float>(scan_call);
  }

  Gate<float> gate_call{};
  gate_call.b = rows, gate_call.t = 1, gate_call.h = s.h, gate_call.p = s.p, gate_call.groups = s.g, gate_call.eps = s.norm_eps;
  gate_call.scanned = y, gate_call.x = {mixed, c, c}, gate_call.z = {projected, width, width}, gate_call.y = y;
  gate_call.D = D, gate_call.weight = weight;
  gate<float>(gate_call, threads_for(double(rows) * d * WORK_PER_CHANNEL));
}

}  // namespace

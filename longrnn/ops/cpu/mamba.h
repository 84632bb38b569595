// What is between the projections of a Mamba-1, for one token per row; see `longrnn/cells/mamba.py`.

#pragma once
#include "channels.h"
#include "edited.h"
#include "few_rows.h"

namespace {

inline long inner_of(const Mamba<float> &s) { return s.h; }
inline long width_of(const Mamba<float> &s) { return 2 * s.h; }

// Writes n numbers, divided by their root mean square unless `eps` is negative.
inline void copy_unit(const float *from, long n, float eps, float *to) {
  const float scale = eps >= 0 ? 1 / std::sqrt(dot<float>(from, from, n) / float(n) + eps) : 1.0f;
  for (long i = 0; i < n; i++) to[i] = from[i] * scale;
}

// −exp(A_log), or that of an edit, which is finite because 0 times an infinite rate would be NaN.
inline void rates_of(const Mamba<float> &s, const float *A_log, int threads, float *rates) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long head = 0; head < s.h; head++) {
    const float power = s.edit ? float(s.edit[POWER * s.h + head]) : 1.0f;
    const float log_rate = s.edit ? float(s.edit[LOG_RATE * s.h + head]) : 0.0f;
    each<float>(head * s.n, (head + 1) * s.n, [&](auto zero, long i) {
      using V = decltype(zero);
      const V log = power * read<V>(A_log + i) + log_rate;
      write(rates + i, -exponential(log > 88.0f ? V{} + 88.0f : log));
    });
  }
}

// The heads of a window, whose inputs `token` has too: y of its last token.
inline void windowed_token(const Channels<float> &token, const Window<float> &w) {
  const long *heads = static_cast<const long *>(w.heads), n = token.n;
  Buffer<float> rates(w.count * n), log_keep(w.count), y(token.b * w.count);
  for (long i = 0; i < w.count; i++) {
    std::memcpy(rates + i * n, token.rate + heads[i] * n, n * sizeof(float));
    log_keep[i] = token.log_keep[heads[i]];
  }
  for (long row = 0; row < token.b; row++) remember<float>(as_scan<float>(token, token.step), w, row);
  WindowedChannels<float> call{};
  call.of = token, call.of.t = w.length, call.of.capacity = w.capacity, call.of.h = w.count;
  call.of.x = static_cast<const float *>(w.x.data), call.of.B = static_cast<const float *>(w.B.data);
  call.of.gain = w.gain, call.of.step = w.decay, call.of.rate = rates, call.of.log_keep = log_keep, call.of.y = y;
  call.known = w.length - 1, call.window = w.length;
  windowed_channels<float>(call);
  for (long i = 0; i < token.b * w.count; i++) token.y[i / w.count * token.h + heads[i % w.count]] = y[i];
}

inline void mix_token(const Mamba<float> &s, const States<float> &states, long rows, float *projected, float *y) {
  const long h = s.h, n = s.n, selected = s.rank + 2 * n;
  const int threads = threads_for(16.0 * h * n);
  const Wide<float> A_log(s.A_log, h * n), D(s.D, h);
  Buffer<float> x(rows * h), parts(rows * selected), delta(rows * s.rank), B(rows * n), C(rows * n), gain(rows * h),
      step(rows * h), rates(h * n), log_keep(h);
  convolve_token(states, s.conv_weight, s.conv_bias, rows, h, s.k, projected, 2 * h, x);

  project(s.x_weight, {}, rows, selected, h, x, parts);
  for (long row = 0; row < rows; row++) {
    const float *from = parts + row * selected;
    copy_unit(from, s.rank, s.select_eps, delta + row * s.rank);
    copy_unit(from + s.rank, n, s.select_eps, B + row * n);
    copy_unit(from + s.rank + n, n, s.select_eps, C + row * n);
  }
  project(s.dt_weight, s.dt_bias, rows, h, s.rank, delta, step);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long i = 0; i < rows * h; i++) {
    step[i] = softplus(step[i] + (s.edit ? float(s.edit[BIAS * h + i % h]) : 0.0f));
    gain[i] = step[i];
    if (s.edit) change_step(s.edit, h, i % h, step[i], gain[i]);
  }
  rates_of(s, A_log, threads, rates);
  for (long head = 0; s.edit && head < h; head++) log_keep[head] = float(s.edit[LOG_KEEP * h + head]);
  Channels<float> token{};
  token.b = rows, token.t = token.capacity = 1, token.h = h, token.g = 1, token.n = n;
  token.x = x, token.gain = gain, token.step = step, token.rate = rates, token.B = B, token.C = C;
  token.state = states.state, token.y = y, token.final_state = states.state_after;
  if (s.edit) token.log_keep = log_keep, token.limit = s.edit + LIMIT * h;
  if (token.final_state) {  // null if all heads have a window
    one_channel_token<float>(token);
    keep_windowed<float>(as_scan<float>(token, nullptr), states.window);
  }
  if (states.window.count) windowed_token(token, states.window);
  for (long row = 0; row < rows; row++)
    each<float>(0, h, [&](auto zero, long i) {
      using V = decltype(zero);
      float *to = y + row * h + i;
      const V whole = read<V>(to) + read<V>(D + i) * read<V>(x + row * h + i);
      write(to, whole * silu(read<V>(projected + row * 2 * h + h + i)));
    });
}

}  // namespace

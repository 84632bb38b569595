// Everything between the projections of a Mamba-2: convolution, recurrence and gated norm.

#pragma once
#include "mixed.h"
#include "parts.h"
#include "edited.h"

namespace {

// The weight of a convolution (c, k) as (k, c).
template <class T> void transpose(const T *weight, long c, long k, T *taps) {
  for (long i = 0; i < c; i++)
    for (long tap = 0; tap < k; tap++) taps[tap * c + i] = weight[i * k + tap];
}

// A call with its weights and inputs in the dtype T.
template <class T> struct Cell {
  const long b, t, h, p, g, n, k;
  const T norm_eps, dt_least, dt_largest;
  const Wide<T> projected;             // (b, t, z | x B C | dt)
  const Wide<T> conv_bias, dt_bias, D; // (c,) or null, (h,), (h,)
  const Wide<T> norm_weight, conv;     // (h p,), (b, k - 1, c)
  const Buffer<T> taps, A;             // (k, c), (h,)

  explicit Cell(const CellCall<T> &s)
      : b(s.b), t(s.t), h(s.h), p(s.p), g(s.g), n(s.n), k(s.k), norm_eps(s.norm_eps), dt_least(s.dt_least),
        dt_largest(s.dt_largest), projected(s.projected, b * t * width()), conv_bias(s.conv_bias, c()),
        dt_bias(s.dt_bias, h), D(s.D, h), norm_weight(s.norm_weight, d()), conv(s.conv, b * (k - 1) * c()),
        taps(k * c()), A(h) {
    const Wide<T> weight(s.conv_weight, c() * k), A_log(s.A_log, h);
    transpose<T>(weight, c(), k, taps);
    for (long head = 0; head < h; head++)
      A[head] = s.edit ? rate<T>(s.edit, h, head, A_log[head]) : -std::exp(A_log[head]);
  }

  long d() const { return h * p; }
  long c() const { return d() + 2 * g * n; }
  long width() const { return d() + c() + h; }
  Convolution<T> convolution(T *out, T *conv_after) const {
    return {b, t, c(), k, projected + d(), t * width(), width(), conv, taps, conv_bias, out, conv_after};
  }
  // The recurrence of the convolution's output `mixed`.
  Scan<T> recurrence(const T *mixed, const T *dt, const T *log_decay, const T *state, T *y, T *state_after) const {
    return {b, t, h, p, g, n, mixed, t * c(), c(), dt, log_decay, mixed + d(), mixed + d() + g * n, t * c(), c(),
            state, y, d(), state_after, nullptr};
  }
};

// dt (b, t, h) and dt A. `slope`, where there is one: the derivative of dt by its projection.
template <class T> void steps(const Cell<T> &s, T *dt, T *log_decay, T *slope) {
  for (long token = 0; token < s.b * s.t; token++)
    for (long head = 0; head < s.h; head++) {
      const long at = token * s.h + head;
      const T raw = s.projected[token * s.width() + s.d() + s.c() + head] + s.dt_bias[head];
      const T step = softplus<T>(raw);
      // Comparisons keep a NaN.
      const T limited = step < s.dt_least ? s.dt_least : step > s.dt_largest ? s.dt_largest : step;
      dt[at] = limited;
      log_decay[at] = limited * s.A[head];
      if (slope) slope[at] = limited != step ? T(0) : raw > T(20) ? T(1) : T(1) / (T(1) + std::exp(-raw));
    }
}

// `window` is read where there is an edit, which one token per row may have.
template <class T> int cell(const CellCall<T> &call, const Window<T> *window) {
  const Cell<T> s(call);
  const long tokens = s.b * s.t;
  const int threads = threads_for(double(tokens) * s.d() * WORK_PER_CHANNEL);
  Buffer<T> mixed(tokens * s.c()), dt(tokens * s.h), log_decay(tokens * s.h);
  Narrowed<T> y(call.y, tokens * s.d()), conv_after(call.conv_after, s.b * (s.k - 1) * s.c());
  const Convolution<T> convolution = s.convolution(mixed, conv_after);
  convolve<T>(convolution, threads);
  keep_inputs<T>(convolution);
  steps<T>(s, dt, log_decay, nullptr);
  T *scanned = call.scanned ? call.scanned : static_cast<T *>(y);
  const Scan<T> recurrence = s.recurrence(mixed, dt, log_decay, call.state, scanned, call.state_after);
  if (call.edit) {
    edit_steps<T>(call.edit, tokens, s.h, s.A, dt, log_decay);
    edited_token<T>(recurrence, call.edit, *window);
  } else {
    scan<T>(recurrence);
  }
  gate<T>({tokens, s.h, s.p, s.g, s.norm_eps, scanned, mixed, s.projected, s.c(), s.width(), s.D, s.norm_weight, y},
          threads);
  return 1;
}
template <class T> int cell(const CellCall<T> &call) { return cell<T>(call, nullptr); }

}  // namespace

// Everything between the projections of a Mamba-2: convolution, recurrence and gated norm.

#pragma once
#include "mixed.h"
#include "parts.h"
#include "edited.h"

namespace {

template <class T> struct Cell {
  long b, t, h, p, g, n, k;
  T norm_eps, dt_least, dt_largest;
  const T *projected;               // (b, t, z | x B C | dt)
  const T *conv_weight, *conv_bias; // (k, c), (c,) or null
  const T *dt_bias, *A, *D;         // (h,)
  const T *norm_weight;             // (h p,)
  const T *conv, *state;            // (b, k - 1, c), (b, h, p, n)
  T *y, *conv_after, *state_after;  // (b, t, h p), …
  T *scanned, *kept;
  long segment;
  const double *edit;

  long d() const { return h * p; }
  long c() const { return d() + 2 * g * n; }
  long width() const { return d() + c() + h; }
  Convolution<T> convolution(T *out) const {
    return {b, t, c(), k, projected + d(), t * width(), width(), conv, conv_weight, conv_bias, out, conv_after};
  }
  Gate<T> gate(const T *scanned, const T *mixed) const {
    return {b * t, h, p, g, norm_eps, scanned, mixed, projected, c(), width(), D, norm_weight, y};
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

// The recurrence of the convolution's output `mixed`.
template <class T> Scan<T> scan_of(const Cell<T> &s, const T *mixed, const T *dt, const T *log_decay, T *y) {
  const long c = s.c(), d = s.d();
  return {s.b, s.t, s.h, s.p, s.g, s.n, mixed, s.t * c, c, dt, log_decay, mixed + d, mixed + d + s.g * s.n,
          s.t * c, c, s.state, y, d, s.state_after, s.kept, s.segment};
}

template <class T> void cell_between(const Cell<T> &s, const Window<T> *window) {
  const long tokens = s.b * s.t;
  const int threads = threads_for(double(tokens) * s.d() * WORK_PER_CHANNEL);
  Buffer<T> mixed(tokens * s.c()), dt(tokens * s.h), log_decay(tokens * s.h);
  const Convolution<T> convolution = s.convolution(mixed);
  convolve<T>(convolution, threads);
  keep_inputs<T>(convolution);
  steps<T>(s, dt, log_decay, nullptr);
  T *scanned = s.scanned ? s.scanned : s.y;
  const Scan<T> recurrence = scan_of<T>(s, mixed, dt, log_decay, scanned);
  if (s.edit) {
    edit_steps<T>(s.edit, tokens, s.h, s.A, dt, log_decay);
    edited_token<T>(recurrence, s.edit, *window);
  } else {
    scan<T>(recurrence);
  }
  gate<T>(s.gate(scanned, mixed), threads);
}

// taps (k, c) = weight (c, k)ᵀ
template <class T> void read_taps(const T *weight, long c, long k, T *taps) {
  for (long i = 0; i < c; i++)
    for (long tap = 0; tap < k; tap++) taps[tap * c + i] = weight[i * k + tap];
}

// `window` is read where there is an edit, which one token per row may have.
template <class T> int cell(const CellCall<T> &s, const Window<T> *window) {
  const long d = s.h * s.p, c = d + 2 * s.g * s.n, tokens = s.b * s.t, kept = s.b * (s.k - 1) * c;
  const Wide<T> projected(s.projected, tokens * (d + c + s.h)), conv(s.conv, kept);
  const Wide<T> weight(s.conv_weight, c * s.k), conv_bias(s.conv_bias, c), norm_weight(s.norm_weight, d);
  const Wide<T> dt_bias(s.dt_bias, s.h), A_log(s.A_log, s.h), D(s.D, s.h);
  Narrowed<T> y(s.y, tokens * d), conv_after(s.conv_after, kept);
  Buffer<T> taps(s.k * c), A(s.h);
  read_taps<T>(weight, c, s.k, taps);
  for (long head = 0; head < s.h; head++)
    A[head] = s.edit ? rate<T>(s.edit, s.h, head, A_log[head]) : -std::exp(A_log[head]);
  cell_between<T>({s.b, s.t, s.h, s.p, s.g, s.n, s.k, s.norm_eps, s.dt_least, s.dt_largest, projected,
                   taps, conv_bias, dt_bias, A, D, norm_weight, conv, s.state, y, conv_after, s.state_after, s.scanned,
                   s.kept, s.segment, s.edit}, window);
  return 1;
}
template <class T> int cell(const CellCall<T> &s) { return cell<T>(s, nullptr); }

}  // namespace

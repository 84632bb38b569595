// Everything between the projections of a Mamba-2: convolution, recurrence and gated norm.

#pragma once
#include "mixed.h"
#include "scan.h"

namespace {

template <class T> struct Given {  // the arguments of a cell
  long b, t, h, p, g, n, k, norm_groups;
  T norm_eps, dt_least, dt_largest;
  const T *state;                   // (b, h, p, n)
  T *state_after;
  Mixed projected;                  // (b, t, z | x B C | dt)
  Mixed conv_weight, conv_bias;     // (c, k), (c,) or null
  Mixed dt_bias, A_log, D;          // (h,)
  Mixed norm_weight;                // (h p,)
  Mixed conv, conv_after;           // (b, k - 1, c)
  Mixed y;                          // (b, t, h p)
  T *scanned;                       // (b, t, h p), or null: for the gradient, the output of the recurrence
  T *kept;                          // or null: see Scan
  long segment;
};

template <class T> struct Cell {
  long b, t, h, p, g, n, k, norm_groups;
  T norm_eps, dt_least, dt_largest;
  const T *projected;               // (b, t, z | x B C | dt)
  const T *conv_weight, *conv_bias; // (k, c), (c,) or null
  const T *dt_bias, *A, *D;         // (h,)
  const T *norm_weight;             // (h p,)
  const T *conv, *state;            // (b, k - 1, c), (b, h, p, n)
  T *y, *conv_after, *state_after;  // (b, t, h p), …
  T *scanned, *kept;
  long segment;

  long d() const { return h * p; }
  long c() const { return d() + 2 * g * n; }
  long width() const { return d() + c() + h; }
  // The input of the convolution `at` tokens after the first of a row; those before it are in `conv`.
  const T *input(long row, long at) const {
    return at < 0 ? conv + (row * (k - 1) + at + k - 1) * c() : projected + (row * t + at) * width() + d();
  }
};

// out (b, t, c) = silu(convolution of x B C over time), continuing `conv`.
template <class T> void convolve(const Cell<T> &s, T *out, int threads) {
  constexpr int W = Lane<T>::W;
  const long c = s.c();
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
  for (long row = 0; row < s.b; row++)
    for (long i = 0; i < s.t; i++) {
      T *to = out + (row * s.t + i) * c;
      const T *from[16];
      for (long tap = 0; tap < s.k; tap++) from[tap] = s.input(row, i + tap - (s.k - 1));
      long j = 0;
      for (; j + W <= c; j += W) {
        Vec<T> sum = s.conv_bias ? load<T>(s.conv_bias + j) : Vec<T>{};
        for (long tap = 0; tap < s.k; tap++) sum += load<T>(s.conv_weight + tap * c + j) * load<T>(from[tap] + j);
        store<T>(to + j, silu<T>(sum));
      }
      for (; j < c; j++) {
        T sum = s.conv_bias ? s.conv_bias[j] : T(0);
        for (long tap = 0; tap < s.k; tap++) sum += s.conv_weight[tap * c + j] * from[tap][j];
        to[j] = sum / (T(1) + std::exp(-sum));
      }
    }
}

// conv_after: the last inputs of the convolution.
template <class T> void keep_inputs(const Cell<T> &s) {
  const long c = s.c(), taps = s.k - 1;
  for (long row = 0; row < s.b; row++)
    for (long tap = 0; tap < taps; tap++)
      std::memcpy(s.conv_after + (row * taps + tap) * c, s.input(row, s.t + tap - taps), c * sizeof(T));
}

// y = norm((scanned + D x) silu(z)) weight; y may be `scanned`.
template <class T> void gate(const Cell<T> &s, const T *scanned, const T *mixed, int threads) {
  constexpr int W = Lane<T>::W;
  const long d = s.d(), size = d / s.norm_groups;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long token = 0; token < s.b * s.t; token++) {
    T *y = s.y + token * d;
    const T *x = mixed + token * s.c(), *z = s.projected + token * s.width(), *from = scanned + token * d;
    for (long head = 0; head < s.h; head++)
      for (long i = head * s.p; i < head * s.p + s.p; i++) y[i] = from[i] + s.D[head] * x[i];
    for (long group = 0; group < s.norm_groups; group++) {
      const long first = group * size, last = first + size;
      Vec<T> squares{};
      T square = 0;
      long i = first;
      for (; i + W <= last; i += W) {
        const Vec<T> gated = load<T>(y + i) * silu<T>(load<T>(z + i));
        store<T>(y + i, gated);
        squares += gated * gated;
      }
      for (int k = 0; k < W; k++) square += squares[k];
      for (; i < last; i++) {
        y[i] *= z[i] / (T(1) + std::exp(-z[i]));
        square += y[i] * y[i];
      }
      const T scale = T(1) / std::sqrt(square / T(size) + s.norm_eps);
      for (i = first; i < last; i++) y[i] = y[i] * scale * s.norm_weight[i];
    }
  }
}

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
          s.t * c, c, s.state, y, s.state_after, s.kept, s.segment};
}

template <class T> void cell_between(const Cell<T> &s) {
  const long tokens = s.b * s.t;
  const int threads = threads_for(double(tokens) * s.d() * 32);
  Buffer<T> mixed(tokens * s.c()), dt(tokens * s.h), log_decay(tokens * s.h);
  convolve<T>(s, mixed, threads);
  keep_inputs<T>(s);
  steps<T>(s, dt, log_decay, nullptr);
  T *scanned = s.scanned ? s.scanned : s.y;
  scan<T>(scan_of<T>(s, mixed, dt, log_decay, scanned));
  gate<T>(s, scanned, mixed, threads);
}

template <class T> bool all_finite(const T *from, long n) {  // 0 times what is not finite is NaN
  constexpr int W = Lane<T>::W;
  Vec<T> sums{};
  T sum = 0;
  long i = 0;
  for (; i + W <= n; i += W) sums += load<T>(from + i) * T(0);
  for (; i < n; i++) sum += from[i] * T(0);
  for (int k = 0; k < W; k++) sum += sums[k];
  return sum == T(0);
}

// taps (k, c) = weight (c, k)ᵀ
template <class T> void read_taps(const T *weight, long c, long k, T *taps) {
  for (long i = 0; i < c; i++)
    for (long tap = 0; tap < k; tap++) taps[tap * c + i] = weight[i * k + tap];
}

// Returns whether every entry of y is finite.
template <class T> int cell(const Given<T> &s) {
  const long d = s.h * s.p, c = d + 2 * s.g * s.n, tokens = s.b * s.t, kept = s.b * (s.k - 1) * c;
  const Wide<T> projected(s.projected, tokens * (d + c + s.h)), conv(s.conv, kept);
  const Wide<T> weight(s.conv_weight, c * s.k), conv_bias(s.conv_bias, c), norm_weight(s.norm_weight, d);
  const Wide<T> dt_bias(s.dt_bias, s.h), A_log(s.A_log, s.h), D(s.D, s.h);
  Narrowed<T> y(s.y, tokens * d), conv_after(s.conv_after, kept);
  Buffer<T> taps(s.k * c), A(s.h);
  read_taps<T>(weight, c, s.k, taps);
  for (long head = 0; head < s.h; head++) A[head] = -std::exp(A_log[head]);
  cell_between<T>({s.b, s.t, s.h, s.p, s.g, s.n, s.k, s.norm_groups, s.norm_eps, s.dt_least, s.dt_largest, projected,
                   taps, conv_bias, dt_bias, A, D, norm_weight, conv, s.state, y, conv_after, s.state_after, s.scanned,
                   s.kept, s.segment});
  return all_finite<T>(y, tokens * d);
}

}  // namespace

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
};

// out (b, t, c) = silu(convolution of x B C over time), continuing `conv`.
template <class T> void convolve(const Cell<T> &s, long c, long width, long offset, T *out, int threads) {
  constexpr int W = Lane<T>::W;
  const long taps = s.k - 1;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
  for (long row = 0; row < s.b; row++)
    for (long i = 0; i < s.t; i++) {
      T *to = out + (row * s.t + i) * c;
      const T *from[16];
      for (long tap = 0; tap < s.k; tap++) {
        const long at = i + tap - taps;
        from[tap] = at < 0 ? s.conv + (row * taps + at + taps) * c
                           : s.projected + (row * s.t + at) * width + offset;
      }
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
  for (long row = 0; row < s.b; row++)
    for (long tap = 0; tap < taps; tap++) {
      const long at = s.t + tap - taps;
      const T *from = at < 0 ? s.conv + (row * taps + at + taps) * c
                             : s.projected + (row * s.t + at) * width + offset;
      std::memcpy(s.conv_after + (row * taps + tap) * c, from, c * sizeof(T));
    }
}

// y ← norm((y + D x) silu(z)) weight, in place.
template <class T> void gate(const Cell<T> &s, long c, long width, const T *mixed, int threads) {
  constexpr int W = Lane<T>::W;
  const long d = s.h * s.p, size = d / s.norm_groups;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long token = 0; token < s.b * s.t; token++) {
    T *y = s.y + token * d;
    const T *x = mixed + token * c, *z = s.projected + token * width;
    for (long head = 0; head < s.h; head++)
      for (long i = head * s.p; i < head * s.p + s.p; i++) y[i] += s.D[head] * x[i];
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

template <class T> void cell_between(const Cell<T> &s) {
  const long d = s.h * s.p, c = d + 2 * s.g * s.n, width = d + c + s.h, tokens = s.b * s.t;
  const int threads = threads_for(double(tokens) * d * 32);
  Buffer<T> mixed(tokens * c), dt(tokens * s.h), log_decay(tokens * s.h);
  convolve<T>(s, c, width, d, mixed, threads);
  for (long token = 0; token < tokens; token++)
    for (long head = 0; head < s.h; head++) {
      const T step = softplus<T>(s.projected[token * width + d + c + head] + s.dt_bias[head]);
      // Comparisons keep a NaN.
      const T limited = step < s.dt_least ? s.dt_least : step > s.dt_largest ? s.dt_largest : step;
      dt[token * s.h + head] = limited;
      log_decay[token * s.h + head] = limited * s.A[head];
    }
  scan<T>({s.b, s.t, s.h, s.p, s.g, s.n, mixed, s.t * c, c, dt, log_decay, mixed + d, mixed + d + s.g * s.n,
           s.t * c, c, s.state, s.y, s.state_after});
  gate<T>(s, c, width, mixed, threads);
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

// Returns whether every entry of y is finite.
template <class T> int cell(const Given<T> &s) {
  const long d = s.h * s.p, c = d + 2 * s.g * s.n, tokens = s.b * s.t, kept = s.b * (s.k - 1) * c;
  const Wide<T> projected(s.projected, tokens * (d + c + s.h)), conv(s.conv, kept);
  const Wide<T> weight(s.conv_weight, c * s.k), conv_bias(s.conv_bias, c), norm_weight(s.norm_weight, d);
  const Wide<T> dt_bias(s.dt_bias, s.h), A_log(s.A_log, s.h), D(s.D, s.h);
  Narrowed<T> y(s.y, tokens * d), conv_after(s.conv_after, kept);
  Buffer<T> taps(s.k * c), A(s.h);
  for (long i = 0; i < c; i++)
    for (long tap = 0; tap < s.k; tap++) taps[tap * c + i] = weight[i * s.k + tap];
  for (long head = 0; head < s.h; head++) A[head] = -std::exp(A_log[head]);
  cell_between<T>({s.b, s.t, s.h, s.p, s.g, s.n, s.k, s.norm_groups, s.norm_eps, s.dt_least, s.dt_largest, projected,
                   taps, conv_bias, dt_bias, A, D, norm_weight, conv, s.state, y, conv_after, s.state_after});
  return all_finite<T>(y, tokens * d);
}

}  // namespace

// What is before and after the recurrence of a Mamba-2: the convolution of its inputs with its activation,
// and the gated norm of its output. The cell computes them together with the recurrence; a layer whose
// recurrence is edited calls them alone.

#pragma once
#include "signatures.h"
#include "simd.h"

namespace {

// The input `at` tokens after the first of a row.
template <class T> inline const T *input_of(const Convolution<T> &s, long row, long at) {
  return at < 0 ? s.state + (row * (s.k - 1) + at + s.k - 1) * s.c : s.x.at(row, at);
}

// y = silu(convolution of x over time)
template <class T> void convolve(const Convolution<T> &s, int threads) {
  const long c = s.c;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
  for (long row = 0; row < s.b; row++)
    for (long i = 0; i < s.t; i++) {
      T *to = s.y + (row * s.t + i) * c;
      const T *from[MAX_TAPS];
      for (long tap = 0; tap < s.k; tap++) from[tap] = input_of(s, row, i + tap - (s.k - 1));
      each<T>(0, c, [&](auto zero, long j) {
        using V = decltype(zero);
        V sum = s.bias ? read<V>(s.bias + j) : zero;
        for (long tap = 0; tap < s.k; tap++) sum += read<V>(s.weight + tap * c + j) * read<V>(from[tap] + j);
        write(to + j, silu(sum));
      });
    }
}

template <class T> void keep_inputs(const Convolution<T> &s) {
  const long taps = s.k - 1;
  for (long row = 0; row < s.b; row++)
    for (long tap = 0; tap < taps; tap++)
      std::memcpy(s.final_state + (row * taps + tap) * s.c, input_of(s, row, s.t + tap - taps), s.c * sizeof(T));
}

// y = norm((scanned + D x) silu(z)) weight
template <class T> void gate(const Gate<T> &s, int threads) {
  const long d = s.h * s.p, size = d / s.groups;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long token = 0; token < s.b * s.t; token++) {
    T *y = s.y + token * d;
    const T *x = s.x.at(token / s.t, token % s.t), *z = s.z.at(token / s.t, token % s.t), *from = s.scanned + token * d;
    for (long head = 0; head < s.h; head++)
      for (long i = head * s.p; i < head * s.p + s.p; i++) y[i] = from[i] + s.D[head] * x[i];
    for (long group = 0; group < s.groups; group++) {
      const long first = group * size, last = first + size;
      Sum<T> squares;
      each<T>(first, last, [&](auto zero, long i) {
        using V = decltype(zero);
        const V gated = read<V>(y + i) * silu(read<V>(z + i));
        write(y + i, gated);
        squares.add(gated * gated);
      });
      const T scale = T(1) / std::sqrt(squares.total() / T(size) + s.eps);
      for (long i = first; i < last; i++) y[i] = y[i] * scale * s.weight[i];
    }
  }
}

// Work of a token in both, in units of multiplications, per channel.
constexpr double WORK_PER_CHANNEL = 32;

template <class T> void convolution(const Convolution<T> &s) {
  convolve<T>(s, threads_for(double(s.b) * s.t * s.c * WORK_PER_CHANNEL));
  keep_inputs<T>(s);
}
template <class T> void gated_norm(const Gate<T> &s) {
  gate<T>(s, threads_for(double(s.b) * s.t * s.h * s.p * WORK_PER_CHANNEL));
}

}  // namespace

// Recurrences with decays per key, one token after another: log_decay is (b, t, h, n).
//
// Notable choices:
// - A task is some heads of one row over all tokens, so that their states stay in the cache nearest to the
//   processor, and the decays, which are most of what is read, are read in order.
// - A decay is 0 or 1 plus a remainder: see `tiles.h`.

#pragma once
#include "scan.h"

namespace {

constexpr double FLOOR = -80;  // exp of a smaller number counts as 0

// exp(x) = whole + rest.
inline void split_decay(Vec<float> x, Vec<float> &whole, Vec<float> &rest) {
  Integers exponent;
  const Vec<float> near_one = exponential_rest(x, exponent);
  const Vec<float> all = x < float(FLOOR) ? Vec<float>{} : exponential_of(near_one, exponent);
  whole = exponent == 0 ? Vec<float>{} + 1.0f : Vec<float>{};
  rest = exponent == 0 ? near_one : all;
}
inline void split_decay(Vec<double> x, Vec<double> &whole, Vec<double> &rest) {
  for (int i = 0; i < Lane<double>::W; i++) {
    whole[i] = x[i] > -0.34 ? 1 : 0;
    rest[i] = x[i] > -0.34 ? std::expm1(x[i]) : std::exp(x[i]);
  }
}

// One token of one head: its p channels are state ← decay ∘ state + gain (x − erased) B, where the delta
// rule erases what the decayed state has for the key B; y is the product with C.
template <class T, bool DELTA>
inline void one_key_token(long p, long n, const T *x, T gain, const T *log_decay, const T *B, const T *C, T *state,
                          T *y, T *whole, T *rest, T *decayed) {
  constexpr int W = Lane<T>::W;
  const bool again = DELTA || p > 1;  // decays are read more than once
  const auto split = [&](long j, Vec<T> &of_old, Vec<T> &other) {
    Vec<T> x{};
    if (j + W <= n) x = load<T>(log_decay + j);
    else std::memcpy(&x, log_decay + j, (n - j) * sizeof(T));
    split_decay(x, of_old, other);
  };
  for (long j = 0; again && j < n; j += W) {
    Vec<T> of_old{}, other{}, key{};
    split(j, of_old, other);
    store<T>(whole + j, of_old);
    store<T>(rest + j, other);
    if (!DELTA) continue;
    std::memcpy(&key, B + j, std::min<long>(W, n - j) * sizeof(T));
    store<T>(decayed + j, (of_old + other) * key);
  }
  for (long c = 0; c < p; c++, state += n) {
    const T add = gain * (x[c] - (DELTA ? dot<T>(state, decayed, n) : T(0)));
    Vec<T> sums{}, of_old{}, other{};
    long j = 0;
    for (; j + W <= n; j += W) {
      if (again) of_old = load<T>(whole + j), other = load<T>(rest + j);
      else split(j, of_old, other);
      const Vec<T> old = load<T>(state + j);
      const Vec<T> now = of_old * old + (other * old + add * load<T>(B + j));
      store<T>(state + j, now);
      sums += now * load<T>(C + j);
    }
    T sum = lane_sum<T>(sums);
    if (j < n && !again) split(j, of_old, other);
    for (long i = 0; j < n; i++, j++) {
      const T first = again ? whole[j] : of_old[i], second = again ? rest[j] : other[i];
      state[j] = first * state[j] + (second * state[j] + add * B[j]);
      sum += state[j] * C[j];
    }
    y[c] = sum;
  }
}

template <class T> struct KeyWork {  // of one thread
  Buffer<T> whole, rest, decayed;
  explicit KeyWork(long n) : whole(padded<T>(n)), rest(padded<T>(n)), decayed(padded<T>(n)) {}
};

template <class T, bool DELTA> int with_key_decays(const Scan<T> &s) {
  const long size = s.p * s.n, r = s.h / s.g;
  const int threads = threads_for(double(s.b) * s.t * s.h * size);
  const long most = std::max(1L, long(16384 / (size * sizeof(T))));
  const long each = std::min(most, std::max(1L, s.b * s.h / threads)), parts = (s.h + each - 1) / each;
  PerThread<KeyWork<T>> works(threads, s.n);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long task = 0; task < s.b * parts; task++) {
    KeyWork<T> &w = works.mine();
    const long row = task / parts, first = task % parts * each, last = std::min(s.h, first + each);
    const long states = (row * s.h + first) * size;
    std::memcpy(s.final_state + states, s.state + states, (last - first) * size * sizeof(T));
    for (long i = 0; i < s.t; i++)
      for (long head = first, group = first / r, next = group * r + r; head < last; head++) {
        if (head == next) group++, next += r;
        const long at = (row * s.t + i) * s.h + head, bc = row * s.bc_row + i * s.bc_token + group * s.n;
        const T *x = s.x + row * s.x_row + i * s.x_token + head * s.p, *B = s.B + bc, *C = s.C + bc;
        T *state = s.final_state + (row * s.h + head) * size, *y = output_of(s, row, head, i);
        one_key_token<T, DELTA>(s.p, s.n, x, s.gain[at], s.log_decay + at * s.n, B, C, state, y, w.whole, w.rest,
                                w.decayed);
      }
  }
  return 1;
}

template <class T> int key_scan(const Scan<T> &s) { return with_key_decays<T, false>(s); }
template <class T> int key_delta(const Scan<T> &s) { return with_key_decays<T, true>(s); }

}  // namespace

// Recurrences one token after another: with decays per key, where log_decay is (b, t, h, n), and with limits of
// norms; see `longrnn/ops/scan/limit.py`.
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

// The decays of one token and, for the delta rule, these times the key B.
template <class T> struct KeyDecays {
  Buffer<T> whole, rest, decayed;
  explicit KeyDecays(long n) : whole(padded<T>(n)), rest(padded<T>(n)), decayed(padded<T>(n)) {}
  // `log_decay` is one number, or one per key; B is null if nothing is erased.
  void read(long n, const T *log_decay, bool per_key, const T *B) {
    constexpr int W = Lane<T>::W;
    for (long j = 0; j < n; j += W) {
      Vec<T> log{}, whole_part, rest_part;
      if (!per_key) log += log_decay[0];
      else if (j + W <= n) log = load<T>(log_decay + j);
      else std::memcpy(&log, log_decay + j, (n - j) * sizeof(T));
      split_decay(log, whole_part, rest_part);
      store<T>(whole + j, whole_part);
      store<T>(rest + j, rest_part);
    }
    for (long j = 0; B && j < n; j++) decayed[j] = (whole[j] + rest[j]) * B[j];
  }
};

// Calls `body(count, channel)` for 4 channels at once, whose sums the processor computes side by side, then for
// single ones.
template <class Body> inline void each_channels(long p, Body body) {
  long c = 0;
  for (; c + 4 <= p; c += 4) body(std::integral_constant<int, 4>{}, c);
  for (; c < p; c++) body(std::integral_constant<int, 1>{}, c);
}

// One token of one head: its p channels are after = decay ∘ before + gain (x − erased) B, where the delta rule
// erases what the decayed state has for the key B; y is the product with C, and `missing` is x − erased.
template <class T, bool DELTA>
inline void one_key_token(long p, long n, const T *x, T gain, const KeyDecays<T> &d, const T *B, const T *C,
                          const T *before, T *after, T *y, T *missing) {
  each_channels(p, [&](auto count, long first) {
    const T *from = before + first * n;
    T *to = after + first * n, add[count];
    Sum<T> erased[count], sums[count];
    if constexpr (DELTA)
      each<T>(0, n, [&](auto zero, long j) {
        using V = decltype(zero);
        for (int c = 0; c < count; c++) erased[c].add(read<V>(from + c * n + j) * read<V>(d.decayed + j));
      });
    for (int c = 0; c < count; c++) {
      missing[first + c] = x[first + c] - erased[c].total();
      add[c] = gain * missing[first + c];
    }
    each<T>(0, n, [&](auto zero, long j) {
      using V = decltype(zero);
      const V whole = read<V>(d.whole + j), rest = read<V>(d.rest + j), key = read<V>(B + j), query = read<V>(C + j);
      for (int c = 0; c < count; c++) {
        const V old = read<V>(from + c * n + j);
        const V now = whole * old + (rest * old + add[c] * key);
        write(to + c * n + j, now);
        sums[c].add(now * query);
      }
    });
    for (int c = 0; c < count; c++) y[first + c] = sums[c].total();
  });
}

template <class T> struct KeyWork {  // of one thread
  KeyDecays<T> decays;
  Buffer<T> missing;
  KeyWork(long n, long p) : decays(n), missing(p) {}
};

template <class T, bool DELTA> int by_tokens(const Scan<T> &s, bool per_key) {
  const long size = s.p * s.n, r = s.h / s.g;
  const int threads = threads_for(double(s.b) * s.t * s.h * size);
  const long most = std::max(1L, long(16384 / (size * sizeof(T))));
  const long each = std::min(most, std::max(1L, s.b * s.h / threads)), parts = (s.h + each - 1) / each;
  PerThread<KeyWork<T>> works(threads, s.n, s.p);
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
        w.decays.read(s.n, s.log_decay + at * (per_key ? s.n : 1), per_key, DELTA ? B : nullptr);
        one_key_token<T, DELTA>(s.p, s.n, x, s.gain[at], w.decays, B, C, state, state, y, w.missing);
        const double limit = s.limit ? s.limit[i * s.limit_token + head] : INFINITY;
        if (limit < INFINITY) rescale<T>(state, size, y, s.p, limit);
      }
  }
  return 1;
}

template <class T> int key_scan(const Scan<T> &s) { return by_tokens<T, false>(s, true); }
template <class T> int key_delta(const Scan<T> &s) { return by_tokens<T, true>(s, true); }
template <class T> int limited_delta(const Scan<T> &s) { return by_tokens<T, true>(s, false); }

}  // namespace

// Recurrences one token after another: few tokens, decays per key, and limits of norms; see
// `longrnn/ops/scan/limit.py`.
//
// Notable choices:
// - A task is some heads of one row over all tokens, so that their states stay in the cache nearest to the
//   processor, and the decays, which are most of what is read, are read in order.
// - A decay is 0 or 1 plus a remainder: see `tiles.h`.

#pragma once
#include "tiles.h"

namespace {

constexpr double FLOOR = -80;  // exp of a smaller number counts as 0
// States of so many bytes are driven out of the caches before the next token reads them, because the
// weights of a layer with such a state are larger; chosen by measurement.
constexpr long STREAMED_BYTES = 1 << 19;
// Bytes of the states of one task, which stay in the first cache.
constexpr long TASK_BYTES = 16384;

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

template <class T> struct Token {  // of one head
  const T *x, *B, *C, *log_decay;
  T gain;
  long at;  // index of the gain
  Token(const Scan<T> &s, long row, long head, long i) : at((row * s.t + i) * s.h + head) {
    const long group = s.g == 1 ? 0 : s.g == s.h ? head : head / (s.h / s.g);  // a division takes long
    x = s.x.at(row, i) + head * s.p;
    B = s.B.at(row, i) + group * s.n;
    C = s.C.at(row, i) + group * s.n;
    log_decay = s.log_decay + at * s.decays;
    gain = s.gain[at];
  }
};

// The decays of one token and, for the delta rule, these times the key B.
template <class T> struct TokenDecays {
  Buffer<T> whole, rest, decayed;
  explicit TokenDecays(long n) : whole(padded<T>(n)), rest(padded<T>(n)), decayed(padded<T>(n)) {}
  void read(const Scan<T> &s, const Token<T> &token, bool erases) {
    constexpr int W = Lane<T>::W;
    Vec<T> log{}, whole_part, rest_part;
    if (s.decays == 1) split_decay(log + token.log_decay[0], whole_part, rest_part);
    for (long j = 0; j < s.n; j += W) {
      if (s.decays > 1) {
        if (j + W <= s.n) log = load<T>(token.log_decay + j);
        else std::memcpy(&log, token.log_decay + j, (s.n - j) * sizeof(T));
        split_decay(log, whole_part, rest_part);
      }
      store<T>(whole + j, whole_part);
      store<T>(rest + j, rest_part);
    }
    for (long j = 0; erases && j < s.n; j++) decayed[j] = (whole[j] + rest[j]) * token.B[j];
  }
};

// Calls `body(count, channel)` for 4 channels at once, whose sums the processor computes side by side, then for
// single ones.
template <class Body> inline void each_channels(long p, Body body) {
  long c = 0;
  for (; c + 4 <= p; c += 4) body(std::integral_constant<int, 4>{}, c);
  for (; c < p; c++) body(std::integral_constant<int, 1>{}, c);
}

// p channels of a head before and after a token, which may be the same; y, and x − erased.
template <class T> struct Head {
  long p, n;
  const T *before;
  T *after, *y, *missing;
};

// What a token computes besides the state and y.
enum Also { NOTHING, NORM, PAST_CACHES };

// One token of one head: after = decay ∘ before + gain (x − erased) B, where the delta rule erases what the
// decayed state has for the key B; y = after C. With `NORM` it returns the sum of the squares of the state. With
// `PAST_CACHES`, `after` is aligned and n a multiple of the width of vectors.
template <class T, bool DELTA, Also ALSO = NOTHING>
inline T advance_token(const Token<T> &token, const TokenDecays<T> &d, const Head<T> &m) {
  Sum<T> squares;
  const long n = m.n;
  each_channels(m.p, [&](auto count, long first) {
    const T *from = m.before + first * n;
    T *to = m.after + first * n, add[count];
    Sum<T> erased[count], sums[count];
    if constexpr (DELTA)
      each<T>(0, n, [&](auto zero, long j) {
        using V = decltype(zero);
        for (int c = 0; c < count; c++) erased[c].add(read<V>(from + c * n + j) * read<V>(d.decayed + j));
      });
    for (int c = 0; c < count; c++) {
      m.missing[first + c] = DELTA ? token.x[first + c] - erased[c].total() : token.x[first + c];
      add[c] = token.gain * m.missing[first + c];
    }
    each<T>(0, n, [&](auto zero, long j) {
      using V = decltype(zero);
      const V whole = read<V>(d.whole + j), rest = read<V>(d.rest + j);
      const V key = read<V>(token.B + j), query = read<V>(token.C + j);
      for (int c = 0; c < count; c++) {
        const V old = read<V>(from + c * n + j);
        const V now = whole * old + (rest * old + add[c] * key);
        if constexpr (ALSO == PAST_CACHES && sizeof(V) > sizeof(T)) stream<T>(to + c * n + j, now);
        else write(to + c * n + j, now);
        sums[c].add(now * query);
        if constexpr (ALSO == NORM) squares.add(now * now);
      }
    });
    for (int c = 0; c < count; c++) m.y[first + c] = sums[c].total();
  });
  return ALSO == NORM ? squares.total() : T(0);
}

template <class T> struct TokenWork {  // of one thread
  TokenDecays<T> decays;
  Buffer<T> missing, states;
  TokenWork(long p, long n, long states) : decays(n), missing(p), states(states) {}
};

// Whether the states of one token are written past the caches.
template <class T> bool streams(const Scan<T> &s) {
  return s.t == 1 && s.final_state && s.b * s.h * s.p * s.n * long(sizeof(T)) >= STREAMED_BYTES &&
         s.n % Lane<T>::W == 0 && reinterpret_cast<uintptr_t>(s.final_state) % BYTES == 0;
}

// One token of a head, whose norm may have a limit.
template <class T, bool DELTA>
void token_of_head(const Scan<T> &s, TokenWork<T> &w, const Token<T> &token, const Head<T> &head, double limit,
                   bool past_caches) {
  w.decays.read(s, token, DELTA);
  if (limit < INFINITY) {
    const T square = advance_token<T, DELTA, NORM>(token, w.decays, head);
    rescale<T>(head.after, s.p * s.n, head.y, s.p, limit, square);
  } else if (!DELTA && past_caches) {
    advance_token<T, false, PAST_CACHES>(token, w.decays, head);
  } else {
    advance_token<T, DELTA>(token, w.decays, head);
  }
}

template <class T, bool DELTA> void by_tokens(const Scan<T> &s) {
  const long size = s.p * s.n;
  const int threads = threads_for(double(s.b) * s.t * s.h * size);
  const long most = std::max(1L, TASK_BYTES / (size * long(sizeof(T))));
  const long heads = std::min(most, std::max(1L, s.b * s.h / threads)), parts = (s.h + heads - 1) / heads;
  const bool past_caches = streams<T>(s);
  PerThread<TokenWork<T>> works(threads, s.p, s.n, s.final_state ? 0 : heads * size);
#pragma omp parallel num_threads(threads)
  {
    TokenWork<T> &w = works.mine();
#pragma omp for schedule(static)
    for (long task = 0; task < s.b * parts; task++) {
      const long row = task / parts, first = task % parts * heads, last = std::min(s.h, first + heads);
      const long at = (row * s.h + first) * size;
      T *after = s.final_state ? s.final_state + at : w.states;
      if (!s.state) std::fill(after, after + (last - first) * size, T(0));
      for (long i = 0; i < s.t; i++)
        for (long head = first; head < last; head++) {
          T *to = after + (head - first) * size;
          const T *from = i || !s.state ? to : s.state + at + (head - first) * size;
          const double limit = s.limit ? s.limit[i * s.limit_token + head] : INFINITY;
          token_of_head<T, DELTA>(s, w, Token<T>(s, row, head, i),
                                  {s.p, s.n, from, to, output_of(s, row, head, i), w.missing}, limit, past_caches);
        }
    }
    if (past_caches) finish_streams();
  }
}

}  // namespace

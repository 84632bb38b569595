// Decays and tiles of one chunk of one head, which the recurrence and its gradient share.
//
// Notable choices:
// - Decays are products of exp(log_decay), running in double: no difference of two large sums loses
//   digits. The factor of the state over a chunk is 0 or 1 plus a remainder, so that a long memory does
//   not drift by a rounding that repeats.
//
// Letters: b rows, t tokens, h heads, g groups that share B and C, p channels per head, n state size,
// q tokens of a chunk; pp and qp are p and q up to whole vectors. A state in a tile is transposed, (n, pp).

#pragma once
#include "signatures.h"
#include "products.h"

namespace {

constexpr long CHUNK = 64;
// Decays below it are set to 0: their products would be denormal numbers, which are slow.
constexpr double LEAST = 1.8e-35;

struct Decays {
  double each[CHUNK];    // of a token
  double before[CHUNK];  // from the chunk's start up to a token, its own included
  double after[CHUNK];   // from a token to the chunk's end, without its own
  double sum = 0;        // of the log decays

  // `step`: distance of the log decays of two tokens.
  template <class T> Decays(const T *log_decay, long step, long q) {
    double run = 1;
    for (long i = 0; i < q; i++) {
      const double log = log_decay[i * step];
      each[i] = std::exp(log);
      sum += log;
      run *= each[i];
      before[i] = run < LEAST ? 0 : run;
    }
    run = 1;
    for (long i = q - 1; i >= 0; i--) {
      after[i] = run < LEAST ? 0 : run;
      run *= each[i];
    }
  }

  // Moves `kept`, the decays from tokens j to token i - 1 at [j], on to token i.
  void advance(double *kept, long i) const {
    for (long j = 0; j < i; j++) {
      const double decay = kept[j] * each[i];
      kept[j] = decay < LEAST ? 0 : decay;
    }
    kept[i] = 1;
  }
};

// The state of a head, (n, pp), before and after a chunk, which may be the same, and memory for its change.
template <class T> struct TiledState {
  long n, pp;
  const T *before;
  T *after, *change;
};

// after = decay before + a b, where the decay is that of a chunk, a (n, q) and b (q, pp). The small changes are
// summed before they meet a memory that may be large.
template <class T> void advance_state(const Decays &d, long q, const TiledState<T> &m, Left<T> a, Right<T> b) {
  const double total = std::exp(d.sum);
  const bool keeps = total >= 0.5;
  const T rest = keeps ? T(std::expm1(d.sum)) : T(total < LEAST ? 0 : total);
  for (long i = 0; i < m.n * m.pp; i++) m.change[i] = rest * m.before[i];
  product<T>(m.n, m.pp, q, a, b, {m.change, m.pp}, true);
  for (long i = 0; i < m.n * m.pp; i++) m.after[i] = keeps ? m.before[i] + m.change[i] : m.change[i];
}

template <class T> inline T *output_of(const Scan<T> &s, long row, long head, long token) {
  return s.y + ((row * s.t + token) * s.h + head) * s.p;
}

// Starts to read what the next head needs: rows of a head are far apart, so the processor does not foresee it.
template <class T> inline void prefetch(const T *from, long count) {
  for (long j = 0; j < count; j += 64 / long(sizeof(T))) __builtin_prefetch(from + j);
}

// Rows of a tensor, `step` apart, as a tile (q, pp), 0 beyond p, each times `gain` where there is one.
template <class T>
void read_rows(const T *from, long step, const T *gain, long gain_step, long q, long p, long pp, T *to) {
  for (long i = 0; i < q; i++) {
    const T factor = gain ? gain[i * gain_step] : T(1);
    prefetch<T>(from + i * step + p, p);
    for (long j = 0; j < p; j++) to[i * pp + j] = from[i * step + j] * factor;
    for (long j = p; j < pp; j++) to[i * pp + j] = 0;
  }
}

template <class T> void scale_rows(const T *from, long step, const double *factors, long q, long width, T *to) {
  for (long i = 0; i < q; i++) {
    const T factor = T(factors[i]);
    for (long j = 0; j < width; j++) to[i * width + j] = from[i * step + j] * factor;
  }
}

// to (columns, up to whole vectors of rows, `apart` from each other) = from (rows, columns)ᵀ, 0 beyond the
// rows.
template <class T> void transpose_chunk(const T *from, long step, long rows, long columns, T *to, long apart = CHUNK) {
  const long stop = padded<T>(rows);
  for (long j = 0; j < columns; j++) {
    for (long i = 0; i < rows; i++) to[j * apart + i] = from[i * step + j];
    for (long i = rows; i < stop; i++) to[j * apart + i] = 0;
  }
}

template <class T> void read_state(const T *from, long p, long n, long pp, T *to) {  // null for 0
  if (!from) {
    std::fill(to, to + n * pp, T(0));
    return;
  }
  for (long j = 0; j < n; j++) {
    for (long i = 0; i < p; i++) to[j * pp + i] = from[i * n + j];
    for (long i = p; i < pp; i++) to[j * pp + i] = 0;
  }
}
template <class T> void write_state(const T *from, long p, long n, long pp, T *to) {
  for (long i = 0; i < p; i++)
    for (long j = 0; j < n; j++) to[i * n + j] = from[j * pp + i];
}

}  // namespace

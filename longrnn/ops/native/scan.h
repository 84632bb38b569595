// The recurrence of Mamba-2: chunks whose tiles are in cache, and single tokens.
//
// Notable choices:
// - A chunk of a head is computed with its tiles in cache: scores C Bᵀ once per group of heads, then
//   three small products per head. Products are register-blocked vector code, whose sums are in the
//   dtype of the tensors.
// - Decays are products of exp(log_decay), running in double: no difference of two large sums loses
//   digits. The factor of the state over a chunk is 0 or 1 plus a remainder, so that a long memory does
//   not drift by a rounding that repeats.
//
// Letters: b rows, t tokens, h heads, g groups that share B and C, p channels per head, n state size.

#pragma once
#include "products.h"

namespace {

constexpr long CHUNK = 64;
// Decays below it are set to 0: their products would be denormal numbers, which are slow.
constexpr double LEAST = 1.8e-35;

template <class T> struct Scan {
  long b, t, h, p, g, n;
  const T *x;          // (b, t, h, p)
  long x_row, x_token;
  const T *gain;       // (b, t, h), or null for 1
  const T *log_decay;  // (b, t, h)
  const T *B, *C;      // (b, t, g, n)
  long bc_row, bc_token;
  const T *state;      // (b, h, p, n)
  T *y;                // (b, t, h, p)
  T *final_state;      // (b, h, p, n)
};

// One token of one head: state ← decay state + x Bᵀ, y = state C.
template <class T>
inline void one_token(long p, long n, const T *x, T gain, T log_decay, const T *B, const T *C, const T *before,
                      T *after, T *y) {
  constexpr int W = Lane<T>::W;
  const double decay = std::exp(double(log_decay));
  const T whole = decay < 0.5 ? T(0) : T(1);
  const T rest = decay < 0.5 ? T(decay) : T(std::expm1(double(log_decay)));
  for (long i = 0; i < p; i++) {
    const T *from = before + i * n;
    T *to = after + i * n;
    const T add = x[i] * gain;
    Vec<T> sums{};
    long j = 0;
    for (; j + W <= n; j += W) {
      const Vec<T> old = load<T>(from + j);
      const Vec<T> now = (rest * old + add * load<T>(B + j)) + whole * old;
      store<T>(to + j, now);
      sums += now * load<T>(C + j);
    }
    T sum = 0;
    for (int k = 0; k < W; k++) sum += sums[k];
    for (; j < n; j++) {
      to[j] = (rest * from[j] + add * B[j]) + whole * from[j];
      sum += to[j] * C[j];
    }
    y[i] = sum;
  }
}

template <class T> struct Work {  // tiles of one thread
  long n, pp;
  Buffer<T> right, scores, weights, inputs, scaled, memory, change, output;
  Work(long n, long p)
      : n(n), pp(padded<T>(p)), right(n * CHUNK), scores(CHUNK * CHUNK), weights(CHUNK * CHUNK),
        inputs(CHUNK * pp), scaled(CHUNK * n), memory(n * pp), change(n * pp), output(CHUNK * pp) {}
};

// One chunk of `q` tokens of one head. `w.memory` is the transposed state, (n, p padded).
template <class T>
void chunk_of_head(const Scan<T> &s, Work<T> &w, long row, long head, long start, long q, const T *B, const T *C) {
  const long qp = padded<T>(q), pp = w.pp;
  double decay[CHUNK], before[CHUNK], after[CHUNK], kept[CHUNK];
  double sum = 0, run = 1;
  for (long i = 0; i < q; i++) {
    const double log_decay = s.log_decay[(row * s.t + start + i) * s.h + head];
    decay[i] = std::exp(log_decay);
    sum += log_decay;
    run *= decay[i];
    before[i] = run < LEAST ? 0 : run;
  }
  run = 1;
  for (long i = q - 1; i >= 0; i--) {
    after[i] = run < LEAST ? 0 : run;
    run *= decay[i];
  }
  for (long i = 0; i < q; i++) {
    const T *x = s.x + row * s.x_row + (start + i) * s.x_token + head * s.p;
    const T gain = s.gain ? s.gain[(row * s.t + start + i) * s.h + head] : T(1);
    T *to = w.inputs + i * pp;
    for (long j = 0; j < s.p; j++) to[j] = x[j] * gain;
    for (long j = s.p; j < pp; j++) to[j] = 0;
  }
  for (long i = 0; i < q; i++) {  // scores times the decays from token j to token i
    for (long j = 0; j < i; j++) {
      const double one = kept[j] * decay[i];
      kept[j] = one < LEAST ? 0 : one;
    }
    kept[i] = 1;
    const T *from = w.scores + i * CHUNK;
    T *to = w.weights + i * CHUNK;
    for (long j = 0; j <= i; j++) to[j] = from[j] * T(kept[j]);
    const long stop = std::min(qp, i + ROWS);
    for (long j = i + 1; j < stop; j++) to[j] = 0;
  }
  for (long i = 0; i < q; i++) {
    const T *from = C + i * s.bc_token;
    T *to = w.scaled + i * s.n;
    const T factor = T(before[i]);
    for (long j = 0; j < s.n; j++) to[j] = from[j] * factor;
  }
  T *y = s.y + ((row * s.t + start) * s.h + head) * s.p;
  const bool direct = pp == s.p;
  T *out = direct ? y : static_cast<T *>(w.output);
  const long ldo = direct ? s.h * s.p : pp;
  product<T>(q, pp, q, w.weights, CHUNK, 1, w.inputs, pp, out, ldo, false, true);
  product<T>(q, pp, s.n, w.scaled, s.n, 1, w.memory, pp, out, ldo, true);
  if (!direct)
    for (long i = 0; i < q; i++) std::memcpy(y + i * s.h * s.p, out + i * pp, s.p * sizeof(T));
  for (long i = 0; i < q; i++) {
    const T *from = B + i * s.bc_token;
    T *to = w.scaled + i * s.n;
    const T factor = T(after[i]);
    for (long j = 0; j < s.n; j++) to[j] = from[j] * factor;
  }
  // The small changes are summed before they meet a memory that may be large.
  const double total = std::exp(sum);
  const bool keeps = total >= 0.5;
  const T rest = keeps ? T(std::expm1(sum)) : T(total < LEAST ? 0 : total);
  T *change = w.change;
  for (long i = 0; i < s.n * pp; i++) change[i] = rest * w.memory[i];
  product<T>(s.n, pp, q, w.scaled, 1, s.n, w.inputs, pp, change, pp, true);
  for (long i = 0; i < s.n * pp; i++) w.memory[i] = keeps ? w.memory[i] + change[i] : change[i];
}

template <class T> void scan(const Scan<T> &s) {
  const long r = s.h / s.g;
  const int threads = threads_for(double(s.b) * s.t * s.h * s.p * s.n);
  if (s.t <= 2) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long task = 0; task < s.b * s.h; task++) {
      const long row = task / s.h, head = task % s.h;
      for (long i = 0; i < s.t; i++) {
        const long at = (row * s.t + i) * s.h + head, bc = row * s.bc_row + i * s.bc_token + head / r * s.n;
        T *after = s.final_state + task * s.p * s.n;
        one_token<T>(s.p, s.n, s.x + row * s.x_row + i * s.x_token + head * s.p, s.gain ? s.gain[at] : T(1),
                     s.log_decay[at], s.B + bc, s.C + bc, i ? after : s.state + task * s.p * s.n, after,
                     s.y + at * s.p);
      }
    }
    return;
  }
  // Heads of a group are divided among threads only as far as rows and groups do not suffice.
  const long parts = std::min(r, (threads + s.b * s.g - 1) / (s.b * s.g)), each = (r + parts - 1) / parts;
#pragma omp parallel num_threads(threads)
  {
    Work<T> w(s.n, s.p);
    Buffer<T> memories(each * s.n * w.pp);
#pragma omp for schedule(static)
    for (long task = 0; task < s.b * s.g * parts; task++) {
      const long row = task / (s.g * parts), group = task / parts % s.g;
      const long first = group * r + task % parts * each, last = std::min(group * r + r, first + each);
      for (long head = first; head < last; head++) {  // transposed
        const T *from = s.state + (row * s.h + head) * s.p * s.n;
        T *to = memories + (head - first) * s.n * w.pp;
        for (long j = 0; j < s.n; j++) {
          for (long i = 0; i < s.p; i++) to[j * w.pp + i] = from[i * s.n + j];
          for (long i = s.p; i < w.pp; i++) to[j * w.pp + i] = 0;
        }
      }
      T *const own = w.memory.data;
      for (long start = 0; start < s.t; start += CHUNK) {
        const long q = std::min(CHUNK, s.t - start), qp = padded<T>(q);
        const long bc = row * s.bc_row + start * s.bc_token + group * s.n;
        const T *B = s.B + bc, *C = s.C + bc;
        for (long j = 0; j < s.n; j++) {
          for (long i = 0; i < q; i++) w.right[j * CHUNK + i] = B[i * s.bc_token + j];
          for (long i = q; i < qp; i++) w.right[j * CHUNK + i] = 0;
        }
        product<T>(q, qp, s.n, C, s.bc_token, 1, w.right, CHUNK, w.scores, CHUNK, false, false, true);
        for (long head = first; head < last; head++) {
          w.memory.data = memories + (head - first) * s.n * w.pp;
          chunk_of_head<T>(s, w, row, head, start, q, B, C);
        }
      }
      w.memory.data = own;
      for (long head = first; head < last; head++) {
        T *to = s.final_state + (row * s.h + head) * s.p * s.n;
        const T *from = memories + (head - first) * s.n * w.pp;
        for (long i = 0; i < s.p; i++)
          for (long j = 0; j < s.n; j++) to[i * s.n + j] = from[j * w.pp + i];
      }
    }
  }
}

}  // namespace

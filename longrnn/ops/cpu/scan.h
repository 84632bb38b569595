// The recurrence of Mamba-2: chunks whose tiles are in cache, and single tokens.
//
// Notable choices:
// - A chunk of a head is computed with its tiles in cache: scores C Bᵀ once per group of heads, then
//   three small products per head. Products are register-blocked vector code, whose sums are in the
//   dtype of the tensors.
// - Numerics of the decays, and letters: see `tiles.h`.

#pragma once
#include "tiles.h"

namespace {

// States of so many bytes are driven out of the caches before the next token reads them, because the
// weights of a layer with such a state are larger; chosen by measurement.
constexpr long STREAMED_BYTES = 1 << 19;

// One token of one head: state ← decay state + x Bᵀ, y = state C. With `PAST_CACHES`, `after` is aligned and
// n a multiple of the width of vectors.
template <class T, bool PAST_CACHES = false>
inline void one_token(long p, long n, const T *x, T gain, T log_decay, const T *B, const T *C, const T *before,
                      T *after, T *y) {
  const double decay = std::exp(double(log_decay));
  const T whole = decay < 0.5 ? T(0) : T(1);
  const T rest = decay < 0.5 ? T(decay) : T(std::expm1(double(log_decay)));
  for (long i = 0; i < p; i++) {
    const T *from = before + i * n;
    T *to = after + i * n;
    const T add = x[i] * gain;
    Sum<T> sum;
    each<T>(0, n, [&](auto zero, long j) {
      using V = decltype(zero);
      const V old = read<V>(from + j);
      const V now = (rest * old + add * read<V>(B + j)) + whole * old;
      if constexpr (PAST_CACHES && sizeof(V) > sizeof(T)) stream<T>(to + j, now);
      else write(to + j, now);
      sum.add(now * read<V>(C + j));
    });
    y[i] = sum.total();
  }
}

template <class T> struct Work {  // tiles of one thread
  long n, pp;
  Buffer<T> right, scores, weights, inputs, scaled, change, output;
  T *memory = nullptr;  // the state of a head
  Work(long n, long p)
      : n(n), pp(padded<T>(p)), right(n * CHUNK), scores(CHUNK * CHUNK), weights(CHUNK * CHUNK),
        inputs(CHUNK * pp), scaled(CHUNK * n), change(n * pp), output(CHUNK * pp) {}
};

template <class T> inline T *output_of(const Scan<T> &s, long row, long head, long token) {
  return s.y + row * s.t * s.h * s.p + token * s.y_token + head * s.p;
}

// One chunk of `q` tokens of one head, whose gain x is in `w.inputs`. `w.memory` is the transposed state,
// (n, p padded), and `scores` are C Bᵀ. A state that is zero is not read, and one that nobody reads not made:
// in rows of one chunk, as in short windows, the state is most of the work.
template <class T>
void chunk_of_inputs(const Scan<T> &s, Work<T> &w, const Decays &d, const T *scores, long row, long head, long start,
                     long q, const T *B, const T *C) {
  const long qp = padded<T>(q), pp = w.pp, step = d.none() ? s.bc_token : s.n;
  const auto scaled = [&](const T *from, const double *factors) -> const T * {
    if (d.none()) return from;
    scale_rows<T>(from, s.bc_token, factors, q, s.n, w.scaled);
    return w.scaled;
  };
  double kept[CHUNK];
  std::fill_n(kept, CHUNK, 1.0);
  for (long i = 0; i < q; i++) {  // scores times the decays from token j to token i
    if (!d.none()) d.advance(kept, i);
    const T *from = scores + i * CHUNK;
    T *to = w.weights + i * CHUNK;
    for (long j = 0; j <= i; j++) to[j] = from[j] * T(kept[j]);
    const long stop = std::min(qp, i + ROWS);
    for (long j = i + 1; j < stop; j++) to[j] = 0;
  }
  T *y = output_of(s, row, head, start);
  const bool direct = pp == s.p;
  T *out = direct ? y : static_cast<T *>(w.output);
  const long ldo = direct ? s.y_token : pp;
  product<T>(q, pp, q, {w.weights, CHUNK, 1}, {w.inputs, pp}, {out, ldo}, false, LOWER_A);
  if (start || s.state) product<T>(q, pp, s.n, {scaled(C, d.before), step, 1}, {w.memory, pp}, {out, ldo}, true);
  if (!direct)
    for (long i = 0; i < q; i++) std::memcpy(y + i * s.y_token, out + i * pp, s.p * sizeof(T));
  if (start + q == s.t && !s.final_state) return;
  advance_state<T>(d, s.n, pp, q, scaled(B, d.after), 1, step, w.inputs, w.memory, w.change, w.memory);
}

// gain x of `q` tokens of a head, to `w.inputs`.
template <class T> void read_inputs(const Scan<T> &s, Work<T> &w, long row, long head, long start, long q) {
  const long at = (row * s.t + start) * s.h + head;
  read_rows<T>(s.x + row * s.x_row + start * s.x_token + head * s.p, s.x_token, s.gain + at, s.h, q,
               s.p, w.pp, w.inputs);
}

template <class T>
void chunk_of_head(const Scan<T> &s, Work<T> &w, long row, long head, long start, long q, const T *B, const T *C) {
  read_inputs<T>(s, w, row, head, start, q);
  const Decays d(s.log_decay + (row * s.t + start) * s.h + head, s.h, q);
  chunk_of_inputs<T>(s, w, d, w.scores, row, head, start, q, B, C);
}

// How many of the r heads of a group one task computes: they are divided among threads only as far as
// rows and groups do not suffice.
inline long heads_per_task(long r, long rows_and_groups, int threads) {
  const long parts = std::min(r, (threads + rows_and_groups - 1) / rows_and_groups);
  return (r + parts - 1) / parts;
}

// Calls `chunk(w, row, head, start, q, B, C)` for every chunk and head, whose state is in `w.memory` and
// whose scores are in `w.scores`. `prepare(w, q, B)` is called before, once per chunk and group.
template <class T, class W, class Prepare, class Chunk>
void chunks(const Scan<T> &s, int threads, Prepare prepare, Chunk chunk) {
  const long r = s.h / s.g;
  const long each = heads_per_task(r, s.b * s.g, threads), parts = (r + each - 1) / each;
  PerThread<W> works(threads, s.n, s.p);
  PerThread<Buffer<T>> states(threads, each * s.n * padded<T>(s.p));
  const auto part_of = [&](auto *all, long index) { return all ? all + index * s.p * s.n : nullptr; };
#pragma omp parallel num_threads(threads)
  {
    W &w = works.mine();
    T *const memories = states.mine();
#pragma omp for schedule(static)
    for (long task = 0; task < s.b * s.g * parts; task++) {
      const long row = task / (s.g * parts), group = task / parts % s.g;
      const long first = group * r + task % parts * each, last = std::min(group * r + r, first + each);
      for (long head = first; head < last; head++)
        read_state<T>(part_of(s.state, row * s.h + head), s.p, s.n, w.pp, memories + (head - first) * s.n * w.pp);
      for (long start = 0; start < s.t; start += CHUNK) {
        const long q = std::min(CHUNK, s.t - start), qp = padded<T>(q);
        const long bc = row * s.bc_row + start * s.bc_token + group * s.n;
        const T *B = s.B + bc, *C = s.C + bc;
        transpose_chunk<T>(B, s.bc_token, q, s.n, w.right);
        product<T>(q, qp, s.n, {C, s.bc_token, 1}, {w.right, CHUNK}, {w.scores, CHUNK}, false, LOWER_C);
        prepare(w, q, B);
        for (long head = first; head < last; head++) {
          w.memory = memories + (head - first) * s.n * w.pp;
          chunk(w, row, head, start, q, B, C);
        }
      }
      for (long head = first; s.final_state && head < last; head++)
        write_state<T>(memories + (head - first) * s.n * w.pp, s.p, s.n, w.pp, part_of(s.final_state, row * s.h + head));
    }
  }
}

// Whether `one_token` writes the states of one token past the caches.
template <class T> bool streams(const Scan<T> &s) {
  return s.t == 1 && s.b * s.h * s.p * s.n * long(sizeof(T)) >= STREAMED_BYTES && s.n % Lane<T>::W == 0 &&
         reinterpret_cast<uintptr_t>(s.final_state) % BYTES == 0;
}

// Tokens one by one. `input(x, at, B, before)` is what a token adds, without its gain. `state` and
// `final_state` are not null.
template <class T, class Input> void token_by_token(const Scan<T> &s, int threads, Input input) {
  const bool past_caches = streams<T>(s);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (long task = 0; task < s.b * s.h; task++) {
      const long row = task / s.h, head = task % s.h;
      T *after = s.final_state + task * s.p * s.n;
      for (long i = 0; i < s.t; i++) {
        const long at = (row * s.t + i) * s.h + head, bc = row * s.bc_row + i * s.bc_token + head / (s.h / s.g) * s.n;
        const T *x = s.x + row * s.x_row + i * s.x_token + head * s.p, *B = s.B + bc;
        const T *before = i ? after : s.state + task * s.p * s.n;
        (past_caches ? one_token<T, true> : one_token<T, false>)(
            s.p, s.n, input(x, at, B, before), s.gain[at], s.log_decay[at], B, s.C + bc, before, after,
            output_of(s, row, head, i));
      }
    }
    if (past_caches) finish_streams();
  }
}

template <class T> int scan(const Scan<T> &s) {
  const int threads = threads_for(double(s.b) * s.t * s.h * s.p * s.n);
  if (s.t <= 2) {
    token_by_token<T>(s, threads, [](const T *x, long, const T *, const T *) { return x; });
    return 1;
  }
  chunks<T, Work<T>>(
      s, threads, [](Work<T> &, long, const T *) {},
      [&](Work<T> &w, long row, long head, long start, long q, const T *B, const T *C) {
        chunk_of_head<T>(s, w, row, head, start, q, B, C);
      });
  return 1;
}

}  // namespace

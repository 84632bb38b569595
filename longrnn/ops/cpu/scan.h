// The recurrence with one decay per head: chunks whose tiles are in cache; few tokens one by one.
//
// Notable choices:
// - A chunk of a head is computed with its tiles in cache: scores C Bᵀ once per group of heads, then
//   three small products per head. Products are register-blocked vector code, whose sums are in the
//   dtype of the tensors.
// - Numerics of the decays, and letters: see `tiles.h`.

#pragma once
#include "tokens.h"

namespace {

constexpr long FEW = 2;  // so many tokens are computed one by one

template <class T> struct Work {  // tiles of one thread
  long n, pp;
  Buffer<T> right, scores, weights, inputs, scaled, change, output;
  T *memory = nullptr;  // the state of a head
  Work(long n, long p)
      : n(n), pp(padded<T>(p)), right(n * CHUNK), scores(CHUNK * CHUNK), weights(CHUNK * CHUNK),
        inputs(CHUNK * pp), scaled(CHUNK * n), change(n * pp), output(CHUNK * pp) {}
};

template <class T> struct Chunk {  // q tokens of a head
  long row, head, start, q;
  const T *B, *C;
  long at(const Scan<T> &s) const { return (row * s.t + start) * s.h + head; }  // index of the first gain
};

// gain x of the tokens, to `w.inputs`.
template <class T> void read_inputs(const Scan<T> &s, Work<T> &w, const Chunk<T> &c) {
  const T *x = s.x.at(c.row, c.start) + c.head * s.p;
  read_rows<T>(x, s.x.token, s.gain + c.at(s), s.h, c.q, s.p, w.pp, w.inputs);
}

// A chunk whose gain x is in `w.inputs`. `w.memory` is the transposed state, (n, p padded), and `w.scores` are
// C Bᵀ. A state that is zero is not read, and one that nobody reads not made: in rows of one chunk, as in short
// windows, the state is most of the work.
template <class T> void chunk_of_inputs(const Scan<T> &s, Work<T> &w, const Decays &d, const Chunk<T> &c) {
  const long q = c.q, qp = padded<T>(q), pp = w.pp;
  double kept[CHUNK];
  for (long i = 0; i < q; i++) {  // scores times the decays from token j to token i
    d.advance(kept, i);
    const T *from = w.scores + i * CHUNK;
    T *to = w.weights + i * CHUNK;
    for (long j = 0; j <= i; j++) to[j] = from[j] * T(kept[j]);
    const long stop = std::min(qp, i + ROWS);
    for (long j = i + 1; j < stop; j++) to[j] = 0;
  }
  T *y = output_of(s, c.row, c.head, c.start);
  const bool direct = pp == s.p;
  T *out = direct ? y : static_cast<T *>(w.output);
  const long ldo = direct ? s.h * s.p : pp;
  product<T>(q, pp, q, {w.weights, CHUNK, 1}, {w.inputs, pp}, {out, ldo}, false, LOWER_A);
  if (c.start || s.state) {
    scale_rows<T>(c.C, s.C.token, d.before, q, s.n, w.scaled);
    product<T>(q, pp, s.n, {w.scaled, s.n, 1}, {w.memory, pp}, {out, ldo}, true);
  }
  if (!direct)
    for (long i = 0; i < q; i++) std::memcpy(y + i * s.h * s.p, out + i * pp, s.p * sizeof(T));
  if (c.start + q == s.t && !s.final_state) return;
  scale_rows<T>(c.B, s.B.token, d.after, q, s.n, w.scaled);
  advance_state<T>(d, q, {s.n, pp, w.memory, w.memory, w.change}, {w.scaled, 1, s.n}, {w.inputs, pp});
}

// How many of the r heads of a group one task computes: they are divided among threads only as far as
// rows and groups do not suffice.
inline long heads_per_task(long r, long rows_and_groups, int threads) {
  const long parts = std::min(r, (threads + rows_and_groups - 1) / rows_and_groups);
  return (r + parts - 1) / parts;
}

// Calls `run(w, chunk)` for every chunk and head, whose state is in `w.memory` and whose scores are in `w.scores`.
// `prepare(w, chunk)` is called before, once per chunk and group.
template <class T, class W, class Prepare, class Run>
void chunks(const Scan<T> &s, int threads, Prepare prepare, Run run) {
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
        const long q = std::min(CHUNK, s.t - start);
        Chunk<T> c{row, first, start, q, s.B.at(row, start) + group * s.n, s.C.at(row, start) + group * s.n};
        transpose_chunk<T>(c.B, s.B.token, q, s.n, w.right);
        product<T>(q, padded<T>(q), s.n, {c.C, s.C.token, 1}, {w.right, CHUNK}, {w.scores, CHUNK}, false, LOWER_C);
        prepare(w, c);
        for (; c.head < last; c.head++) {
          w.memory = memories + (c.head - first) * s.n * w.pp;
          run(w, c);
        }
      }
      for (long head = first; s.final_state && head < last; head++)
        write_state<T>(memories + (head - first) * s.n * w.pp, s.p, s.n, w.pp, part_of(s.final_state, row * s.h + head));
    }
  }
}

template <class T> void scan(const Scan<T> &s) {
  if (s.t <= FEW || s.decays > 1 || s.limit) return by_tokens<T, false>(s);
  chunks<T, Work<T>>(
      s, threads_for(double(s.b) * s.t * s.h * s.p * s.n), [](Work<T> &, const Chunk<T> &) {},
      [&](Work<T> &w, const Chunk<T> &c) {
        read_inputs<T>(s, w, c);
        chunk_of_inputs<T>(s, w, Decays(s.log_decay + c.at(s), s.h, c.q), c);
      });
}

}  // namespace

// The gated delta rule: see `longrnn/ops/delta/definition.py`.
//
// Notable choices:
// - What the tokens of a chunk add, u, solves a triangular system whose right side has read the state before
//   the chunk. Given u, a chunk is that of `scan.h`.
// - Up to FEW_TOKENS tokens are computed one by one, which takes less time than the tiles of a chunk.

#pragma once
#include "scan.h"

namespace {

constexpr long FEW_TOKENS = 8;

template <class T> struct DeltaWork : Work<T> {  // of one thread
  Buffer<T> alike;  // products of the keys of a chunk
  DeltaWork(long n, long p) : Work<T>(n, p), alike(CHUNK * CHUNK) {}
};

// Replaces x (q, pp) by the solution y of (1 - a) y = x; a (q, q) is 0 on and above the diagonal.
template <class T> void solve(long q, long pp, const T *a, T *x) {
  for (long first = 0; first < q; first += ROWS) {
    const long stop = std::min<long>(q, first + ROWS);
    product<T>(stop - first, pp, first, {a + first * CHUNK, CHUNK, 1}, {x, pp}, {x + first * pp, pp}, true);
    for (long i = first; i < stop; i++)
      for (long j = first; j < i; j++)
        for (long c = 0; c < pp; c++) x[i * pp + c] += a[i * CHUNK + j] * x[j * pp + c];
  }
}

// One chunk of `q` tokens of one head, as `chunk_of_head`.
template <class T>
void delta_chunk(const Scan<T> &s, DeltaWork<T> &w, long row, long head, long start, long q, const T *B, const T *C) {
  const long at = (row * s.t + start) * s.h + head;
  const Decays d(s.log_decay + at, s.h, q);
  read_inputs<T>(s, w, row, head, start, q);
  double factors[CHUNK], kept[CHUNK];
  for (long i = 0; i < q; i++) {
    const double gain = s.gain[at + i * s.h];
    factors[i] = -gain * d.before[i];
    d.advance(kept, i);
    for (long j = 0; j < i; j++) w.weights[i * CHUNK + j] = T(-gain * kept[j]) * w.alike[i * CHUNK + j];
  }
  scale_rows<T>(B, s.bc_token, factors, q, s.n, w.scaled);
  product<T>(q, w.pp, s.n, {w.scaled, s.n, 1}, {w.memory, w.pp}, {w.inputs, w.pp}, true);
  solve<T>(q, w.pp, w.weights, w.inputs);
  chunk_of_inputs<T>(s, w, d, w.scores, row, head, start, q, B, C);
}

template <class T> int delta(const Scan<T> &s) {
  const int threads = threads_for(double(s.b) * s.t * s.h * s.p * s.n);
  if (s.t > FEW_TOKENS) {
    chunks<T, DeltaWork<T>>(
        s, threads,
        [&](DeltaWork<T> &w, long q, const T *B) {
          product<T>(q, padded<T>(q), s.n, {B, s.bc_token, 1}, {w.right, CHUNK}, {w.alike, CHUNK}, false, LOWER_C);
        },
        [&](DeltaWork<T> &w, long row, long head, long start, long q, const T *B, const T *C) {
          delta_chunk<T>(s, w, row, head, start, q, B, C);
        });
    return 1;
  }
  PerThread<Buffer<T>> added(threads, s.p);
  token_by_token<T>(s, threads, [&](const T *x, long at, const T *B, const T *before) -> const T * {
    T *u = added.mine();
    const T decay = T(std::exp(double(s.log_decay[at])));
    for (long j = 0; j < s.p; j++) u[j] = x[j] - decay * dot<T>(before + j * s.n, B, s.n);
    return u;
  });
  return 1;
}

}  // namespace

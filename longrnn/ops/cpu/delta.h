// The gated delta rule: see `longrnn/ops/scan/definition.py`.
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

template <class T> void delta_chunk(const Scan<T> &s, DeltaWork<T> &w, const Chunk<T> &c) {
  const Decays d(s.log_decay + c.at(s), s.h, c.q);
  read_inputs<T>(s, w, c);
  double factors[CHUNK], kept[CHUNK];
  for (long i = 0; i < c.q; i++) {
    const double gain = s.gain[c.at(s) + i * s.h];
    factors[i] = -gain * d.before[i];
    d.advance(kept, i);
    for (long j = 0; j < i; j++) w.weights[i * CHUNK + j] = T(-gain * kept[j]) * w.alike[i * CHUNK + j];
  }
  scale_rows<T>(c.B, s.B.token, factors, c.q, s.n, w.scaled);
  product<T>(c.q, w.pp, s.n, {w.scaled, s.n, 1}, {w.memory, w.pp}, {w.inputs, w.pp}, true);
  solve<T>(c.q, w.pp, w.weights, w.inputs);
  chunk_of_inputs<T>(s, w, d, c);
}

template <class T> void delta(const Scan<T> &s) {
  if (s.t <= FEW_TOKENS || s.decays > 1 || s.limit) return by_tokens<T, true>(s);
  chunks<T, DeltaWork<T>>(
      s, threads_for(double(s.b) * s.t * s.h * s.p * s.n),
      [&](DeltaWork<T> &w, const Chunk<T> &c) {
        product<T>(c.q, padded<T>(c.q), s.n, {c.B, s.B.token, 1}, {w.right, CHUNK}, {w.alike, CHUNK}, false, LOWER_C);
      },
      [&](DeltaWork<T> &w, const Chunk<T> &c) { delta_chunk<T>(s, w, c); });
}

}  // namespace

// The gradient of the recurrence, from its inputs and the states that the forward pass kept.
//
// With u = gain x, W_ij = (C_i · B_j) decay(j, i] inside a chunk, S the state at its start, D the
// gradient of the state at its end, and g the gradient of y,
//
//   du_j = Σ_i W_ij g_i + after_j D B_j,    dB_j = Σ_i decay(j, i] (g_i · u_j) C_i + after_j u_j D,
//   dC_i = Σ_j decay(j, i] (g_i · u_j) B_j + before_i g_i S,    D before = decay D + Σ_i before_i g_i C_iᵀ.
//
// Notable choices:
// - The states at the starts of the chunks are computed again from the first, then the chunks are read
//   from the last to the first. What the forward pass keeps is its inputs.
// - The gradient of a log decay is the sum over all terms whose decay contains it, all of which are
//   added: a difference of two sums over all tokens would leave its rounding to heads that forget at
//   once. A term whose decay is 1 (j = i) is not part of it.
// - What heads of a group add to the gradients of B and C is summed in tiles, so that its products with
//   B and C are computed once per group.

#pragma once
#include "key_gradient.h"
#include "scan.h"

namespace {

template <class T> struct GradientWork {  // tiles of one thread
  Buffer<T> B, C, B_t, C_t;                  // of the chunk: (q, n), and transposed (n, qp)
  Buffer<T> scores, decays, weights, pairs;  // (q, qp): C Bᵀ, decay(j, i], their product, g uᵀ
  Buffer<T> grad_scores;                       // gradient of the scores, summed over heads
  Buffer<T> u, u_t, scaled_u;                // (q, pp) and (p, qp)
  Buffer<T> g, scaled_g, scaled_g_t;
  Buffer<T> grad_u;                            // (q, pp)
  Buffer<T> part, grad_B, grad_C;                // (n, qp)
  Buffer<T> change;                          // (n, pp)
  GradientWork(long n, long pp)
      : B(CHUNK * n), C(CHUNK * n), B_t(n * CHUNK), C_t(n * CHUNK), scores(CHUNK * CHUNK), decays(CHUNK * CHUNK),
        weights(CHUNK * CHUNK), pairs(CHUNK * CHUNK), grad_scores(CHUNK * CHUNK), u(CHUNK * pp), u_t(pp * CHUNK),
        scaled_u(pp * CHUNK), g(CHUNK * pp), scaled_g(CHUNK * pp), scaled_g_t(pp * CHUNK), grad_u(CHUNK * pp),
        part(n * CHUNK), grad_B(n * CHUNK), grad_C(n * CHUNK), change(n * pp) {}
};

inline double sum_of(const double *from, long n) {  // n: whole vectors
  Vec<double> sums{};
  for (long i = 0; i < n; i += Lane<double>::W) sums += load<double>(from + i);
  return lane_sum<double>(sums);
}

// Decays between tokens and weights of a head, 0 where j > i.
template <class T> void weigh(const Decays &d, GradientWork<T> &w, long q) {
  const long qp = padded<T>(q);
  double kept[CHUNK];
  for (long i = 0; i < q; i++) {
    d.advance(kept, i);
    T *decays = w.decays + i * CHUNK, *weights = w.weights + i * CHUNK;
    const T *scores = w.scores + i * CHUNK;
    for (long j = 0; j <= i; j++) {
      decays[j] = T(kept[j]);
      weights[j] = scores[j] * decays[j];
    }
    for (long j = i + 1; j < qp; j++) decays[j] = weights[j] = 0;
  }
}

// Adds the gradient of the scores, and at [k] the terms of pairs j < k <= i to the gradient of log decay k.
template <class T> void pairs_of_head(GradientWork<T> &w, long q, double *grad_log) {
  constexpr int W = Lane<T>::W;
  double columns[CHUNK] = {};  // at [j]: sum over the tokens i so far, which are read backwards
  for (long i = q - 1; i >= 0; i--) {
    T *pairs = w.pairs + i * CHUNK, *grad_scores = w.grad_scores + i * CHUNK;
    const T *decays = w.decays + i * CHUNK, *weights = w.weights + i * CHUNK;
    const long stop = padded<T>(i + 1);
    for (long j = i + 1; j < stop; j++) pairs[j] = 0;
    for (long j = 0; j < stop; j += W)
      store<T>(grad_scores + j, load<T>(grad_scores + j) + load<T>(pairs + j) * load<T>(decays + j));
    for (long j = 0; j < i; j++) columns[j] += double(pairs[j] * weights[j]);
    columns[i] = 0;  // no token before i reads it
    grad_log[i] += sum_of(columns, padded<double>(i));
  }
}

// One chunk. `after` is the gradient of the state at its end, and becomes that of the state at its start, which is
// `before`; both (n, pp).
template <class T>
void chunk_gradient(const ScanGradient<T> &s, GradientWork<T> &w, const Chunk<T> &c, const T *before, T *after) {
  constexpr int W = Lane<T>::W;
  const Scan<T> &of = s.of;
  const long n = of.n, p = of.p, q = c.q, pp = padded<T>(p), qp = padded<T>(q), at = c.at(of);
  const T *gains = of.gain + at;
  const T *x = of.x.at(c.row, c.start) + c.head * p;
  const Decays d(of.log_decay + at, of.h, q);
  read_rows<T>(x, of.x.token, gains, of.h, q, p, pp, w.u);
  read_rows<T>(s.grad_y + at * p, of.h * p, nullptr, 0, q, p, pp, w.g);
  scale_rows<T>(w.g, pp, d.before, q, pp, w.scaled_g);
  transpose_chunk<T>(w.u, pp, q, p, w.u_t);
  transpose_chunk<T>(w.scaled_g, pp, q, p, w.scaled_g_t);
  T factors[CHUNK] = {};
  for (long i = 0; i < q; i++) factors[i] = T(d.after[i]);
  for (long j = 0; j < p; j++)
    for (long i = 0; i < qp; i += W)
      store<T>(w.scaled_u + j * CHUNK + i, load<T>(w.u_t + j * CHUNK + i) * load<T>(factors + i));
  weigh<T>(d, w, q);

  double grad_log[CHUNK] = {};
  product<T>(q, qp, p, {w.g, pp, 1}, {w.u_t, CHUNK}, {w.pairs, CHUNK}, false, LOWER_C);
  pairs_of_head<T>(w, q, grad_log);

  product<T>(n, qp, p, {before, pp, 1}, {w.scaled_g_t, CHUNK}, {w.part, CHUNK}, false);
  T starting[CHUNK] = {};  // what the state at the chunk's start adds to y · g
  for (long j = 0; j < n; j++)
    for (long i = 0; i < qp; i += W) {
      const Vec<T> grad = load<T>(w.part + j * CHUNK + i);
      store<T>(starting + i, load<T>(starting + i) + grad * load<T>(w.C_t + j * CHUNK + i));
      store<T>(w.grad_C + j * CHUNK + i, load<T>(w.grad_C + j * CHUNK + i) + grad);
    }
  product<T>(n, qp, p, {after, pp, 1}, {w.scaled_u, CHUNK}, {w.grad_B, CHUNK}, true);
  product<T>(q, pp, n, {w.B, n, 1}, {after, pp}, {w.grad_u, pp}, false);
  scale_rows<T>(w.grad_u, pp, d.after, q, pp, w.grad_u);
  double sum = 0;
  for (long i = 0; i < q; i++) {  // what the tokens before i add to the state at the end times its gradient
    grad_log[i] += sum;
    sum += dot<T>(w.u + i * pp, w.grad_u + i * pp, pp);
  }
  product<T>(q, pp, q, {w.weights, 1, CHUNK}, {w.g, pp}, {w.grad_u, pp}, true, UPPER_A);
  for (long i = 0; i < q; i++) {
    T *to = s.grad_x + (at + i * of.h) * p;
    const T *grad_u = w.grad_u + i * pp, gain = gains[i * of.h];
    s.grad_gain[at + i * of.h] = dot<T>(x + i * of.x.token, grad_u, p);
    for (long j = 0; j < p; j++) to[j] = grad_u[j] * gain;
  }
  sum = 0;
  for (long j = 0; j < n; j++) sum += dot<T>(before + j * pp, after + j * pp, pp);
  const double total = std::exp(d.sum);
  double run = total < LEAST ? 0 : sum * total;
  for (long i = q - 1; i >= 0; i--) {
    run += double(starting[i]);
    s.grad_log_decay[at + i * of.h] = T(grad_log[i] + run);
  }
  advance_state<T>(d, q, {n, pp, after, after, w.change}, {w.C, 1, n}, {w.scaled_g, pp});
}

// Heads `first` to `last` of a group of one row: what a thread computes at once.
template <class T> struct HeadsOfGroup {
  long row, group, first, last;
  T *states;          // at the starts of the chunks, (chunk, head, n, pp)
  T *after;           // the gradients of the states after a chunk, (head, n, pp)
  T *grad_B, *grad_C;  // of the row and group
};

template <class T> void states_of_chunks(const ScanGradient<T> &s, GradientWork<T> &w, const HeadsOfGroup<T> &m) {
  const Scan<T> &of = s.of;
  const long n = of.n, pp = padded<T>(of.p), all = (m.last - m.first) * n * pp;
  for (long head = m.first; head < m.last; head++)
    read_state<T>(of.state + (m.row * of.h + head) * of.p * n, of.p, n, pp, m.states + (head - m.first) * n * pp);
  for (long start = 0; start + CHUNK < of.t; start += CHUNK) {
    T *from = m.states + start / CHUNK * all;
    for (long i = 0; i < CHUNK; i++) std::memcpy(w.B + i * n, of.B.at(m.row, start + i) + m.group * n, n * sizeof(T));
    for (long head = m.first; head < m.last; head++, from += n * pp) {
      const long at = (m.row * of.t + start) * of.h + head;
      const Decays d(of.log_decay + at, of.h, CHUNK);
      const T *x = of.x.at(m.row, start) + head * of.p;
      read_rows<T>(x, of.x.token, of.gain + at, of.h, CHUNK, of.p, pp, w.u);
      scale_rows<T>(w.u, pp, d.after, CHUNK, pp, w.grad_u);
      advance_state<T>(d, CHUNK, {n, pp, from, from + all, w.change}, {w.B, 1, n}, {w.grad_u, pp});
    }
  }
}

// What the heads of a task add to the gradients of B and C of a chunk, written to rows `step` apart.
template <class T> void write_groups(GradientWork<T> &w, long n, long q, T *grad_B, T *grad_C, long step) {
  const long qp = padded<T>(q);
  for (long i = 0; i < q; i++)
    for (long j = i + 1; j < qp; j++) w.grad_scores[i * CHUNK + j] = 0;
  product<T>(n, qp, q, {w.C_t, CHUNK, 1}, {w.grad_scores, CHUNK}, {w.grad_B, CHUNK}, true);
  transpose_chunk<T>(w.grad_scores, CHUNK, q, q, w.pairs);
  product<T>(n, qp, q, {w.B_t, CHUNK, 1}, {w.pairs, CHUNK}, {w.grad_C, CHUNK}, true);
  for (long i = 0; i < q; i++)
    for (long j = 0; j < n; j++) {
      grad_B[i * step + j] = w.grad_B[j * CHUNK + i];
      grad_C[i * step + j] = w.grad_C[j * CHUNK + i];
    }
}

template <class T> void gradient_of_heads(const ScanGradient<T> &s, GradientWork<T> &w, const HeadsOfGroup<T> &m) {
  const Scan<T> &of = s.of;
  const long n = of.n, p = of.p, pp = padded<T>(p), heads = m.last - m.first, size = p * n, step = of.g * n;
  for (long head = m.first; head < m.last; head++)
    read_state<T>(s.grad_final + (m.row * of.h + head) * size, p, n, pp,
                  m.after + (head - m.first) * n * pp);
  states_of_chunks<T>(s, w, m);
  for (long start = (of.t - 1) / CHUNK * CHUNK; start >= 0; start -= CHUNK) {
    const long q = std::min(CHUNK, of.t - start), qp = padded<T>(q);
    Chunk<T> c{m.row, m.first, start, q, of.B.at(m.row, start) + m.group * n, of.C.at(m.row, start) + m.group * n};
    for (long i = 0; i < q; i++) {
      std::memcpy(w.B + i * n, c.B + i * of.B.token, n * sizeof(T));
      std::memcpy(w.C + i * n, c.C + i * of.C.token, n * sizeof(T));
    }
    transpose_chunk<T>(w.B, n, q, n, w.B_t);
    transpose_chunk<T>(w.C, n, q, n, w.C_t);
    product<T>(q, qp, n, {w.C, n, 1}, {w.B_t, CHUNK}, {w.scores, CHUNK}, false, LOWER_C);
    std::fill(w.grad_scores.data, w.grad_scores + CHUNK * CHUNK, T(0));
    std::fill(w.grad_B.data, w.grad_B + n * CHUNK, T(0));
    std::fill(w.grad_C.data, w.grad_C + n * CHUNK, T(0));
    const T *states = m.states + start / CHUNK * heads * n * pp;
    for (; c.head < m.last; c.head++) {
      const long tile = (c.head - m.first) * n * pp;
      chunk_gradient<T>(s, w, c, states + tile, m.after + tile);
    }
    write_groups<T>(w, n, q, m.grad_B + start * step, m.grad_C + start * step, step);
  }
  for (long head = m.first; head < m.last; head++)
    write_state<T>(m.after + (head - m.first) * n * pp, p, n, pp, s.grad_state + (m.row * of.h + head) * size);
}

template <class T> void scan_gradient(const ScanGradient<T> &s) {
  const Scan<T> &of = s.of;
  if (of.decays > 1) return gradient_by_tokens<T, false>(s);
  const long r = of.h / of.g, all = of.b * of.t * of.g * of.n;
  const int threads = threads_for(3 * double(of.b) * of.t * of.h * of.p * of.n);
  const long each = heads_per_task(r, of.b * of.g, threads), parts = (r + each - 1) / each;
  Buffer<T> sums(2 * parts * all);  // the gradients of B and C by part
  const long pp = padded<T>(of.p), tile = of.n * pp;
  PerThread<GradientWork<T>> works(threads, of.n, pp);
  PerThread<Buffer<T>> states(threads, (of.t + CHUNK - 1) / CHUNK * each * tile), after(threads, each * tile);
#pragma omp parallel num_threads(threads)
  {
    GradientWork<T> &w = works.mine();
#pragma omp for schedule(static)
    for (long task = 0; task < of.b * of.g * parts; task++) {
      const long row = task / (of.g * parts), group = task / parts % of.g, part = task % parts;
      const long first = group * r + part * each, last = std::min(group * r + r, first + each);
      const long step = of.g * of.n, at = row * of.t * step + group * of.n;
      T *grad_B = sums + 2 * part * all + at;
      gradient_of_heads<T>(s, w, {row, group, first, last, states.mine(), after.mine(), grad_B, grad_B + all});
    }
#pragma omp for schedule(static)
    for (long i = 0; i < all; i++) {
      s.grad_B[i] = s.grad_C[i] = 0;
      for (long part = 0; part < parts; part++) {
        s.grad_B[i] += sums[2 * part * all + i];
        s.grad_C[i] += sums[(2 * part + 1) * all + i];
      }
    }
  }
}

}  // namespace

// The recurrence with a limit on the norm of each head's state: see `longrnn/ops/scan/limit.py`.
//
//   ĥ_t = a_t h_{t−1} + u_t Bᵀ_t,   h_t = s_t ĥ_t,   s_t = min(1, limit / ‖ĥ_t‖)
//
// Notable choices:
// - A chunk of a head is computed as the plain recurrence where the triangle inequality shows that no
//   state reaches the limit, first with the norms of the inputs, then with those of their sums.
// - Otherwise the scales are computed first, from ⟨u_i, u_j⟩ ⟨B_i, B_j⟩ and from what B reads of the
//   state at the chunk's start. With them, it is the plain recurrence of other gains and decays.
// - A chunk is divided where the product of its scales gets so small that its inverse would overflow.

#pragma once
#include "scan.h"

namespace {

constexpr double SLACK = 1e-4;  // of comparisons with the limit, for rounding
constexpr double LEAST_PRODUCT = 1e-40;
// Norms beyond which squares leave the range of float.
constexpr double MOST_INPUT = 1e12, MOST_B = 1e6, MOST_STATE = 1e18;

template <class T> struct LimitedWork : Work<T> {
  Buffer<T> alike;    // B Bᵀ, lower triangle
  Buffer<T> among;    // u uᵀ
  Buffer<T> inputs_t;
  Buffer<T> read;     // what B reads of the state, (q, pp)
  bool alike_is_known = false;
  long q = 0;  // tokens of the chunk
  double norms[CHUNK];   // of B
  LimitedWork(long n, long p)
      : Work<T>(n, p), alike(CHUNK * CHUNK), among(CHUNK * CHUNK), inputs_t(this->pp * CHUNK), read(CHUNK * this->pp) {}
};

// Products ⟨u_i, u_t⟩ ⟨B_i, B_t⟩ times the decay from i to t at [t, i < t], in `w.among`.
template <class T>
void products_among(const Scan<T> &s, LimitedWork<T> &w, const Decays &d, long first, long q, const T *B) {
  if (!w.alike_is_known) {
    product<T>(w.q, padded<T>(w.q), s.n, {B, s.bc_token, 1}, {w.right, CHUNK}, {w.alike, CHUNK}, false, LOWER_C);
    w.alike_is_known = true;
  }
  transpose_chunk<T>(w.inputs, w.pp, q, s.p, w.inputs_t);
  product<T>(q, padded<T>(q), s.p, {w.inputs, w.pp, 1}, {w.inputs_t, CHUNK}, {w.among, CHUNK}, false, LOWER_C);
  double kept[CHUNK];
  for (long t = 0; t < q; t++) {
    d.advance(kept, t);
    const T *alike = w.alike + (first + t) * CHUNK + first;
    T *among = w.among + t * CHUNK;
    for (long i = 0; i < t; i++) among[i] *= alike[i] * T(kept[i]);
  }
}

// The scales of a chunk, and how many tokens they are for. `added` are the norms of the inputs.
template <class T>
long scales_of(const Scan<T> &s, LimitedWork<T> &w, const Decays &d, double start, const double *added,
               const double *limits, long q, const T *B, double *scales) {
  product<T>(q, w.pp, s.n, {B, s.bc_token, 1}, {w.memory, w.pp}, {w.read, w.pp}, false);
  double square = start * start, all = 1, gains[CHUNK];
  for (long t = 0; t < q; t++) {
    const T *among = w.among + t * CHUNK;
    double cross = dot<T>(w.inputs + t * w.pp, w.read + t * w.pp, w.pp) * d.before[t];
    double sums[8] = {};
    long i = 0;
    for (; i + 8 <= t; i += 8)
      for (int k = 0; k < 8; k++) sums[k] += double(among[i + k]) * gains[i + k];
    for (; i < t; i++) cross += double(among[i]) * gains[i];
    for (int k = 0; k < 8; k++) cross += sums[k];
    square = added[t] * added[t] + d.each[t] * d.each[t] * square + 2 * cross * all;
    const double limit = limits[t * s.limit_token];
    scales[t] = limit < INFINITY ? limit / std::sqrt(std::max(square, limit * limit)) : 1;
    square *= scales[t] * scales[t];
    gains[t] = 1 / all;
    all *= scales[t];
    if (all < LEAST_PRODUCT) return t + 1;
  }
  return q;
}

// Whether the triangle inequality shows that no token of a chunk reaches its limit.
template <class T>
bool within_limit(const Scan<T> &s, LimitedWork<T> &w, const Decays &d, double start, const double *added,
                  const double *limits, long first, long q, const T *B) {
  double bound = start, most = 0;
  bool is_within = true;
  for (long t = 0; t < q; t++) {
    most = std::max(most, bound = bound * d.each[t] + added[t]);
    is_within = is_within && bound * (1 + SLACK) <= limits[t * s.limit_token];
  }
  if (is_within) return true;
  products_among<T>(s, w, d, first, q, B);
  double square = 0;
  for (long t = 0; t < q; t++) {
    double cross = 0;
    for (long i = 0; i < t; i++) cross += double(w.among[t * CHUNK + i]);
    square = added[t] * added[t] + d.each[t] * d.each[t] * square + 2 * cross;
    // The slack is that of the terms, which may cancel each other.
    if (!((start * d.before[t] + std::sqrt(std::max(square, 0.0)) + SLACK * most) <= limits[t * s.limit_token])) return false;
  }
  return true;
}

// One chunk of a head. Returns whether all squares fit into float.
template <class T>
bool limited_chunk(const Scan<T> &s, LimitedWork<T> &w, long row, long head, long start, long q, const T *B,
                   const T *C) {
  if (!s.limit_token && std::isinf(s.limit[head])) {
    chunk_of_head<T>(s, w, row, head, start, q, B, C);
    return true;
  }
  for (long first = 0; first < q;) {
    const long left = q - first, at = (row * s.t + start + first) * s.h + head;
    const T *B_first = B + first * s.bc_token, *C_first = C + first * s.bc_token;
    const T *scores = w.scores + first * CHUNK + first;
    const double *limits = s.limit + (start + first) * s.limit_token + head;
    read_inputs<T>(s, w, row, head, start + first, left);
    double added[CHUNK], scales[CHUNK], logs[CHUNK];
    const double norm = std::sqrt(sum_of_squares(w.memory, s.n * w.pp));
    bool moderate = norm <= MOST_STATE;
    for (long t = 0; t < left; t++) {
      const double input = std::sqrt(dot<T>(w.inputs + t * w.pp, w.inputs + t * w.pp, w.pp));
      added[t] = input * w.norms[first + t];
      logs[t] = s.log_decay[at + t * s.h];
      moderate = moderate && input <= MOST_INPUT && w.norms[first + t] <= MOST_B && logs[t] <= 0;
    }
    if (!moderate) return false;
    const Decays plain(logs, 1, left);
    long count = left;
    if (within_limit<T>(s, w, plain, norm, added, limits, first, left, B)) {
      chunk_of_inputs<T>(s, w, plain, scores, row, head, start + first, left, B_first, C_first);
    } else {
      count = scales_of<T>(s, w, plain, norm, added, limits, left, B_first, scales);
      for (long t = 0; t < count; t++) {
        logs[t] += std::log(scales[t]);
        for (long j = 0; j < w.pp; j++) w.inputs[t * w.pp + j] *= T(scales[t]);
      }
      chunk_of_inputs<T>(s, w, Decays(logs, 1, count), scores, row, head, start + first, count, B_first, C_first);
    }
    first += count;
  }
  return true;
}

// Returns whether it could be computed: if not, squares would leave the range of float.
template <class T> int limited_scan(const Scan<T> &s) {
  int moderate = 1;
  chunks<T, LimitedWork<T>>(
      s, threads_for(double(s.b) * s.t * s.h * s.p * s.n),
      [&](LimitedWork<T> &w, long q, const T *B) {
        w.alike_is_known = false;
        w.q = q;
        for (long t = 0; t < q; t++) w.norms[t] = std::sqrt(sum_of_squares(B + t * s.bc_token, s.n));
      },
      [&](LimitedWork<T> &w, long row, long head, long start, long q, const T *B, const T *C) {
        if (!limited_chunk<T>(s, w, row, head, start, q, B, C)) {
#pragma omp atomic write
          moderate = 0;
        }
      });
  return moderate;
}

}  // namespace

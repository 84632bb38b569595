// The recurrence over the last w inputs: see `longrnn/ops/ssd/window.py`, whose algorithm and carry it
// shares.
//
// Notable choices:
// - A chunk of a head costs what it costs in the plain recurrence, one masked product with the inputs of
//   the two oldest chunks, and the sums of chunk states. Both kinds of scores, C Bᵀ with the chunk's own
//   inputs and with those, are computed once per group of heads.
// - All that comes from before the chunk is summed first, and then decayed row by row: C is not copied.
// - Inputs are read where they are, as parts of the tensors of a call or of the carry.
// - A chunk's state is written where the carry keeps it. Sums of states are read where they lie, in the
//   given carry or in the new one, so that none is copied.

#pragma once
#include <vector>

#include "scan.h"

namespace {

template <class T> struct Piece {  // inputs of one chunk
  const T *x;                  // (b, chunk, h, p)
  const T *gain, *log_decay;   // (b, chunk, h), each token after the other
  const T *B;                  // (b, chunk, g, n)
  long x_row, x_token, gain_row, B_row, B_token;
};

template <class T> struct Windowed {
  long b, t, h, p, g, n;
  long chunk, rest, between;  // of WindowShape
  long offset, slot;          // tokens in the chunk that is being filled, and its slot of `front`
  const Piece<T> *pieces;     // (between + 2 + m); of the first ones only those that some window reads
  const T *C;                 // (b, t, g, n)
  long C_row, C_token;
  const T *const *front;      // (between) states (b, h, n, pp) before the call, null where none is read
  T *const *front_after;      // after the call, null where none is written
  T *back;                    // (b, h, n, pp), changed if a chunk is completed
  double *back_decay;         // (b, h), changed as `back` is
  double *ends;               // (b, between + 2 + m, h) log decays of chunks; the last m are written
  T *y;                       // (b, t, h, p)
  T *final_state;             // (b, h, p, n)
};

constexpr long OLD = 2 * CHUNK + 16;  // columns of the two oldest chunks, and a vector more
constexpr double LEAST_LOG_DECAY = -1e4;

template <class T> struct WindowWork : Work<T> {
  Buffer<T> old_right, old_scores, old_inputs;
  Buffer<const T *> fronts;  // of the heads of one task: (heads, between)
  WindowWork(long n, long p, long fronts)
      : Work<T>(n, p), old_right(n * OLD), old_scores(CHUNK * OLD), old_inputs(OLD * this->pp), fronts(fronts) {}
};

// One chunk of the call: its tokens `offset` up to `last` are new.
struct Part {
  long index;         // among the chunks of the call
  long start;         // its first new token, in the call
  long offset, last;
  bool complete, final;
};

// NaN stays NaN.
inline double log_decay_of(double log) { return std::max(log, LEAST_LOG_DECAY); }

// to = to + exp(log_decay) from, the decay in two halves so that a long memory does not drift.
template <class T> void add_decayed(const T *add, double log_decay, const T *from, long count, T *to) {
  const double decay = std::exp(log_decay);
  const T high = T(decay), low = T(decay - double(high));
  for (long i = 0; i < count; i++) to[i] = high * from[i] + (low * from[i] + add[i]);
}

// Columns of a pair of chunks that the window of row `offset` of the chunk after them still holds.
template <class T> struct OldColumns {
  long skip[2];   // columns that have left the window, of each of the two chunks
  long count[2];
  OldColumns(const Windowed<T> &a, long offset) {
    const long first = a.chunk + 1 - a.rest + offset;
    skip[0] = std::min(a.chunk, first);
    skip[1] = first - skip[0];
    for (int k = 0; k < 2; k++) count[k] = a.chunk - skip[k];
  }
  long all() const { return count[0] + count[1]; }
};

template <class T> const T *B_of(const Windowed<T> &a, const Piece<T> &piece, long row, long group) {
  return piece.B + row * piece.B_row + group * a.n;
}

// Scores of a group: with the tokens of its own chunk up to each token, and with the old columns.
template <class T> void scores_of_group(const Windowed<T> &a, WindowWork<T> &w, const Part &part, long row, long group) {
  const long q = part.last - part.offset;
  const T *C = a.C + row * a.C_row + part.start * a.C_token + group * a.n;
  const Piece<T> *pieces = a.pieces + part.index, &own = pieces[a.between + 2];
  transpose_chunk<T>(B_of(a, own, row, group), own.B_token, part.last, a.n, w.right);
  product<T>(q, padded<T>(part.last), a.n, C, a.C_token, 1, w.right, CHUNK, w.scores, CHUNK, false,
             part.offset ? FULL : LOWER_C);
  const OldColumns<T> old(a, part.offset);
  if (!old.all()) return;
  for (int k = 0; k < 2; k++)
    transpose_chunk<T>(B_of(a, pieces[k], row, group) + old.skip[k] * pieces[k].B_token, pieces[k].B_token,
                       old.count[k], a.n, w.old_right + (k ? old.count[0] : 0), OLD);
  product<T>(q, padded<T>(old.all()), a.n, C, a.C_token, 1, w.old_right, OLD, w.old_scores, OLD, false);
  for (long i = 1; i < q; i++)
    for (long j = 0; j < std::min(i, old.all()); j++) w.old_scores[i * OLD + j] = 0;
}

// Inputs in the old columns, decayed to the start of the part's chunk, to `w.old_inputs`.
template <class T>
void read_old(const Windowed<T> &a, WindowWork<T> &w, const Part &part, long row, long head, double between) {
  const OldColumns<T> old(a, part.offset);
  double log = between;
  for (int k = 1; k >= 0; k--) {
    const Piece<T> &piece = a.pieces[part.index + k];
    const long at = row * piece.gain_row + head, first = k ? old.count[0] : 0;
    const T *x = piece.x + row * piece.x_row + head * a.p;
    for (long j = a.chunk - 1; j >= old.skip[k]; j--) {
      const double decay = std::exp(log);
      // Two factors, each in range, whose product may underflow.
      const T factor = T(decay < LEAST ? 0 : decay), gain = piece.gain[at + j * a.h];
      const T *from = x + j * piece.x_token;
      T *to = w.old_inputs + (first + j - old.skip[k]) * w.pp;
      prefetch<T>(from + a.p, a.p);  // of the next head
      for (long i = 0; i < a.p; i++) to[i] = from[i] * gain * factor;
      for (long i = a.p; i < w.pp; i++) to[i] = 0;
      log += log_decay_of(piece.log_decay[at + j * a.h]);
    }
  }
}

// What the tokens of a part read: of their own chunk, of the sums `w.memory` and of the old columns.
template <class T>
void outputs_of_head(const Windowed<T> &a, WindowWork<T> &w, const Part &part, const Decays &d, long row, long head) {
  const long q = part.last - part.offset, pp = w.pp, old = OldColumns<T>(a, part.offset).all();
  double kept[CHUNK];
  for (long i = 0; i < part.last; i++) {
    d.advance(kept, i);
    if (i < part.offset) continue;
    const T *from = w.scores + (i - part.offset) * CHUNK;
    T *to = w.weights + (i - part.offset) * CHUNK;
    for (long j = 0; j <= i; j++) to[j] = from[j] * T(kept[j]);
    const long stop = part.offset ? part.last : std::min(padded<T>(part.last), i + ROWS);
    for (long j = i + 1; j < stop; j++) to[j] = 0;
  }
  T *y = a.y + ((row * a.t + part.start) * a.h + head) * a.p;
  const bool direct = pp == a.p;
  T *out = direct ? y : static_cast<T *>(w.output);
  const long ldo = direct ? a.h * a.p : pp;
  if (a.between) {
    const T *C = a.C + row * a.C_row + part.start * a.C_token + head / (a.h / a.g) * a.n;
    product<T>(q, pp, a.n, C, a.C_token, 1, w.memory, pp, out, ldo, false);
  } else {
    for (long i = 0; i < q; i++) std::fill_n(out + i * ldo, pp, T(0));
  }
  product<T>(q, pp, old, w.old_scores, OLD, 1, w.old_inputs, pp, out, ldo, true, UPPER_A);
  for (long i = 0; i < q; i++) {
    const T factor = T(d.before[part.offset + i]);
    for (long j = 0; j < pp; j++) out[i * ldo + j] *= factor;
  }
  product<T>(q, pp, part.last, w.weights, CHUNK, 1, w.inputs, pp, out, ldo, true, part.offset ? FULL : LOWER_A);
  if (!direct)
    for (long i = 0; i < q; i++) std::memcpy(y + i * a.h * a.p, out + i * pp, a.p * sizeof(T));
}

// The state of the last token's window. `w.inputs` are decayed to that token, `w.memory` are the sums.
template <class T>
void write_final(const Windowed<T> &a, WindowWork<T> &w, const Part &part, const Decays &d, long row, long head) {
  const long group = head / (a.h / a.g), pp = w.pp;
  const Piece<T> *pieces = a.pieces + part.index, &own = pieces[a.between + 2];
  if (!a.between) std::fill_n(w.memory.data, a.n * pp, T(0));
  const OldColumns<T> first(a, part.offset), old(a, part.last - 1);
  long column = first.all() - old.all();  // columns are counted from the first token's window on
  for (int k = 0; k < 2; k++) {
    const long step = pieces[k].B_token;
    product<T>(a.n, pp, old.count[k], B_of(a, pieces[k], row, group) + old.skip[k] * step, 1, step,
               w.old_inputs + column * pp, pp, w.memory, pp, true);
    column += old.count[k];
  }
  product<T>(a.n, pp, part.last, B_of(a, own, row, group), 1, own.B_token, w.inputs, pp, w.change, pp, false);
  add_decayed<T>(w.change, d.sum, w.memory, a.n * pp, w.memory);
  write_state<T>(w.memory, a.p, a.n, pp, a.final_state + (row * a.h + head) * a.p * a.n);
}

// Moves the sums on by one complete chunk, whose inputs in `w.inputs` are decayed to its end.
// `ends` are the log decays of this chunk and of those before, `a.h` apart.
template <class T>
void slide(const Windowed<T> &a, WindowWork<T> &w, const Part &part, long row, long head, long slot,
           const T **front, const double *ends) {
  const long size = a.n * w.pp, at = (row * a.h + head) * size;
  const Piece<T> &piece = a.pieces[part.index + a.between + 2];
  const T *B = B_of(a, piece, row, head / (a.h / a.g));
  T *own = a.front_after[slot] + at, *back = a.back + at;
  double &back_decay = a.back_decay[row * a.h + head];
  product<T>(a.n, w.pp, a.chunk, B, 1, piece.B_token, w.inputs, w.pp, own, w.pp, false);
  front[slot] = own;
  if (slot + 1 < a.between) {
    if (slot == 0)
      std::memcpy(back, own, size * sizeof(T));
    else
      add_decayed<T>(own, *ends, back, size, back);
    back_decay += *ends;
    return;
  }
  // The block is complete: its states become sums to its end, and a new block starts.
  double after = 0;
  for (long j = slot - 1; j >= 0; j--) {
    after += *ends;
    ends -= a.h;
    T *to = a.front_after[j] + at;
    add_decayed<T>(front[j + 1], after, front[j], size, to);
    front[j] = to;
  }
  std::fill_n(back, size, T(0));
  back_decay = 0;
}

// One part of one head. `front` are the states of its slots.
template <class T>
void part_of_head(const Windowed<T> &a, WindowWork<T> &w, const Part &part, long chunks, long row, long head,
                  long slot, const T **front) {
  const Piece<T> &piece = a.pieces[part.index + a.between + 2];
  const long at = row * piece.gain_row + head, size = a.n * w.pp, state = (row * a.h + head) * size;
  double logs[CHUNK];
  for (long j = 0; j < part.last; j++) logs[j] = log_decay_of(piece.log_decay[at + j * a.h]);
  const Decays d(logs, 1, part.last);
  double *end = a.ends + (row * (a.between + 2 + chunks) + part.index + a.between + 2) * a.h + head, between = 0;
  for (long k = 1; k <= a.between; k++) between += end[-k * a.h];
  *end = d.sum;
  read_rows<T>(piece.x + row * piece.x_row + head * a.p, piece.x_token, piece.gain + at, a.h, part.last, a.p, w.pp, w.inputs);
  read_old<T>(a, w, part, row, head, between);
  if (a.between) add_decayed<T>(a.back + state, a.back_decay[row * a.h + head], front[slot], size, w.memory);
  outputs_of_head<T>(a, w, part, d, row, head);
  scale_rows<T>(w.inputs, w.pp, d.after, part.last, w.pp, w.inputs);
  if (part.final) write_final<T>(a, w, part, d, row, head);
  if (part.complete && a.between) slide<T>(a, w, part, row, head, slot, front, end);
}

template <class T> void windowed_scan(const Windowed<T> &a) {
  const int threads = threads_for(double(a.b) * a.t * a.h * a.p * a.n);
  const long r = a.h / a.g, each = heads_per_task(r, a.b * a.g, threads), parts = (r + each - 1) / each;
  const long chunks = (a.offset + a.t + a.chunk - 1) / a.chunk, pp = padded<T>(a.p);
  PerThread<WindowWork<T>> works(threads, a.n, a.p, each * a.between);
#pragma omp parallel num_threads(threads)
  {
    WindowWork<T> &w = works.mine();
#pragma omp for schedule(static)
    for (long task = 0; task < a.b * a.g * parts; task++) {
      const long row = task / (a.g * parts), group = task / parts % a.g;
      const long first = group * r + task % parts * each, last = std::min(group * r + r, first + each);
      for (long head = first; head < last; head++)
        for (long j = 0; j < a.between; j++)
          w.fronts[(head - first) * a.between + j] = a.front[j] ? a.front[j] + (row * a.h + head) * a.n * pp : nullptr;
      for (long i = 0; i < chunks; i++) {
        Part part{i, i ? i * a.chunk - a.offset : 0, i ? 0 : a.offset, std::min(a.chunk, a.offset + a.t - i * a.chunk),
                  false, i + 1 == chunks};
        part.complete = part.last == a.chunk;
        scores_of_group<T>(a, w, part, row, group);
        const long slot = a.between ? (a.slot + i) % a.between : 0;
        for (long head = first; head < last; head++)
          part_of_head<T>(a, w, part, chunks, row, head, slot, w.fronts + (head - first) * a.between);
      }
    }
  }
}

}  // namespace

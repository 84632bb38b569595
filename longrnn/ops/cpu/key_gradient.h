// The gradient of the delta rule and of recurrences with decays per key, token by token from the last one.
//
// A token multiplies the state S before it by its decays a, and adds u Bᵀ with u = gain (x − e). The delta rule
// erases e = S (a ∘ B), the plain recurrence nothing. With g the gradient of y, G that of the state S' after
// the token, and r = −gain Sᵀ du in the delta rule, else 0:
//
//   G = G + g Cᵀ,   dC = S'ᵀ g,   du = G B,   dB = Gᵀ u + a ∘ r,   dx = gain du,   dgain = du · (x − e),
//   d log a = a ∘ (r ∘ B + Σ over channels of G ∘ S),   G before the token = G diag(a) − gain du (a ∘ B)ᵀ.
//
// Notable choices:
// - A task is one head. The states at the starts of its segments are computed first; then, from the last segment
//   to the first, those at every token, for a few channels at a time, so that they stay in the second cache
//   until they are read: no channel of a state reads another.
// - B and C are of every head (g = h), so that no two tasks add to the same gradient.

#pragma once
#include <deque>
#include "key_decays.h"

namespace {

constexpr long SEGMENT_TOKENS = 64, PART_CHANNELS = 8;

template <class T> struct KeyGradientWork {  // of one thread
  std::deque<KeyDecays<T>> decays;  // of the tokens of a segment; a deque, because buffers cannot move
  Buffer<T> starts, states;         // (segment, p, n), and (token + 1, channel, n) of a part of a segment
  Buffer<T> missing, y;             // x - e (token, channel), outputs that nobody reads; also of a whole token
  Buffer<T> grad, erased, kept;     // G (p, n); r; the gradient of a without r
  KeyGradientWork(long p, long n, long segments)
      : starts(segments * p * n), states((SEGMENT_TOKENS + 1) * PART_CHANNELS * n),
        missing(std::max(p, SEGMENT_TOKENS * PART_CHANNELS)), y(p), grad(p * n), erased(n), kept(n) {
    for (long i = 0; i < SEGMENT_TOKENS; i++) decays.emplace_back(n);
  }
};

template <class T> struct KeyToken {  // one token of one head
  const T *x, *B, *C, *log_decay;
  T gain;
  long at;  // index of gain
  KeyToken(const Scan<T> &s, long row, long head, long i, bool per_key) : at((row * s.t + i) * s.h + head) {
    const long shared = row * s.bc_row + i * s.bc_token + head * s.n;
    x = s.x + row * s.x_row + i * s.x_token + head * s.p;
    B = s.B + shared;
    C = s.C + shared;
    gain = s.gain[at];
    log_decay = s.log_decay + at * (per_key ? s.n : 1);
  }
};

// The tokens of a segment of one head.
template <class T, bool DELTA> struct KeySegment {
  const ScanGradient<T> &s;
  KeyGradientWork<T> &w;
  const long row, head, start, count;
  const bool per_key;

  KeyToken<T> token(long i) const { return KeyToken<T>(s.of, row, head, start + i, per_key); }
  const T *first_state() const { return w.starts + start / SEGMENT_TOKENS * s.of.p * s.of.n; }
  void read_decays() const {
    for (long i = 0; i < count; i++) {
      const KeyToken<T> of = token(i);
      w.decays[i].read(s.of.n, of.log_decay, per_key, DELTA ? of.B : nullptr);
    }
  }
  // The state after the segment, which is written after that before it.
  void advance() const {
    const long p = s.of.p, n = s.of.n;
    T *state = w.starts + (start / SEGMENT_TOKENS + 1) * p * n;
    std::memcpy(state, first_state(), p * n * sizeof(T));
    for (long i = 0; i < count; i++) {
      const KeyToken<T> of = token(i);
      one_key_token<T, DELTA>(p, n, of.x, of.gain, w.decays[i], of.B, of.C, state, state, w.y, w.missing);
    }
  }
  // The gradients of some channels.
  void gradient(long first, long channels) const {
    const long n = s.of.n, size = channels * n;
    std::memcpy(w.states, first_state() + first * n, size * sizeof(T));
    for (long i = 0; i < count; i++) {
      const KeyToken<T> of = token(i);
      one_key_token<T, DELTA>(channels, n, of.x + first, of.gain, w.decays[i], of.B, of.C, w.states + i * size,
                              w.states + (i + 1) * size, w.y, w.missing + i * PART_CHANNELS);
    }
    for (long i = count - 1; i >= 0; i--) token_gradient(i, first, channels);
  }
  void token_gradient(long i, long first, long channels) const;
};

// `COUNT` channels of one token: their part of G, and what they add to r, to the gradient of a, dB and dC.
template <class T, bool DELTA, int COUNT>
void channels_of_token(long n, const KeyToken<T> &token, const KeyDecays<T> &d, const T *g, const T *missing,
                       const T *before, const T *after, KeyGradientWork<T> &w, long channel, T *grad_x, T &grad_gain,
                       T *grad_B, T *grad_C) {
  T *grad = w.grad + channel * n;
  Sum<T> sums[COUNT];
  each<T>(0, n, [&](auto zero, long j) {
    using V = decltype(zero);
    const V B = read<V>(token.B + j), C = read<V>(token.C + j);
    V read_out = read<V>(grad_C + j);
    for (int c = 0; c < COUNT; c++) {
      const V now = read<V>(grad + c * n + j) + g[c] * C;
      write(grad + c * n + j, now);
      read_out += g[c] * read<V>(after + c * n + j);
      sums[c].add(now * B);
    }
    write(grad_C + j, read_out);
  });
  T added[COUNT], change[COUNT];  // u, and gain du
  for (int c = 0; c < COUNT; c++) {
    const T grad_u = sums[c].total();
    added[c] = token.gain * missing[c];
    change[c] = grad_x[c] = token.gain * grad_u;
    grad_gain += grad_u * missing[c];
  }
  each<T>(0, n, [&](auto zero, long j) {
    using V = decltype(zero);
    const V whole = read<V>(d.whole + j), rest = read<V>(d.rest + j);
    V keys = read<V>(grad_B + j), kept = read<V>(w.kept + j), erased = zero;
    for (int c = 0; c < COUNT; c++) {
      const V now = read<V>(grad + c * n + j), old = read<V>(before + c * n + j);
      keys += added[c] * now;
      kept += old * now;
      V decayed = rest * now;
      if constexpr (DELTA) {
        erased -= change[c] * old;
        decayed -= change[c] * read<V>(d.decayed + j);
      }
      write(grad + c * n + j, whole * now + decayed);
    }
    write(grad_B + j, keys);
    write(w.kept + j, kept);
    if constexpr (DELTA) write(w.erased + j, read<V>(w.erased + j) + erased);
  });
}

template <class T, bool DELTA>
void KeySegment<T, DELTA>::token_gradient(long i, long first, long channels) const {
  const long p = s.of.p, n = s.of.n, size = channels * n;
  const KeyToken<T> of = token(i);
  const KeyDecays<T> &d = w.decays[i];
  const T *g = s.grad_y + of.at * p + first, *missing = w.missing + i * PART_CHANNELS;
  const T *before = w.states + i * size, *after = before + size;
  T *grad_x = s.grad_x + of.at * p + first;
  T *grad_B = s.grad_B + of.at * n, *grad_C = s.grad_C + of.at * n;
  std::fill(w.erased.data, w.erased + n, T(0));
  std::fill(w.kept.data, w.kept + n, T(0));
  each_channels(channels, [&](auto count, long c) {
    channels_of_token<T, DELTA, count>(n, of, d, g + c, missing + c, before + c * n, after + c * n, w, first + c,
                                       grad_x + c, s.grad_gain[of.at], grad_B, grad_C);
  });
  T *grad_log = s.grad_log_decay + of.at * (per_key ? n : 1);
  Sum<T> sum;
  each<T>(0, n, [&](auto zero, long j) {
    using V = decltype(zero);
    const V decay = read<V>(d.whole + j) + read<V>(d.rest + j), erased = read<V>(w.erased + j);
    const V grad = decay * (read<V>(w.kept + j) + erased * read<V>(of.B + j));
    write(grad_B + j, read<V>(grad_B + j) + decay * erased);
    if (per_key) write(grad_log + j, read<V>(grad_log + j) + grad);
    else sum.add(grad);
  });
  if (!per_key) *grad_log += sum.total();
}

// The gradients of gain, log_decay, B and C are added to what is there.
template <class T, bool DELTA> int gradient_by_tokens(const ScanGradient<T> &s, bool per_key) {
  const Scan<T> &of = s.of;
  const long size = of.p * of.n, segments = (of.t + SEGMENT_TOKENS - 1) / SEGMENT_TOKENS;
  const int threads = threads_for(4 * double(of.b) * of.t * of.h * size);
  PerThread<KeyGradientWork<T>> works(threads, of.p, of.n, segments);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long task = 0; task < of.b * of.h; task++) {
    KeyGradientWork<T> &w = works.mine();
    const auto segment = [&](long start) {
      const long count = std::min(SEGMENT_TOKENS, of.t - start);
      return KeySegment<T, DELTA>{s, w, task / of.h, task % of.h, start, count, per_key};
    };
    std::memcpy(w.starts, of.state + task * size, size * sizeof(T));
    for (long start = 0; start + SEGMENT_TOKENS < of.t; start += SEGMENT_TOKENS) {
      segment(start).read_decays();
      segment(start).advance();
    }
    if (s.grad_final) std::memcpy(w.grad, s.grad_final + task * size, size * sizeof(T));
    else std::fill(w.grad.data, w.grad + size, T(0));
    for (long start = (segments - 1) * SEGMENT_TOKENS; start >= 0; start -= SEGMENT_TOKENS) {
      segment(start).read_decays();
      for (long first = 0; first < of.p; first += PART_CHANNELS)
        segment(start).gradient(first, std::min(PART_CHANNELS, of.p - first));
    }
    std::memcpy(s.grad_state + task * size, w.grad, size * sizeof(T));
  }
  return 1;
}

template <class T> int delta_gradient(const ScanGradient<T> &s) { return gradient_by_tokens<T, true>(s, false); }
template <class T> int key_delta_gradient(const ScanGradient<T> &s) { return gradient_by_tokens<T, true>(s, true); }
template <class T> int key_scan_gradient(const ScanGradient<T> &s) { return gradient_by_tokens<T, false>(s, true); }

}  // namespace

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
#include "tokens.h"

namespace {

constexpr long SEGMENT_TOKENS = 64, PART_CHANNELS = 8;

template <class T> struct KeyGradientWork {  // of one thread
  std::deque<TokenDecays<T>> decays;  // of the tokens of a segment; a deque, because buffers cannot move
  Buffer<T> starts, states;           // (segment, p, n), and (token + 1, channel, n) of a part of a segment
  Buffer<T> missing, y;               // x - e (token, channel), outputs that nobody reads; also of a whole token
  Buffer<T> grad, erased, kept;       // G (p, n); r; the gradient of a without r
  KeyGradientWork(long p, long n, long segments)
      : starts(segments * p * n), states((SEGMENT_TOKENS + 1) * PART_CHANNELS * n),
        missing(std::max(p, SEGMENT_TOKENS * PART_CHANNELS)), y(p), grad(p * n), erased(n), kept(n) {
    for (long i = 0; i < SEGMENT_TOKENS; i++) decays.emplace_back(n);
  }
};

// The tokens of a segment of one head.
template <class T, bool DELTA> struct KeySegment {
  const ScanGradient<T> &s;
  KeyGradientWork<T> &w;
  const long row, head, start, count;

  Token<T> token(long i) const { return Token<T>(s.of, row, head, start + i); }
  const T *first_state() const { return w.starts + start / SEGMENT_TOKENS * s.of.p * s.of.n; }
  void read_decays() const {
    for (long i = 0; i < count; i++) w.decays[i].read(s.of, token(i), DELTA);
  }
  // The state after the segment, which is written after that before it.
  void advance() const {
    const long p = s.of.p, n = s.of.n;
    T *state = w.starts + (start / SEGMENT_TOKENS + 1) * p * n;
    std::memcpy(state, first_state(), p * n * sizeof(T));
    for (long i = 0; i < count; i++)
      advance_token<T, DELTA>(token(i), w.decays[i], {p, n, state, state, w.y, w.missing});
  }
  // The gradients that channels add to.
  void clear_sums() const {
    for (long i = 0; i < count; i++) {
      const long at = token(i).at;
      s.grad_gain[at] = 0;
      std::fill_n(s.grad_log_decay + at * s.of.decays, s.of.decays, T(0));
      std::fill_n(s.grad_B + at * s.of.n, s.of.n, T(0));
      std::fill_n(s.grad_C + at * s.of.n, s.of.n, T(0));
    }
  }
  // The gradients of some channels.
  void gradient(long first, long channels) const {
    const long n = s.of.n, size = channels * n;
    std::memcpy(w.states, first_state() + first * n, size * sizeof(T));
    for (long i = 0; i < count; i++) {
      Token<T> part = token(i);
      part.x += first;
      T *before = w.states + i * size;
      advance_token<T, DELTA>(part, w.decays[i],
                              {channels, n, before, before + size, w.y, w.missing + i * PART_CHANNELS});
    }
    for (long i = count - 1; i >= 0; i--) token_gradient(i, first, channels);
  }

  void token_gradient(long i, long first, long channels) const {
    const long n = s.of.n;
    const Token<T> of = token(i);
    const TokenDecays<T> &d = w.decays[i];
    std::fill(w.erased.data, w.erased + n, T(0));
    std::fill(w.kept.data, w.kept + n, T(0));
    each_channels(channels, [&](auto count, long c) {
      const T *before = w.states + (i * channels + c) * n, *missing = w.missing + i * PART_CHANNELS + c;
      channels_gradient<count>(i, first + c, missing, before, before + channels * n);
    });
    T *grad_log = s.grad_log_decay + of.at * s.of.decays, *grad_B = s.grad_B + of.at * n;
    Sum<T> sum;
    each<T>(0, n, [&](auto zero, long j) {
      using V = decltype(zero);
      const V decay = read<V>(d.whole + j) + read<V>(d.rest + j), erased = read<V>(w.erased + j);
      const V grad = decay * (read<V>(w.kept + j) + erased * read<V>(of.B + j));
      write(grad_B + j, read<V>(grad_B + j) + decay * erased);
      if (s.of.decays > 1) write(grad_log + j, read<V>(grad_log + j) + grad);
      else sum.add(grad);
    });
    if (s.of.decays == 1) *grad_log += sum.total();
  }

  // COUNT channels of one token: their part of G, and what they add to r, to the gradient of a, dB and dC.
  template <int COUNT>
  void channels_gradient(long i, long channel, const T *missing, const T *before, const T *after) const {
    const long n = s.of.n;
    const Token<T> of = token(i);
    const TokenDecays<T> &d = w.decays[i];
    const T *g = s.grad_y + of.at * s.of.p + channel;
    T *grad_x = s.grad_x + of.at * s.of.p + channel, *grad = w.grad + channel * n;
    T *grad_B = s.grad_B + of.at * n, *grad_C = s.grad_C + of.at * n;
    Sum<T> sums[COUNT];
    each<T>(0, n, [&](auto zero, long j) {
      using V = decltype(zero);
      const V B = read<V>(of.B + j), C = read<V>(of.C + j);
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
      added[c] = of.gain * missing[c];
      change[c] = grad_x[c] = of.gain * grad_u;
      s.grad_gain[of.at] += grad_u * missing[c];
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
};

template <class T, bool DELTA> void gradient_by_tokens(const ScanGradient<T> &s) {
  const Scan<T> &of = s.of;
  const long size = of.p * of.n, segments = (of.t + SEGMENT_TOKENS - 1) / SEGMENT_TOKENS;
  const int threads = threads_for(4 * double(of.b) * of.t * of.h * size);
  PerThread<KeyGradientWork<T>> works(threads, of.p, of.n, segments);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long task = 0; task < of.b * of.h; task++) {
    KeyGradientWork<T> &w = works.mine();
    const auto segment = [&](long start) {
      return KeySegment<T, DELTA>{s, w, task / of.h, task % of.h, start, std::min(SEGMENT_TOKENS, of.t - start)};
    };
    std::memcpy(w.starts, of.state + task * size, size * sizeof(T));
    for (long start = 0; start + SEGMENT_TOKENS < of.t; start += SEGMENT_TOKENS) {
      segment(start).read_decays();
      segment(start).advance();
    }
    std::memcpy(w.grad, s.grad_final + task * size, size * sizeof(T));
    for (long start = (segments - 1) * SEGMENT_TOKENS; start >= 0; start -= SEGMENT_TOKENS) {
      segment(start).read_decays();
      segment(start).clear_sums();
      for (long first = 0; first < of.p; first += PART_CHANNELS)
        segment(start).gradient(first, std::min(PART_CHANNELS, of.p - first));
    }
    std::memcpy(s.grad_state + task * size, w.grad, size * sizeof(T));
  }
}

template <class T> void delta_gradient(const ScanGradient<T> &s) { return gradient_by_tokens<T, true>(s); }

}  // namespace

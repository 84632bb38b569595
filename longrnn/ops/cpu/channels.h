// The recurrence of heads of one channel, in which every key decays at a rate of its own (Mamba-1).
//
//     h_t = exp(step_t rate + log_keep) h_{t−1} + gain_t x_t B_tᵀ,   y_t = h_t · C_t
//
// Notable choices:
// - A vector holds one key of W neighbouring channels. So no vector is summed over its entries, and any number
//   of keys is fast. The decays, (b, t, h, n) numbers, exist in registers only.
// - A decay is 0 or 1 plus a remainder: see `tiles.h`.
// - The backward pass keeps one state per SPAN tokens, and computes the others again.

#pragma once
#include "tokens.h"

namespace {

constexpr long SPAN = 32;  // tokens of a segment of the backward pass
// Sums of squares in float that are neither rounded to 0 nor infinite, and the least limit that they serve.
constexpr double LEAST_SQUARE = 1e-30, MOST_SQUARE = 1e30, LEAST_LIMIT = 1e-15;

// exp(l) = whole + rest, where whole is 0 or 1.
template <class T> struct Factor {
  Vec<T> whole, rest;
  explicit Factor(Vec<T> log_decay) { split_decay(log_decay, whole, rest); }
  Vec<T> of(Vec<T> v) const { return whole * v + rest * v; }
};

// The first `count` of W numbers, and 0 for the others.
template <class T> inline Vec<T> read_channels(const T *from, long count) {
  if (count == Lane<T>::W) return load<T>(from);
  Vec<T> v{};
  for (long i = 0; i < count; i++) v[i] = from[i];
  return v;
}
template <class T> inline void write_channels(T *to, Vec<T> v, long count) {
  if (count == Lane<T>::W) return store<T>(to, v);
  for (long i = 0; i < count; i++) to[i] = v[i];
}

// W neighbouring channels of one row, all of one group, with their states and rates by key.
template <class T> struct ChannelBlock {
  static constexpr int W = Lane<T>::W;
  const Channels<T> &s;
  long row, group, first, count;
  T *rates;  // (n, W)
  long known = 0;  // tokens that y and C do not have

  ChannelBlock(const Channels<T> &s, long row, long group, long number, T *rates)
      : s(s), row(row), group(group), first(group * (s.h / s.g) + number * W),
        count(std::min<long>(W, s.h / s.g - number * W)), rates(rates) {
    read_keys(s.rate + first * s.n, rates);
  }
  static long number(const Channels<T> &s) { return (s.h / s.g + W - 1) / W; }

  void read_keys(const T *from, T *to) const {  // (channels, n) to (n, W)
    for (long j = 0; j < s.n; j++)
      for (long i = 0; i < W; i++) to[j * W + i] = i < count ? from[i * s.n + j] : T(0);
  }
  void write_keys(const T *from, T *to) const {
    for (long i = 0; i < count; i++)
      for (long j = 0; j < s.n; j++) to[i * s.n + j] = from[j * W + i];
  }
  long states_at() const { return (row * s.h + first) * s.n; }
  long at(long token) const { return (row * s.capacity + token) * s.h + first; }
  Vec<T> read(const T *tensor, long token) const { return read_channels<T>(tensor + at(token), count); }
  void write(T *tensor, long token, Vec<T> v) const { write_channels<T>(tensor + at(token), v, count); }
  long keys_at(long token) const { return ((row * s.capacity + token) * s.g + group) * s.n; }
  long output(long token) const { return row * (s.t - known) + token - known; }  // its place in y and C
  const T *queries(long token) const { return s.C + (output(token) * s.g + group) * s.n; }
  T *outputs(long token) const { return s.y + output(token) * s.h + first; }
  Vec<T> log_keep(long token) const {
    return s.log_keep ? read_channels<T>(s.log_keep + (row * s.t + token) * s.keep_token + first, count) : Vec<T>{};
  }
  Factor<T> factor(Vec<T> step, long key, Vec<T> log_keep) const {
    return Factor<T>(step * load<T>(rates + key * W) + log_keep);
  }

  // Rescales the states of one token whose norms are above the limit. Returns the scales.
  Vec<T> limited(Vec<T> squares, T *state) const {
    Vec<T> scales = Vec<T>{} + T(1);
    bool is_within = true;
    for (long i = 0; i < count; i++) {
      const double limit = s.limit[first + i], square = squares[i];
      if (square <= std::min(limit * limit, MOST_SQUARE) && limit >= LEAST_LIMIT) continue;
      is_within = false;
      if (square >= LEAST_SQUARE && square <= MOST_SQUARE) {
        scales[i] = T(limit / std::max(std::sqrt(square), limit));
      } else if (limit < INFINITY) {
        Buffer<double> numbers(s.n);
        for (long j = 0; j < s.n; j++) numbers[j] = double(state[j * W + i]);
        scales[i] = T(scale_of<double>(numbers, s.n, limit, dot<double>(numbers, numbers, s.n)));
      }
    }
    for (long j = 0; !is_within && j < s.n; j++) store<T>(state + j * W, load<T>(state + j * W) * scales);
    return scales;
  }

  // One token. Returns y, and writes the new state, which may be in the place of the old one.
  template <bool LIMITED = false> Vec<T> advance(long token, const T *before, T *after) const {
    const Vec<T> u = read(s.x, token) * read(s.gain, token), step = read(s.step, token), keep = log_keep(token);
    const T *B = s.B + keys_at(token), *C = queries(token);
    Vec<T> y{}, squares{};
    for (long j = 0; j < s.n; j++) {
      const Vec<T> old = load<T>(before + j * W);
      const Factor<T> decay = factor(step, j, keep);
      const Vec<T> now = decay.whole * old + (decay.rest * old + u * B[j]);
      store<T>(after + j * W, now);
      y += now * C[j];
      if constexpr (LIMITED) squares += now * now;
    }
    if constexpr (LIMITED) y *= limited(squares, after);
    return y;
  }
};

// One token of each row as a call of `by_tokens`, with the given decays, (b, h, n) or those of the steps.
template <class T> Scan<T> as_scan(const Channels<T> &s, const T *log_decay) {
  Scan<T> token{};
  token.b = s.b, token.t = 1, token.h = s.h, token.p = 1, token.g = s.g, token.n = token.decays = s.n;
  token.x = {s.x, s.h, s.h}, token.gain = s.gain, token.log_decay = log_decay;
  token.B = {s.B, s.g * s.n, s.g * s.n}, token.C = {s.C, s.g * s.n, s.g * s.n};
  token.state = s.state, token.final_state = s.final_state, token.y = s.y;
  token.limit = s.limit;
  return token;
}

// One token of each row: vectors hold keys of one channel, as they are in memory.
template <class T> void one_channel_token(const Channels<T> &s) {
  const long size = s.h * s.n;
  Buffer<T> log_decay(s.b * size);
#pragma omp parallel for schedule(static) num_threads(threads_for(double(s.b) * size))
  for (long task = 0; task < s.b * s.h; task++) {
    const long row = task / s.h, channel = task % s.h;
    const T log_keep = s.log_keep ? s.log_keep[row * s.keep_token + channel] : T(0), *rate = s.rate + channel * s.n;
    for (long j = 0; j < s.n; j++) log_decay[task * s.n + j] = s.step[task] * rate[j] + log_keep;
  }
  by_tokens<T, false>(as_scan<T>(s, log_decay));
}

template <class T> void channels(const Channels<T> &s) {
  constexpr int W = Lane<T>::W;
  if (s.t == 1) return one_channel_token<T>(s);
  const long blocks = ChannelBlock<T>::number(s);
  const int threads = threads_for(16.0 * s.b * s.t * s.h * s.n);
  PerThread<Buffer<T>> all_rates(threads, s.n * W), all_states(threads, s.n * W);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long task = 0; task < s.b * s.g * blocks; task++) {
    const ChannelBlock<T> block(s, task / (s.g * blocks), task / blocks % s.g, task % blocks, all_rates.mine());
    T *state = all_states.mine();
    block.read_keys(s.state + block.states_at(), state);
    for (long token = 0; token < s.t; token++) {
      const Vec<T> y = s.limit ? block.template advance<true>(token, state, state) : block.advance(token, state, state);
      write_channels<T>(block.outputs(token), y, block.count);
    }
    block.write_keys(state, s.final_state + block.states_at());
  }
}

template <class T> struct WindowedWork {  // of one thread, for one block of channels
  Buffer<T> rates, state, sum, since;
  WindowedWork(long n, long most) : rates(n), state(n), sum(n), since(most) {}
};

// The log decay of one key over `tokens` tokens with the summed steps `step`, as a factor.
template <class T> inline Vec<T> decay_over(Vec<T> step, Vec<T> rate, Vec<T> log_keep) {
  const Vec<T> log = step * rate + log_keep;
  return log < T(FLOOR) ? Vec<T>{} : exponential(log);
}

// Tokens [start, stop) of a block of channels, at most a window, from the tokens of the window before them.
//
// The window of token r has the tokens of this span up to r, and those before the span that are after r - window.
// The latter are summed from the newest to the oldest, each decayed to the border, and read with the decay from there.
template <class T>
void windowed_span(const WindowedChannels<T> &call, const ChannelBlock<T> &block, WindowedWork<T> &w, long start,
                   long stop) {
  constexpr int W = Lane<T>::W;
  const Channels<T> &s = call.of;
  const Vec<T> log_keep = block.log_keep(0);
  std::fill_n(w.state.data, s.n * W, T(0));
  std::fill_n(w.sum.data, s.n * W, T(0));
  double steps[W] = {};
  for (long t = start; t < stop; t++) {
    const Vec<T> step = block.read(s.step, t);
    for (int i = 0; i < W; i++) steps[i] += double(step[i]), w.since[(t - start) * W + i] = T(steps[i]);
    write_channels<T>(block.outputs(t), block.advance(t, w.state, w.state), block.count);
  }
  std::fill_n(steps, W, 0.0);
  long next = start - 1;  // the newest token that is not in the sum
  for (long t = stop - 1; t >= start; t--) {
    for (; next >= 0 && next > t - call.window; next--) {
      const Vec<T> u = block.read(s.x, next) * block.read(s.gain, next), step = block.read(s.step, next);
      const T *B = s.B + block.keys_at(next);
      Vec<T> total;
      for (int i = 0; i < W; i++) total[i] = T(steps[i]), steps[i] += double(step[i]);
      const Vec<T> keep = log_keep * T(start - 1 - next);
      for (long j = 0; j < s.n; j++)
        store<T>(w.sum + j * W, load<T>(w.sum + j * W) + decay_over<T>(total, load<T>(w.rates + j * W), keep) * (u * B[j]));
    }
    if (next == start - 1) continue;
    const Vec<T> since = load<T>(w.since + (t - start) * W), keep = log_keep * T(t - start + 1);
    const T *C = block.queries(t);
    Vec<T> y = read_channels<T>(block.outputs(t), block.count);
    for (long j = 0; j < s.n; j++)
      y += decay_over<T>(since, load<T>(w.rates + j * W), keep) * load<T>(w.sum + j * W) * C[j];
    write_channels<T>(block.outputs(t), y, block.count);
  }
}

// The recurrence over the last `window` tokens: y of the tokens after the first `known`. C has those alone.
template <class T> void windowed_channels(const WindowedChannels<T> &call) {
  constexpr int W = Lane<T>::W;
  const Channels<T> &s = call.of;
  const long blocks = ChannelBlock<T>::number(s), most = std::min(call.window, s.t - call.known);
  const int threads = threads_for(48.0 * s.b * s.t * s.h * s.n);
  PerThread<WindowedWork<T>> works(threads, s.n * W, most * W);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long task = 0; task < s.b * s.g * blocks; task++) {
    WindowedWork<T> &w = works.mine();
    ChannelBlock<T> block(s, task / (s.g * blocks), task / blocks % s.g, task % blocks, w.rates);
    block.known = call.known;
    for (long start = call.known; start < s.t; start += call.window)
      windowed_span<T>(call, block, w, start, std::min(s.t, start + call.window));
  }
}

template <class T> struct ChannelsWork {  // of one thread, for one row and group
  Buffer<T> rates, starts, states, grad_states, grad_rates, grad_B, grad_C;
  ChannelsWork(long n, long blocks, long spans)
      : rates(blocks * n), starts(spans * blocks * n), states((SPAN + 1) * n), grad_states(blocks * n),
        grad_rates(blocks * n), grad_B(SPAN * n), grad_C(SPAN * n) {}
};

// The gradients of tokens [start, stop) of a block, from that of the state after them, in `grad_state`.
template <class T>
void span_gradient(const ChannelsGradient<T> &g, const ChannelBlock<T> &block, ChannelsWork<T> &w, long start,
                   long stop, const T *before, T *grad_state, T *grad_rate) {
  constexpr int W = Lane<T>::W;
  const Channels<T> &s = g.of;
  const long size = s.n * W;
  std::memcpy(w.states, before, size * sizeof(T));
  for (long t = start; t < stop; t++) block.advance(t, w.states + (t - start) * size, w.states + (t - start + 1) * size);
  for (long t = stop - 1; t >= start; t--) {
    const Vec<T> x = block.read(s.x, t), gain = block.read(s.gain, t), step = block.read(s.step, t);
    const Vec<T> keep = block.log_keep(t);
    const Vec<T> u = x * gain, grad_y = block.read(g.grad_y, t);
    // An infinite step, which starts a document, has no gradient: 0 · ∞ would be NaN.
    const Vec<T> finite = step < T(INFINITY) ? step : Vec<T>{};
    const T *B = s.B + block.keys_at(t), *C = s.C + block.keys_at(t);
    Vec<T> grad_u{}, grad_step{};
    for (long j = 0; j < s.n; j++) {
      const long at = (t - start) * size + j * W;
      const Vec<T> old = load<T>(w.states + at), now = load<T>(w.states + at + size);
      const Vec<T> grad = load<T>(grad_state + j * W) + grad_y * C[j];
      store<T>(w.grad_C + at, load<T>(w.grad_C + at) + grad_y * now);
      store<T>(w.grad_B + at, load<T>(w.grad_B + at) + grad * u);
      grad_u += grad * B[j];
      const Vec<T> decayed = block.factor(step, j, keep).of(grad), grad_log = decayed * old;
      grad_step += grad_log * load<T>(block.rates + j * W);
      store<T>(grad_rate + j * W, load<T>(grad_rate + j * W) + grad_log * finite);
      store<T>(grad_state + j * W, decayed);
    }
    block.write(g.grad_x, t, grad_u * gain);
    block.write(g.grad_gain, t, grad_u * x);
    block.write(g.grad_step, t, grad_step);
  }
}

template <class T> void channels_gradient(const ChannelsGradient<T> &g) {
  constexpr int W = Lane<T>::W;
  const Channels<T> &s = g.of;
  const long blocks = ChannelBlock<T>::number(s), size = s.n * W, spans = (s.t + SPAN - 1) / SPAN;
  const int threads = std::min<long>(threads_for(16.0 * s.b * s.t * s.h * s.n), s.b * s.g);
  PerThread<ChannelsWork<T>> works(threads, size, blocks, spans);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long task = 0; task < s.b * s.g; task++) {
    const long row = task / s.g, group = task % s.g;
    ChannelsWork<T> &w = works.mine();
    std::fill_n(w.grad_rates.data, blocks * size, T(0));
    const auto block_of = [&](long number) { return ChannelBlock<T>(s, row, group, number, w.rates + number * size); };
    for (long number = 0; number < blocks; number++) {
      const ChannelBlock<T> block = block_of(number);
      T *state = w.states, *grad_state = w.grad_states + number * size;
      block.read_keys(s.state + block.states_at(), state);
      for (long t = 0; t < s.t; t++) {
        if (t % SPAN == 0) std::memcpy(w.starts + (t / SPAN * blocks + number) * size, state, size * sizeof(T));
        block.advance(t, state, state);
      }
      block.read_keys(g.grad_final + block.states_at(), grad_state);
    }
    for (long span = spans - 1; span >= 0; span--) {
      const long start = span * SPAN, stop = std::min(s.t, start + SPAN);
      std::fill_n(w.grad_B.data, SPAN * size, T(0));
      std::fill_n(w.grad_C.data, SPAN * size, T(0));
      for (long number = 0; number < blocks; number++)
        span_gradient<T>(g, block_of(number), w, start, stop, w.starts + (span * blocks + number) * size,
                         w.grad_states + number * size, w.grad_rates + number * size);
      for (long t = start; t < stop; t++)
        for (long j = 0; j < s.n; j++) {
          const long to = ((row * s.t + t) * s.g + group) * s.n + j, from = (t - start) * size + j * W;
          g.grad_B[to] = lane_sum<T>(load<T>(w.grad_B + from));
          g.grad_C[to] = lane_sum<T>(load<T>(w.grad_C + from));
        }
    }
    for (long number = 0; number < blocks; number++) {
      const ChannelBlock<T> block = block_of(number);
      block.write_keys(w.grad_states + number * size, g.grad_state + block.states_at());
      block.write_keys(w.grad_rates + number * size, g.grad_rates + block.states_at());
    }
  }
}

}  // namespace

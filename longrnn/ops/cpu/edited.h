// One token per row under an edit: other steps, limits of norms, and windows. See `longrnn/cells/edit.py`.

#pragma once
#include <limits>
#include "mixed.h"
#include "parts.h"
#include "scan.h"

namespace {

// The weight of a token is 0 below this log decay.
constexpr double LEAST_LOG = -60;

// An edit has rows of one number per head, by `Number`.

// The rate A of a head, which is finite because 0 times an infinite rate would be NaN.
inline float edited_rate(const double *edit, long h, long head, float A_log) {
  const double rate = std::exp(double(A_log) * edit[POWER * h + head] + edit[LOG_RATE * h + head]);
  return -float(std::min(rate, double(std::numeric_limits<float>::max())));
}

// The step of a head, which is dt before, and the gain of its input.
inline void change_step(const double *edit, long h, long head, float &step, float &gain) {
  const bool ignored = double(step) <= edit[LARGEST_IGNORED * h + head];
  step = ignored ? 0.0f : step * float(edit[STEP * h + head]);
  gain = step * float(edit[ADD * h + head]);
}

// The convolution of the input of one token per row, `step` apart. It writes the next state.
inline void convolve_token(const States<float> &states, const Mixed &conv_weight, const Mixed &conv_bias, long rows,
                           long c, long k, const float *x, long step, float *y) {
  const Wide<float> before(states.conv, rows * (k - 1) * c), weight(conv_weight, c * k), bias(conv_bias, c);
  Buffer<float> taps(k * c);
  Narrowed<float> after(states.conv_after, rows * (k - 1) * c);
  for (long i = 0; i < c; i++)
    for (long tap = 0; tap < k; tap++) taps[tap * c + i] = weight[i * k + tap];
  Convolution<float> s{};
  s.b = rows, s.t = 1, s.c = c, s.k = k;
  s.x = {x, step, step};
  s.state = before, s.weight = taps, s.bias = bias, s.y = y, s.final_state = after;
  convolution<float>(s);
}

// to += factor from
template <class T> inline void add(T factor, const T *from, long n, T *to) {
  long i = 0;
  for (; i + Lane<T>::W <= n; i += Lane<T>::W) store<T>(to + i, load<T>(to + i) + factor * load<T>(from + i));
  for (; i < n; i++) to[i] += factor * from[i];
}

template <class T> struct WindowWork {  // of one thread
  Buffer<T> x, B, logs, weights;
  Buffer<double> total;
  WindowWork(long length, long count, long groups, long p, long n)
      : x(count * p), B(groups * n), logs(padded<T>(count)), weights(length * padded<T>(count)),
        total(count) {}
};

// Writes the inputs of the token behind those of the window. `s.log_decay` may have steps instead.
template <class T> void remember(const Scan<T> &s, const Window<T> &w, long row) {
  const long *heads = static_cast<const long *>(w.heads);
  const long each = w.count / w.groups, at = row * w.capacity + w.length - 1;
  for (long i = 0; i < w.count; i++) {
    write<T>(w.x, (at * w.count + i) * s.p, s.p, s.x.at(row, 0) + heads[i] * s.p);
    w.gain[at * w.count + i] = s.gain[row * s.h + heads[i]];
    w.decay[at * w.count + i] = s.log_decay[row * s.h + heads[i]];
  }
  for (long i = 0; i < w.groups; i++)
    write<T>(w.B, (at * w.groups + i) * s.n, s.n, s.B.at(row, 0) + heads[i * each] / (s.h / s.g) * s.n);
}

// y of the windowed heads [first, last): attention to the tokens of the window. Weights are computed from the
// newest token to the oldest, and x is read in the order of memory.
template <class T>
void attend(const Scan<T> &s, const Window<T> &w, WindowWork<T> &work, long row, long first, long last) {
  const long *heads = static_cast<const long *>(w.heads);
  const long each = w.count / w.groups, count = last - first, step = padded<T>(count), start = row * w.capacity;
  std::fill_n(work.total.data, count, 0.0);
  std::fill_n(work.logs.data, step, T(0));
  for (long t = w.length - 1; t >= 0; t--) {
    const T *gain = w.gain + (start + t) * w.count + first, *log_decay = w.decay + (start + t) * w.count + first;
    const T *B = numbers<T>(w.B, (start + t) * w.groups * s.n, w.groups * s.n, work.B);
    T *weights = work.weights + t * step;
    for (long i = 0; i < count; i++) work.logs[i] = T(work.total[i]), work.total[i] += double(log_decay[i]);
    for (long i = 0; i < step; i += Lane<T>::W) store<T>(weights + i, exponential(load<T>(work.logs + i)));
    for (long group = first / each; group * each < last; group++) {
      const long from = std::max(first, group * each) - first, to = std::min(last, (group + 1) * each) - first;
      const T *C = s.C.at(row, 0) + heads[group * each] / (s.h / s.g) * s.n;
      const T score = dot<T>(C, B + group * s.n, s.n);
      for (long i = from; i < to; i++) weights[i] = work.logs[i] < LEAST_LOG ? T(0) : weights[i] * gain[i] * score;
    }
  }
  for (long i = first; i < last; i++) std::fill_n(s.y + (row * s.h + heads[i]) * s.p, s.p, T(0));
  for (long t = 0; t < w.length; t++) {
    const T *x = numbers<T>(w.x, ((start + t) * w.count + first) * s.p, count * s.p, work.x);
    for (long i = 0; i < count; i++, x += s.p) {
      prefetch<T>(x + 2 * w.count * s.p, s.p);
      if (const T weight = work.weights[t * step + i]; weight != T(0))
        add<T>(weight, x, s.p, s.y + (row * s.h + heads[first + i]) * s.p);
    }
  }
}

// Copies the states of the heads of a window, which do not change, over those of a computation of all heads.
template <class T> void keep_windowed(const Scan<T> &s, const Window<T> &w) {
  const long *heads = static_cast<const long *>(w.heads), size = s.p * s.n;
  for (long task = 0; task < s.b * w.count; task++) {
    const long at = (task / w.count * s.h + heads[task % w.count]) * size;
    std::memcpy(s.final_state + at, s.state + at, size * sizeof(T));
  }
}

// One token per row, in which the heads of a window attend to it, and the others have the limits of `s`.
template <class T> void edited_token(const Scan<T> &s, const Window<T> &w) {
  if (s.final_state) {  // null if all heads have a window
    by_tokens<T, false>(s);
    keep_windowed<T>(s, w);
  }
  if (!w.count) return;
  const int threads = threads_for(double(s.b) * w.length * w.count * s.p);
  const long parts = std::min<long>(threads, w.count), each = (w.count + parts - 1) / parts;
  PerThread<WindowWork<T>> works(threads, w.length, w.count, w.groups, s.p, s.n);
  for (long row = 0; row < s.b; row++) remember<T>(s, w, row);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long task = 0; task < s.b * parts; task++) {
    const long first = task % parts * each, last = std::min(w.count, first + each);
    if (first < last) attend<T>(s, w, works.mine(), task / parts, first, last);
  }
}

}  // namespace

// The gradient of everything between the projections of a Mamba-2.
//
// Notable choices:
// - The forward pass keeps its input and the output of the recurrence. The convolution is computed again.
// - Gradients of weights are sums over all tokens: see `convolution_gradient.h`.

#pragma once
#include "cell.h"
#include "convolution_gradient.h"
#include "scan_gradient.h"

namespace {

template <class T> struct GateWork {
  Buffer<T> inner, silu, slope, gated, grad_weight;
  explicit GateWork(long d) : inner(d), silu(d), slope(d), gated(d), grad_weight(d) {}
};

// One token of `gate`. `grad_weight` is added to. Writes the gradients of z and of scanned + D x.
template <class T>
void gate_gradient(const Cell<T> &s, GateWork<T> &w, const T *grad_y, const T *scanned, const T *x, const T *z, T *grad_inner,
                   T *grad_z) {
  const long d = s.d(), size = d / s.g;
  for (long head = 0; head < s.h; head++)
    for (long i = head * s.p; i < head * s.p + s.p; i++) w.inner[i] = scanned[i] + s.D[head] * x[i];
  for (long group = 0; group < s.g; group++) {
    const long first = group * size, last = first + size;
    Sum<T> squares, crosses;
    each<T>(first, last, [&](auto zero, long i) {
      using V = decltype(zero);
      const V gate = read<V>(z + i), open = sigmoid(gate), silu = gate * open;
      const V gated = read<V>(w.inner + i) * silu;
      write<V>(w.silu + i, silu);
      write<V>(w.slope + i, open + silu * (T(1) - open));
      write<V>(w.gated + i, gated);
      squares.add(gated * gated);
      crosses.add(read<V>(grad_y + i) * read<V>(s.norm_weight + i) * gated);
    });
    const T scale = T(1) / std::sqrt(squares.total() / T(size) + s.norm_eps);
    const T back = crosses.total() * scale * scale * scale / T(size);
    each<T>(first, last, [&](auto zero, long i) {
      using V = decltype(zero);
      const V scaled = read<V>(grad_y + i) * scale, gated = read<V>(w.gated + i);
      write<V>(w.grad_weight + i, read<V>(w.grad_weight + i) + scaled * gated);
      const V grad_gated = scaled * read<V>(s.norm_weight + i) - gated * back;
      write<V>(grad_inner + i, grad_gated * read<V>(w.silu + i));
      write<V>(grad_z + i, grad_gated * read<V>(w.inner + i) * read<V>(w.slope + i));
    });
  }
}

// The gradients of scanned, of z, and of x through D. `sums` (threads, d + h) gets those of the norm's
// weight and of D.
template <class T>
void gate_gradients(const Cell<T> &s, const CellGradient<T> &to, const T *mixed, T *grad_scanned, T *grad_mixed,
                    double *sums, int threads) {
  const long d = s.d(), c = s.c(), tokens = s.b * s.t, blocks = (tokens + TOKENS - 1) / TOKENS;
  PerThread<GateWork<T>> works(threads, d);
#pragma omp parallel num_threads(threads)
  {
    GateWork<T> &w = works.mine();
    double *mine = sums + thread_number() * (d + s.h);
#pragma omp for schedule(static)
    for (long block = 0; block < blocks; block++) {
      std::fill(w.grad_weight.data, w.grad_weight + d, T(0));
      for (long token = block * TOKENS; token < std::min(tokens, (block + 1) * TOKENS); token++) {
        const T *x = mixed + token * c;
        T *grad_inner = grad_scanned + token * d, *grad_x = grad_mixed + token * c;
        gate_gradient<T>(s, w, to.grad_y + token * d, to.of.scanned + token * d, x,
                         s.projected + token * s.width(), grad_inner, to.grad_projected + token * s.width());
        for (long head = 0; head < s.h; head++) {
          Sum<T> products;
          each<T>(head * s.p, head * s.p + s.p, [&](auto zero, long i) {
            using V = decltype(zero);
            const V grad = read<V>(grad_inner + i);
            write<V>(grad_x + i, grad * s.D[head]);
            products.add(grad * read<V>(x + i));
          });
          mine[d + head] += double(products.total());
        }
      }
      for (long i = 0; i < d; i++) mine[i] += double(w.grad_weight[i]);
    }
  }
}

// The gradients of dt's projection, dt_bias and A_log, from those of dt and dt A.
template <class T>
void steps_gradient(const Cell<T> &s, const CellGradient<T> &to, const T *dt, const T *slope, const T *grad_dt,
                    const T *grad_log) {
  Buffer<double> bias(s.h), rate(s.h);
  std::fill(bias.data, bias + s.h, 0.0);
  std::fill(rate.data, rate + s.h, 0.0);
  for (long token = 0; token < s.b * s.t; token++)
    for (long head = 0; head < s.h; head++) {
      const long at = token * s.h + head;
      const T grad_raw = (grad_dt[at] + grad_log[at] * s.A[head]) * slope[at];
      to.grad_projected[token * s.width() + s.d() + s.c() + head] = grad_raw;
      bias[head] += double(grad_raw);
      rate[head] += double(grad_log[at]) * double(dt[at]);
    }
  for (long head = 0; head < s.h; head++) {
    to.grad_dt_bias[head] = T(bias[head]);
    to.grad_A_log[head] = T(rate[head] * double(s.A[head]));  // A = −exp(A_log) is its own derivative
  }
}

template <class T> int cell_gradient(const CellGradient<T> &to) {
  const Cell<T> s(to.of);
  const long d = s.d(), c = s.c(), tokens = s.b * s.t;
  const int threads = threads_for(double(tokens) * d * 64);
  T *mixed = to.work, *grad_mixed = mixed + tokens * c, *grad_scanned = grad_mixed + tokens * c;
  T *dt = grad_scanned + tokens * d, *log_decay = dt + tokens * s.h, *slope = log_decay + tokens * s.h;
  T *grad_dt = slope + tokens * s.h, *grad_log = grad_dt + tokens * s.h;
  Buffer<double> sums(threads * (d + s.h));
  convolve<T>(s.convolution(mixed, nullptr), threads);
  steps<T>(s, dt, log_decay, slope);
  std::fill(sums.data, sums + threads * (d + s.h), 0.0);
  gate_gradients<T>(s, to, mixed, grad_scanned, grad_mixed, sums, threads);
  for (long i = 0; i < d + s.h; i++) {
    double sum = 0;
    for (int thread = 0; thread < threads; thread++) sum += sums[thread * (d + s.h) + i];
    (i < d ? to.grad_norm_weight[i] : to.grad_D[i - d]) = T(sum);
  }
  scan_gradient<T>({s.recurrence(mixed, dt, log_decay, to.of.state, nullptr, nullptr), grad_scanned,
                    to.grad_state_after, grad_mixed, s.t * c, c, 1, grad_dt, grad_log, grad_mixed + d,
                    grad_mixed + d + s.g * s.n, s.t * c, c, to.grad_state});
  steps_gradient<T>(s, to, dt, slope, grad_dt, grad_log);
  convolution_gradient<T>({s.convolution(nullptr, nullptr), grad_mixed, to.grad_conv_after, to.grad_projected + d,
                           s.t * s.width(), s.width(), to.grad_conv, to.grad_conv_weight, to.grad_conv_bias});
  return 1;
}

}  // namespace

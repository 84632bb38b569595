// The gradient of everything between the projections of a Mamba-2.
//
// Notable choices:
// - The forward pass keeps its input and the output of the recurrence. The convolution is computed again.
// - Gradients of weights are sums over all tokens: they are summed over TOKENS in the dtype of the
//   tensors, and these sums in double.

#pragma once
#include "cell.h"
#include "scan_gradient.h"

namespace {

constexpr long TOKENS = 64;

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

// The columns [i, i + lanes of V) of the convolution's gradient, K taps, or s.k where K is 0.
template <class V, int K, class T>
void columns_gradient(const Cell<T> &s, const CellGradient<T> &to, const T *grad_mixed, long i) {
  constexpr long LANES = sizeof(V) / sizeof(T);
  const long c = s.c(), width = s.width(), k = K ? K : s.k, taps = k - 1;
  const Convolution<T> convolution = s.convolution(nullptr, nullptr);
  double grad_weight[LANES][MAX_TAPS + 1] = {};  // of the taps, then of the bias
  V weight[MAX_TAPS];
  for (long tap = 0; tap < k; tap++) weight[tap] = read<V>(s.taps + tap * c + i);
  const V bias = to.of.conv_bias.data ? read<V>(s.conv_bias + i) : V{};
  for (long row = 0; row < s.b; row++) {
    V inputs[MAX_TAPS], pending[MAX_TAPS] = {};  // of the tokens that the filter covers
    for (long tap = 0; tap < taps; tap++) inputs[tap + 1] = read<V>(input_of(convolution, row, tap - taps) + i);
    // The gradient of the input `at` tokens after the first of the row.
    const auto gradient = [&](long at) {
      return at < 0 ? to.grad_conv + (row * taps + at + taps) * c + i
                    : to.grad_projected + (row * s.t + at) * width + s.d() + i;
    };
    for (long begin = 0; begin < s.t; begin += TOKENS) {
      V sums[MAX_TAPS + 1] = {};
      for (long at = begin; at < std::min(s.t, begin + TOKENS); at++) {
        for (long tap = 0; tap < taps; tap++) inputs[tap] = inputs[tap + 1];
        inputs[taps] = read<V>(input_of(convolution, row, at) + i);
        V sum = bias;
        for (long tap = 0; tap < k; tap++) sum += weight[tap] * inputs[tap];
        const V open = sigmoid(sum);
        const V grad_sum = read<V>(grad_mixed + (row * s.t + at) * c + i) * open * (T(1) + sum * (T(1) - open));
        for (long tap = 0; tap < k; tap++) {
          sums[tap] += grad_sum * inputs[tap];
          pending[tap] += grad_sum * weight[tap];
        }
        sums[k] += grad_sum;
        write<V>(gradient(at - taps), pending[0]);
        for (long tap = 0; tap < taps; tap++) pending[tap] = pending[tap + 1];
        pending[taps] = V{};
      }
      for (long tap = 0; tap <= k; tap++)
        for (long lane = 0; lane < LANES; lane++) {
          T sum;
          std::memcpy(&sum, reinterpret_cast<const char *>(&sums[tap]) + lane * sizeof(T), sizeof(T));
          grad_weight[lane][tap] += double(sum);
        }
    }
    for (long tap = 0; tap < taps; tap++) {  // the last inputs are the state afterwards too
      const V kept = to.grad_conv_after ? read<V>(to.grad_conv_after + (row * taps + tap) * c + i) : V{};
      write<V>(gradient(s.t + tap - taps), pending[tap] + kept);
    }
  }
  for (long lane = 0; lane < LANES; lane++) {
    for (long tap = 0; tap < k; tap++) to.grad_conv_weight[(i + lane) * k + tap] = T(grad_weight[lane][tap]);
    if (to.grad_conv_bias) to.grad_conv_bias[i + lane] = T(grad_weight[lane][k]);
  }
}

template <class T> void convolution_gradient(const Cell<T> &s, const CellGradient<T> &to, const T *grad_mixed, int threads) {
  constexpr int W = Lane<T>::W;
  const long c = s.c(), vectors = c / W;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long block = 0; block < vectors + c % W; block++) {
    const long i = block < vectors ? block * W : vectors * W + block - vectors;
    if (block >= vectors) columns_gradient<T, 0, T>(s, to, grad_mixed, i);
    else if (s.k == 4) columns_gradient<Vec<T>, 4, T>(s, to, grad_mixed, i);
    else columns_gradient<Vec<T>, 0, T>(s, to, grad_mixed, i);
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
  convolution_gradient<T>(s, to, grad_mixed, threads);
  return 1;
}

}  // namespace

// The gradient of the convolution with its activation, which is computed again.
//
// Gradients of weights are sums over all tokens: they are summed over TOKENS in the dtype of the tensors, and
// these sums in double.

#pragma once
#include "parts.h"

namespace {

constexpr long TOKENS = 64;

// The columns [i, i + lanes of V) of the convolution's gradient, K taps, or s.k where K is 0.
template <class V, int K, class T> void columns_gradient(const ConvolutionGradient<T> &to, long i) {
  constexpr long LANES = sizeof(V) / sizeof(T);
  const Convolution<T> &s = to.of;
  const long c = s.c, k = K ? K : s.k, taps = k - 1;
  double grad_weight[LANES][MAX_TAPS + 1] = {};  // of the taps, then of the bias
  V weight[MAX_TAPS];
  for (long tap = 0; tap < k; tap++) weight[tap] = read<V>(s.weight + tap * c + i);
  const V bias = s.bias ? read<V>(s.bias + i) : V{};
  for (long row = 0; row < s.b; row++) {
    V inputs[MAX_TAPS], pending[MAX_TAPS] = {};  // of the tokens that the filter covers
    for (long tap = 0; tap < taps; tap++) inputs[tap + 1] = read<V>(input_of(s, row, tap - taps) + i);
    // The gradient of the input `at` tokens after the first of the row.
    const auto gradient = [&](long at) {
      return at < 0 ? to.grad_state + (row * taps + at + taps) * c + i
                    : to.grad_x + (row * s.t + at) * c + i;
    };
    for (long begin = 0; begin < s.t; begin += TOKENS) {
      V sums[MAX_TAPS + 1] = {};
      for (long at = begin; at < std::min(s.t, begin + TOKENS); at++) {
        for (long tap = 0; tap < taps; tap++) inputs[tap] = inputs[tap + 1];
        inputs[taps] = read<V>(input_of(s, row, at) + i);
        V sum = bias;
        for (long tap = 0; tap < k; tap++) sum += weight[tap] * inputs[tap];
        const V open = sigmoid(sum);
        const V grad_sum = read<V>(to.grad_y + (row * s.t + at) * c + i) * open * (T(1) + sum * (T(1) - open));
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
      write<V>(gradient(s.t + tap - taps), pending[tap] + read<V>(to.grad_final + (row * taps + tap) * c + i));
    }
  }
  for (long lane = 0; lane < LANES; lane++) {
    for (long tap = 0; tap < k; tap++) to.grad_weight[(i + lane) * k + tap] = T(grad_weight[lane][tap]);
    if (to.grad_bias) to.grad_bias[i + lane] = T(grad_weight[lane][k]);
  }
}

template <class T> void convolution_gradient(const ConvolutionGradient<T> &to) {
  constexpr int W = Lane<T>::W;
  const long c = to.of.c, vectors = c / W;
#pragma omp parallel for schedule(static) num_threads(threads_for(double(to.of.b) * to.of.t * c * WORK_PER_CHANNEL))
  for (long block = 0; block < vectors + c % W; block++) {
    const long i = block < vectors ? block * W : vectors * W + block - vectors;
    if (block >= vectors) columns_gradient<T, 0, T>(to, i);
    else if (to.of.k == 4) columns_gradient<Vec<T>, 4, T>(to, i);
    else columns_gradient<Vec<T>, 0, T>(to, i);
  }
}

}  // namespace

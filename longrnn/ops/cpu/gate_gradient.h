// The gradient of the gated norm, whose forward pass keeps its inputs alone.
//
// Gradients of weights are sums over all tokens: see `convolution_gradient.h`.

#pragma once
#include "convolution_gradient.h"

namespace {

template <class T> struct GateWork {  // of one thread
  Buffer<T> inner, silu, slope, gated, grad_weight;
  Buffer<double> sums;  // of the gradients of the weight, (d,), and of D, (h,)
  GateWork(long d, long h) : inner(d), silu(d), slope(d), gated(d), grad_weight(d), sums(d + h) {
    std::fill(sums.data, sums + d + h, 0.0);
  }
};

// One token; the gradients of the weight and of D are added to the work.
template <class T> void gate_gradient(const GateGradient<T> &to, GateWork<T> &w, long token) {
  const Gate<T> &s = to.of;
  const long d = s.h * s.p, size = d / s.groups;
  const T *scanned = s.scanned + token * d, *grad_y = to.grad_y + token * d;
  const T *x = s.x.at(token / s.t, token % s.t), *z = s.z.at(token / s.t, token % s.t);
  T *grad_scanned = to.grad_scanned + token * d, *grad_x = to.grad_x + token * d, *grad_z = to.grad_z + token * d;
  for (long head = 0; head < s.h; head++)
    for (long i = head * s.p; i < head * s.p + s.p; i++) w.inner[i] = scanned[i] + s.D[head] * x[i];
  for (long group = 0; group < s.groups; group++) {
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
      crosses.add(read<V>(grad_y + i) * read<V>(s.weight + i) * gated);
    });
    const T scale = T(1) / std::sqrt(squares.total() / T(size) + s.eps);
    const T back = crosses.total() * scale * scale * scale / T(size);
    each<T>(first, last, [&](auto zero, long i) {
      using V = decltype(zero);
      const V scaled = read<V>(grad_y + i) * scale, gated = read<V>(w.gated + i);
      write<V>(w.grad_weight + i, read<V>(w.grad_weight + i) + scaled * gated);
      const V grad_gated = scaled * read<V>(s.weight + i) - gated * back;
      write<V>(grad_scanned + i, grad_gated * read<V>(w.silu + i));
      write<V>(grad_z + i, grad_gated * read<V>(w.inner + i) * read<V>(w.slope + i));
    });
  }
  for (long head = 0; head < s.h; head++) {
    Sum<T> products;
    each<T>(head * s.p, head * s.p + s.p, [&](auto zero, long i) {
      using V = decltype(zero);
      const V grad = read<V>(grad_scanned + i);
      write<V>(grad_x + i, grad * s.D[head]);
      products.add(grad * read<V>(x + i));
    });
    w.sums[d + head] += double(products.total());
  }
}

template <class T> void gated_norm_gradient(const GateGradient<T> &to) {
  const Gate<T> &s = to.of;
  const long d = s.h * s.p, tokens = s.b * s.t, blocks = (tokens + TOKENS - 1) / TOKENS;
  const int threads = threads_for(double(tokens) * d * WORK_PER_CHANNEL);
  PerThread<GateWork<T>> works(threads, d, s.h);
#pragma omp parallel num_threads(threads)
  {
    GateWork<T> &w = works.mine();
#pragma omp for schedule(static)
    for (long block = 0; block < blocks; block++) {
      std::fill(w.grad_weight.data, w.grad_weight + d, T(0));
      for (long token = block * TOKENS; token < std::min(tokens, (block + 1) * TOKENS); token++)
        gate_gradient<T>(to, w, token);
      for (long i = 0; i < d; i++) w.sums[i] += double(w.grad_weight[i]);
    }
  }
  for (long i = 0; i < d + s.h; i++) {
    double sum = 0;
    for (const auto &work : works.all) sum += work->sums[i];
    (i < d ? to.grad_weight[i] : to.grad_D[i - d]) = T(sum);
  }
}

}  // namespace

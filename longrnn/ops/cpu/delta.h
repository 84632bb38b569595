// Few tokens of the gated delta rule: see `longrnn/ops/delta/definition.py`.

#pragma once
#include "scan.h"

namespace {

template <class T> int delta(const Scan<T> &s) {
  const long size = s.p * s.n;
  const int threads = threads_for(double(s.b) * s.t * s.h * size);
  PerThread<Buffer<T>> added(threads, s.p);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long task = 0; task < s.b * s.h; task++) {
    const long row = task / s.h, head = task % s.h;
    T *u = added.mine(), *after = s.final_state + task * size;
    for (long i = 0; i < s.t; i++) {
      const long at = (row * s.t + i) * s.h + head, bc = row * s.bc_row + i * s.bc_token + head / (s.h / s.g) * s.n;
      const T *v = s.x + row * s.x_row + i * s.x_token + head * s.p, *before = i ? after : s.state + task * size;
      const T decay = T(std::exp(double(s.log_decay[at])));
      for (long j = 0; j < s.p; j++) u[j] = v[j] - decay * T(dot<T>(before + j * s.n, s.B + bc, s.n));
      one_token<T>(s.p, s.n, u, s.gain[at], s.log_decay[at], s.B + bc, s.C + bc, before, after, output_of(s, row, head, i));
    }
  }
  return 1;
}

}  // namespace

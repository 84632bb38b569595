// Products of few rows: each weight is read once, in its own dtype.

#pragma once
#include "mixed.h"

namespace {

typedef uint32_t Words __attribute__((vector_size(BYTES), aligned(2), may_alias));

// bfloat16 is the upper half of a float.
inline Vec<float> as_floats(Words bits) {
  Vec<float> value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The weights of one step: as many as fit two vectors of float32.
template <bool NARROW> inline void two_vectors(const void *weight, long at, Vec<float> &first, Vec<float> &second) {
  if constexpr (NARROW) {  // two neighbours are read as one word
    const Words pairs = *reinterpret_cast<const Words *>(static_cast<const uint16_t *>(weight) + at);
    first = as_floats(pairs << 16), second = as_floats(pairs & 0xffff0000);
  } else {
    const float *from = static_cast<const float *>(weight) + at;
    first = load<float>(from), second = load<float>(from + Lane<float>::W);
  }
}

// One row of the weight times R rows of x, which is in the order of `two_vectors`. Several rows at once
// would save reads of x, and take up to twice as long: processors prefetch one stream best. Each row of x
// has several sums, because additions to a single one would wait for each other.
template <bool NARROW, int R> inline void one_output(const FewRows &s, const float *x, long row) {
  constexpr int W = Lane<float>::W, PAIRS = R <= 2 ? 2 : 1;
  const long begin = row * s.k;
  Vec<float> sums[R][2 * PAIRS] = {};
  const auto add = [&](long j, int pair) {
    Vec<float> first, second;
    two_vectors<NARROW>(s.weight.data, begin + j, first, second);
    for (int r = 0; r < R; r++) {
      sums[r][2 * pair] += first * load<float>(x + r * s.k + j);
      sums[r][2 * pair + 1] += second * load<float>(x + r * s.k + j + W);
    }
  };
  long j = 0;
  for (; j + 2 * PAIRS * W <= s.k; j += 2 * PAIRS * W)
    for (int pair = 0; pair < PAIRS; pair++) add(j + 2 * pair * W, pair);
  for (; j + 2 * W <= s.k; j += 2 * W) add(j, 0);
  for (int r = 0; r < R; r++) {
    Vec<float> whole{};
    for (const Vec<float> &part : sums[r]) whole += part;
    float sum = lane_sum<float>(whole);
    for (long at = j; at < s.k; at++) {
      float weight;
      sum += *numbers<float>(s.weight, begin + at, 1, &weight) * s.x[r * s.k + at];
    }
    s.y[r * s.m + row] = sum;
  }
}

template <bool NARROW, int R> void products_of(const FewRows &s) {
  constexpr int W = Lane<float>::W;
  Buffer<float> ordered(NARROW ? R * s.k : 0);
  for (long at = 0; NARROW && at < R * s.k; at += s.k)
    for (long j = at; j + 2 * W <= at + s.k; j += 2 * W)
      for (int i = 0; i < W; i++) {
        ordered[j + i] = s.x[j + 2 * i];
        ordered[j + W + i] = s.x[j + 2 * i + 1];
      }
  const float *x = NARROW ? ordered.data : s.x;
#pragma omp parallel for schedule(static) num_threads(threads_for(double(s.m) * s.k))
  for (long row = 0; row < s.m; row++) one_output<NARROW, R>(s, x, row);
}

// R is s.rows, as a constant.
template <bool NARROW, int R = 1> void few_rows_of(const FewRows &s) {
  if constexpr (R < FEW_ROWS)
    if (s.rows > R) return few_rows_of<NARROW, R + 1>(s);
  products_of<NARROW, R>(s);
}

// y (rows, m) = x (rows, k) weightᵀ, for a weight (m, k) in float or in bfloat16.
void few_rows(const FewRows &s) {
  s.weight.is_bfloat16 ? few_rows_of<true>(s) : few_rows_of<false>(s);
}

// y (rows, m) = x (rows, k) weightᵀ + bias
inline void project(const Mixed &weight, const Mixed &bias, long rows, long m, long k, float *x, float *y) {
  FewRows s{};
  s.rows = rows, s.m = m, s.k = k, s.weight = weight, s.x = x, s.y = y;
  few_rows(s);
  if (!bias.data) return;
  const Wide<float> wide(bias, m);
  for (long row = 0; row < rows; row++)
    for (long i = 0; i < m; i++) y[row * m + i] += wide[i];
}

}  // namespace

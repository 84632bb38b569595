// Products of few rows: each weight is read once, in its own dtype.

#pragma once
#include "simd.h"

namespace {

enum Kind : long { FLOAT16, BFLOAT16, FLOAT32 };

// y (rows, m) = x (rows, k) weightᵀ, for a weight (m, k), which is read once.
struct Few {
  long rows, m, k;
  Kind kind;
  const void *weight;
  const float *x;
  float *y;
};

typedef uint32_t Words __attribute__((vector_size(BYTES), aligned(2), may_alias));
constexpr bool in_pairs(Kind kind) { return kind == FLOAT16 || kind == BFLOAT16; }

// Numbers of 16 bits, in the low half of each word, as float.
template <Kind K> inline Vec<float> widened(Words half) {
  Words bits = K == BFLOAT16 ? half << 16 : (half & 0x7fff) << 13;
  Vec<float> value;
  std::memcpy(&value, &bits, sizeof value);
  if (K == BFLOAT16) return value;
  // float16: exponent and mantissa were moved. The exponent is corrected by a product, which also suits
  // denormal numbers, and that of infinity and NaN is set.
  value *= 0x1p112f;
  std::memcpy(&bits, &value, sizeof bits);
  bits |= (half & 0x8000) << 16;
  bits |= (half & 0x7c00) == 0x7c00 ? Words{} + 0x7f800000 : Words{};
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <Kind K> inline Vec<float> even(Words pairs) {
  return widened<K>(K == BFLOAT16 ? pairs : pairs & 0xffff);
}
template <Kind K> inline Vec<float> odd(Words pairs) {
  if (K == FLOAT16) return widened<K>(pairs >> 16);
  const Words bits = pairs & 0xffff0000;
  Vec<float> value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float total(Vec<float> v) {
  constexpr int W = Lane<float>::W;
  for (int w = W / 2; w; w /= 2)
    for (int i = 0; i < w; i++) v[i] += v[i + w];
  return v[0];
}

// The weights of one step: as many as fit two vectors of float32.
template <Kind K> inline void two_vectors(const void *weight, long at, Vec<float> &first, Vec<float> &second) {
  if constexpr (K == FLOAT32) {
    const float *from = static_cast<const float *>(weight) + at;
    first = load<float>(from), second = load<float>(from + Lane<float>::W);
  } else {  // two neighbours are read as one word, whose halves are split by masks
    const Words pairs = *reinterpret_cast<const Words *>(static_cast<const uint16_t *>(weight) + at);
    first = even<K>(pairs), second = odd<K>(pairs);
  }
}
template <Kind K> inline float one_weight(const void *weight, long at) {
  if constexpr (K == FLOAT32) return static_cast<const float *>(weight)[at];
  else return widened<K>(Words{static_cast<const uint16_t *>(weight)[at]})[0];
}

// One row of the weight times R rows of x, which is in the order of `two_vectors`. Several rows at once
// would save reads of x, and take up to twice as long: processors prefetch one stream best. Each row of x
// has several sums, because additions to a single one would wait for each other.
template <Kind K, int R> inline void one_output(const Few &s, const float *x, long row) {
  constexpr int W = Lane<float>::W, PAIRS = R <= 2 ? 2 : 1;
  const long begin = row * s.k;
  Vec<float> sums[R][2 * PAIRS] = {};
  const auto add = [&](long j, int pair) {
    Vec<float> first, second;
    two_vectors<K>(s.weight, begin + j, first, second);
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
    float sum = total(whole);
    for (long at = j; at < s.k; at++) sum += one_weight<K>(s.weight, begin + at) * s.x[r * s.k + at];
    s.y[r * s.m + row] = sum;
  }
}

template <Kind K, int R> void few_rows(const Few &s) {
  constexpr int W = Lane<float>::W;
  Buffer<float> ordered(in_pairs(K) ? R * s.k : 0);
  for (long at = 0; in_pairs(K) && at < R * s.k; at += s.k)
    for (long j = at; j + 2 * W <= at + s.k; j += 2 * W)
      for (int i = 0; i < W; i++) {
        ordered[j + i] = s.x[j + 2 * i];
        ordered[j + W + i] = s.x[j + 2 * i + 1];
      }
  const float *x = in_pairs(K) ? ordered.data : s.x;
#pragma omp parallel for schedule(static) num_threads(threads_for(double(s.m) * s.k))
  for (long row = 0; row < s.m; row++) one_output<K, R>(s, x, row);
}

template <Kind K> void few(const Few &s) {
  switch (s.rows) {
    case 1: return few_rows<K, 1>(s);
    case 2: return few_rows<K, 2>(s);
    case 3: return few_rows<K, 3>(s);
    default: return few_rows<K, 4>(s);
  }
}

void few(const Few &s) {
  switch (s.kind) {
    case FLOAT16: return few<FLOAT16>(s);
    case BFLOAT16: return few<BFLOAT16>(s);
    case FLOAT32: return few<FLOAT32>(s);
  }
}

}  // namespace

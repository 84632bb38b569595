// Small matrix products whose operands are in cache, register-blocked.

#pragma once
#include "simd.h"

namespace {

constexpr int ROWS = 6;

template <class T, int R, int N>
inline void tile(long depth, const T *a, long ai, long ak, const T *b, long ldb, T *c, long ldc, bool add) {
  constexpr int W = Lane<T>::W;
  Vec<T> sum[R][N];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < N; v++) sum[r][v] = add ? load<T>(c + r * ldc + v * W) : Vec<T>{};
  for (long k = 0; k < depth; k++) {
    Vec<T> right[N];
    for (int v = 0; v < N; v++) right[v] = load<T>(b + k * ldb + v * W);
    for (int r = 0; r < R; r++) {
      const T left = a[r * ai + k * ak];
      for (int v = 0; v < N; v++) sum[r][v] += left * right[v];
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < N; v++) store<T>(c + r * ldc + v * W, sum[r][v]);
}

// R is `count`, as a constant.
template <class T, int N, int R = ROWS>
inline void rows(long count, long depth, const T *a, long ai, long ak, const T *b, long ldb, T *c, long ldc,
                 bool add) {
  if constexpr (R > 1)
    if (count < R) return rows<T, N, R - 1>(count, depth, a, ai, ak, b, ldb, c, ldc, add);
  tile<T, R, N>(depth, a, ai, ak, b, ldb, c, ldc, add);
}

// Which parts of a product are zero or not needed: a is lower or upper triangular, or only the lower
// triangle of c is used.
enum Shape { FULL, LOWER_A, UPPER_A, LOWER_C };

// c (m, n) = a (m, k) b (k, n), or += ; n a multiple of the vector width. a[i, k] is a[i ai + k ak].
template <class T>
void product(long m, long n, long depth, const T *a, long ai, long ak, const T *b, long ldb, T *c, long ldc, bool add,
             Shape shape = FULL) {
  constexpr int W = Lane<T>::W;
  for (long i = 0; i < m; i += ROWS) {
    const long count = std::min<long>(ROWS, m - i), first = shape == UPPER_A ? i : 0;
    const long k = (shape == LOWER_A ? std::min(depth, i + count) : depth) - first;
    const long stop = shape == LOWER_C ? std::min(n, padded<T>(i + count)) : n;
    const T *left = a + i * ai + first * ak, *right = b + first * ldb;
    T *to = c + i * ldc;
    long j = 0;
    for (; j + COLUMNS * W <= stop; j += COLUMNS * W)
      rows<T, COLUMNS>(count, k, left, ai, ak, right + j, ldb, to + j, ldc, add);
    for (; j + 2 * W <= stop; j += 2 * W) rows<T, 2>(count, k, left, ai, ak, right + j, ldb, to + j, ldc, add);
    for (; j < stop; j += W) rows<T, 1>(count, k, left, ai, ak, right + j, ldb, to + j, ldc, add);
  }
}

}  // namespace

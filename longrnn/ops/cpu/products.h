// Small matrix products whose operands are in cache, register-blocked.

#pragma once
#include "simd.h"

namespace {

constexpr int ROWS = 6;

// The factors and the result of a product: entry [i, k] of the left factor is data[i row + k column].
template <class T> struct Left {
  const T *data;
  long row, column;
};
template <class T> struct Right {
  const T *data;
  long row;
};
template <class T> struct Result {
  T *data;
  long row;
};

template <class T, int R, int N> inline void tile(long depth, Left<T> a, Right<T> b, Result<T> c, bool add) {
  constexpr int W = Lane<T>::W;
  Vec<T> sum[R][N];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < N; v++) sum[r][v] = add ? load<T>(c.data + r * c.row + v * W) : Vec<T>{};
  for (long k = 0; k < depth; k++) {
    Vec<T> right[N];
    for (int v = 0; v < N; v++) right[v] = load<T>(b.data + k * b.row + v * W);
    for (int r = 0; r < R; r++) {
      const T left = a.data[r * a.row + k * a.column];
      for (int v = 0; v < N; v++) sum[r][v] += left * right[v];
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < N; v++) store<T>(c.data + r * c.row + v * W, sum[r][v]);
}

// R is `count`, as a constant.
template <class T, int N, int R = ROWS>
inline void rows(long count, long depth, Left<T> a, Right<T> b, Result<T> c, bool add) {
  if constexpr (R > 1)
    if (count < R) return rows<T, N, R - 1>(count, depth, a, b, c, add);
  tile<T, R, N>(depth, a, b, c, add);
}

// Which parts of a product are zero or not needed: a is lower or upper triangular, or only the lower
// triangle of c is used.
enum Shape { FULL, LOWER_A, UPPER_A, LOWER_C };

// c (m, n) = a (m, depth) b (depth, n), or += ; n a multiple of the vector width.
template <class T>
void product(long m, long n, long depth, Left<T> a, Right<T> b, Result<T> c, bool add, Shape shape = FULL) {
  constexpr int W = Lane<T>::W;
  for (long i = 0; i < m; i += ROWS) {
    const long count = std::min<long>(ROWS, m - i), first = shape == UPPER_A ? i : 0;
    const long k = (shape == LOWER_A ? std::min(depth, i + count) : depth) - first;
    const long stop = shape == LOWER_C ? std::min(n, padded<T>(i + count)) : n;
    const T *left = a.data + i * a.row + first * a.column, *right = b.data + first * b.row;
    T *to = c.data + i * c.row;
    long j = 0;
    for (; j + COLUMNS * W <= stop; j += COLUMNS * W)
      rows<T, COLUMNS>(count, k, {left, a.row, a.column}, {right + j, b.row}, {to + j, c.row}, add);
    for (; j + 2 * W <= stop; j += 2 * W) rows<T, 2>(count, k, {left, a.row, a.column}, {right + j, b.row}, {to + j, c.row}, add);
    for (; j < stop; j += W) rows<T, 1>(count, k, {left, a.row, a.column}, {right + j, b.row}, {to + j, c.row}, add);
  }
}

}  // namespace

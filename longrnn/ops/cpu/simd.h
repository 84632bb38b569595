// Vectors, aligned buffers, exponentials, and the number of threads of a piece of work.

#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <memory>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64, COLUMNS = 4;
#elif defined(__AVX2__)
constexpr int BYTES = 32, COLUMNS = 2;
#else
constexpr int BYTES = 16, COLUMNS = 2;
#endif

template <class T> struct Lane {
  typedef T V __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
  static constexpr int W = BYTES / sizeof(T);
};
template <class T> using Vec = typename Lane<T>::V;
template <class T> inline Vec<T> load(const T *from) { return *reinterpret_cast<const Vec<T> *>(from); }
template <class T> inline void store(T *to, Vec<T> v) { *reinterpret_cast<Vec<T> *>(to) = v; }

// Writes to aligned memory past the caches, which then need not read what is overwritten.
template <class T> inline void stream(T *to, Vec<T> v) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i *>(to), (__m512i)v);
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i *>(to), (__m256i)v);
#else
  store<T>(to, v);
#endif
}
inline void finish_streams() {  // before other threads read what was written
#ifdef __AVX2__
  _mm_sfence();
#endif
}

template <class T> inline T lane_sum(Vec<T> v) {
#ifdef __AVX512F__
  if constexpr (sizeof(T) == 4) return _mm512_reduce_add_ps((__m512)v);
  else return _mm512_reduce_add_pd((__m512d)v);
#endif
  for (int w = Lane<T>::W / 2; w; w /= 2)
    for (int i = 0; i < w; i++) v[i] += v[i + w];
  return v[0];
}

// A vector, or a single number in a remainder.
template <class V, class T> inline V read(const T *from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <class V, class T> inline void write(T *to, V value) { std::memcpy(to, &value, sizeof value); }

// Calls `body(zero, i)` for whole vectors of [first, last), then for single numbers.
template <class T, class Body> inline void each(long first, long last, Body body) {
  long i = first;
  for (; i + Lane<T>::W <= last; i += Lane<T>::W) body(Vec<T>{}, i);
  for (; i < last; i++) body(T{}, i);
}

// A sum of what `each` computes.
template <class T> struct Sum {
  Vec<T> lanes{};
  T rest = 0;
  void add(Vec<T> v) { lanes += v; }
  void add(T x) { rest += x; }
  T total() const { return rest + lane_sum<T>(lanes); }
};

template <class T> inline T dot(const T *a, const T *b, long n) {
  Sum<T> sum;
  each<T>(0, n, [&](auto zero, long i) {
    using V = decltype(zero);
    sum.add(read<V>(a + i) * read<V>(b + i));
  });
  return sum.total();
}

// Σ (a_i / unit)² in double.
template <class T> inline double sum_of_squares(const T *a, long n, double unit = 1) {
  double sums[8] = {}, sum = 0;
  const auto square = [&](long i) { return double(a[i]) / unit * (double(a[i]) / unit); };
  long i = 0;
  for (; i + 8 <= n; i += 8)
    for (int k = 0; k < 8; k++) sums[k] += square(i + k);
  for (; i < n; i++) sum += square(i);
  for (double part : sums) sum += part;
  return sum;
}

// min(1, limit / norm) of n numbers of any magnitude, from the sum of their squares; NaN if the norm is.
template <class T> double scale_of(const T *from, long n, double limit, T square) {
  if (square >= T(1e-30) && square <= T(1e30)) return limit / std::max(std::sqrt(double(square)), limit);
  double unit = 1;
  if (sizeof(T) == sizeof(double)) {  // squares of float fit a double
    double largest = 0;
    for (long i = 0; i < n; i++) largest = std::max(largest, std::abs(double(from[i])));
    if (std::isfinite(largest) && largest > 0) unit = largest;
  }
  const double norm = unit * std::sqrt(sum_of_squares(from, n, unit));
  return norm != norm ? norm : limit / std::max(norm, limit);
}

// Rescales a state of `size` numbers, whose squares have the sum `square`, and the `count` outputs that read it, if
// its norm is above a finite limit.
template <class T> void rescale(T *state, long size, T *y, long count, double limit, T square) {
  const double scale = scale_of(state, size, limit, square);
  if (scale == 1) return;
  for (long i = 0; i < size; i++) state[i] *= T(scale);
  for (long i = 0; i < count; i++) y[i] *= T(scale);
}

template <class T> inline long padded(long n) { return (n + Lane<T>::W - 1) / Lane<T>::W * Lane<T>::W; }

template <class T> struct Buffer {  // 64-byte aligned
  T *data = nullptr;
  explicit Buffer(long n) {
    void *raw = nullptr;
    if (posix_memalign(&raw, 64, std::max<size_t>(64, n * sizeof(T)))) throw std::bad_alloc();
    data = static_cast<T *>(raw);
  }
  ~Buffer() { free(data); }
  Buffer(const Buffer &) = delete;
  operator T *() const { return data; }
};

typedef int32_t Integers __attribute__((vector_size(BYTES), aligned(4), may_alias));

// exp(x) = (1 + rest) 2^whole, with rest = exp(x) - 1 where whole is 0, for |x| < 0.34; relative error 2e-7.
inline Vec<float> exponential_rest(Vec<float> x, Integers &whole) {
  x = x < -87.0f ? Vec<float>{} - 87.0f : x;
  x = x > 88.0f ? Vec<float>{} + 88.0f : x;
  const Vec<float> scaled = x * 1.44269504f;
  whole = __builtin_convertvector(scaled + (scaled < 0.0f ? Vec<float>{} - 0.5f : Vec<float>{} + 0.5f), Integers);
  const Vec<float> n = __builtin_convertvector(whole, Vec<float>);
  const Vec<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * (r * r) + r;
}
inline Vec<float> exponential_of(Vec<float> rest, Integers whole) {
  const Vec<float> p = rest + 1.0f;
  Integers bits;
  std::memcpy(&bits, &p, sizeof p);
  bits += whole << 23;
  Vec<float> result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}
inline Vec<float> exponential(Vec<float> x) {
  Integers whole;
  const Vec<float> rest = exponential_rest(x, whole);
  return exponential_of(rest, whole);
}
inline Vec<double> exponential(Vec<double> x) {
  for (int i = 0; i < Lane<double>::W; i++) x[i] = std::exp(x[i]);
  return x;
}
inline float exponential(float x) { return std::exp(x); }
inline double exponential(double x) { return std::exp(x); }
template <class V> inline V sigmoid(V x) { return 1 / (1 + exponential(-x)); }
template <class V> inline V silu(V x) { return x / (1 + exponential(-x)); }

template <class T> inline T softplus(T x) { return x > T(20) ? x : std::log1p(std::exp(x)); }

// Work below which starting threads costs more than it saves, in multiplications.
constexpr double PARALLEL_WORK = 2e5;

inline int thread_number() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// One W per thread. They are made outside of parallel regions, which no exception may leave.
template <class W> struct PerThread {
  std::vector<std::unique_ptr<W>> all;
  template <class... Sizes> explicit PerThread(int threads, Sizes... sizes) {
    for (int i = 0; i < threads; i++) all.push_back(std::make_unique<W>(sizes...));
  }
  W &mine() { return *all[thread_number()]; }
};

int threads_for(double work) {
#ifdef _OPENMP
  if (work >= PARALLEL_WORK) return omp_get_max_threads();
#endif
  return 1;
}

}  // namespace

// Fused CPU kernels of Mamba-2: the recurrence in chunks, the convolution, and the gated norm.
//
// Notable choices:
// - Plain C interface, no torch headers: it is compiled in seconds, and works with any torch version.
//   `setup.py` compiles this file once per instruction set; `longrnn.ops.native` loads the best one.
// - A chunk of a head is computed with its tiles in cache: scores C Bᵀ once per group of heads, then
//   three small products per head. Products are register-blocked vector code, whose sums are in the
//   dtype of the tensors.
// - Decays are products of exp(log_decay), running in double: no difference of two large sums loses
//   digits. The factor of the state over a chunk is 0 or 1 plus a remainder, so that a long memory does
//   not drift by a rounding that repeats.
// - Letters: b rows, t tokens, h heads, g groups that share B and C, p channels per head, n state size.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64, COLUMNS = 4;
#elif defined(__AVX2__)
constexpr int BYTES = 32, COLUMNS = 2;
#else
constexpr int BYTES = 16, COLUMNS = 2;
#endif
constexpr long CHUNK = 64;
constexpr int ROWS = 6;
// Decays below it are set to 0: their products would be denormal numbers, which are slow.
constexpr double LEAST = 1.8e-35;
// Work below which starting threads costs more than it saves, in multiplications.
constexpr double PARALLEL_WORK = 2e5;

template <class T> struct Lane {
  typedef T V __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
  static constexpr int W = BYTES / sizeof(T);
};
template <class T> using Vec = typename Lane<T>::V;
template <class T> inline Vec<T> load(const T *from) { return *reinterpret_cast<const Vec<T> *>(from); }
template <class T> inline void store(T *to, Vec<T> v) { *reinterpret_cast<Vec<T> *>(to) = v; }
template <class T> inline long padded(long n) { return (n + Lane<T>::W - 1) / Lane<T>::W * Lane<T>::W; }

template <class T> struct Buffer {  // 64-byte aligned
  T *data = nullptr;
  explicit Buffer(long n) {
    void *raw = nullptr;
    if (posix_memalign(&raw, 64, std::max<size_t>(64, n * sizeof(T)))) std::abort();
    data = static_cast<T *>(raw);
  }
  ~Buffer() { free(data); }
  Buffer(const Buffer &) = delete;
  operator T *() { return data; }
};

// ---- products -----------------------------------------------------------------------------------

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

template <class T, int N>
inline void rows(long count, long depth, const T *a, long ai, long ak, const T *b, long ldb, T *c, long ldc,
                 bool add) {
  switch (count) {
    case 6: return tile<T, 6, N>(depth, a, ai, ak, b, ldb, c, ldc, add);
    case 5: return tile<T, 5, N>(depth, a, ai, ak, b, ldb, c, ldc, add);
    case 4: return tile<T, 4, N>(depth, a, ai, ak, b, ldb, c, ldc, add);
    case 3: return tile<T, 3, N>(depth, a, ai, ak, b, ldb, c, ldc, add);
    case 2: return tile<T, 2, N>(depth, a, ai, ak, b, ldb, c, ldc, add);
    default: return tile<T, 1, N>(depth, a, ai, ak, b, ldb, c, ldc, add);
  }
}

// c (m, n) = a (m, k) b (k, n), or += ; n a multiple of the vector width. a[i, k] is a[i ai + k ak].
// `lower_a`: a is lower triangular; `lower_c`: only the lower triangle of c is needed.
template <class T>
void product(long m, long n, long depth, const T *a, long ai, long ak, const T *b, long ldb, T *c, long ldc,
             bool add, bool lower_a = false, bool lower_c = false) {
  constexpr int W = Lane<T>::W;
  for (long i = 0; i < m; i += ROWS) {
    const long count = std::min<long>(ROWS, m - i);
    const long k = lower_a ? std::min(depth, i + count) : depth;
    const long stop = lower_c ? std::min(n, padded<T>(i + count)) : n;
    const T *left = a + i * ai;
    long j = 0;
    for (; j + COLUMNS * W <= stop; j += COLUMNS * W)
      rows<T, COLUMNS>(count, k, left, ai, ak, b + j, ldb, c + i * ldc + j, ldc, add);
    for (; j + 2 * W <= stop; j += 2 * W)
      rows<T, 2>(count, k, left, ai, ak, b + j, ldb, c + i * ldc + j, ldc, add);
    for (; j < stop; j += W) rows<T, 1>(count, k, left, ai, ak, b + j, ldb, c + i * ldc + j, ldc, add);
  }
}

// ---- exponentials -------------------------------------------------------------------------------

inline Vec<float> exponential(Vec<float> x) {  // relative error 2e-7
  typedef int32_t I __attribute__((vector_size(BYTES), aligned(4), may_alias));
  x = x < -87.0f ? Vec<float>{} - 87.0f : x;
  x = x > 88.0f ? Vec<float>{} + 88.0f : x;
  const Vec<float> scaled = x * 1.44269504f;
  const I whole = __builtin_convertvector(scaled + (scaled < 0.0f ? Vec<float>{} - 0.5f : Vec<float>{} + 0.5f), I);
  const Vec<float> n = __builtin_convertvector(whole, Vec<float>);
  const Vec<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  I bits;
  std::memcpy(&bits, &p, sizeof p);
  bits += whole << 23;
  Vec<float> result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}
inline Vec<double> exponential(Vec<double> x) {
  for (int i = 0; i < Lane<double>::W; i++) x[i] = std::exp(x[i]);
  return x;
}
template <class T> inline Vec<T> silu(Vec<T> x) { return x / (T(1) + exponential(-x)); }

template <class T> inline T softplus(T x) { return x > T(20) ? x : std::log1p(std::exp(x)); }

// ---- the recurrence -----------------------------------------------------------------------------

template <class T> struct Scan {
  long b, t, h, p, g, n;
  const T *x;          // (b, t, h, p)
  long x_row, x_token;
  const T *gain;       // (b, t, h), or null for 1
  const T *log_decay;  // (b, t, h)
  const T *B, *C;      // (b, t, g, n)
  long bc_row, bc_token;
  const T *state;      // (b, h, p, n)
  T *y;                // (b, t, h, p)
  T *final_state;      // (b, h, p, n)
};

// One token of one head: state ← decay state + x Bᵀ, y = state C.
template <class T>
inline void one_token(long p, long n, const T *x, T gain, T log_decay, const T *B, const T *C, const T *before,
                      T *after, T *y) {
  constexpr int W = Lane<T>::W;
  const double decay = std::exp(double(log_decay));
  const T whole = decay < 0.5 ? T(0) : T(1);
  const T rest = decay < 0.5 ? T(decay) : T(std::expm1(double(log_decay)));
  for (long i = 0; i < p; i++) {
    const T *from = before + i * n;
    T *to = after + i * n;
    const T add = x[i] * gain;
    Vec<T> sums{};
    long j = 0;
    for (; j + W <= n; j += W) {
      const Vec<T> old = load<T>(from + j);
      const Vec<T> now = (rest * old + add * load<T>(B + j)) + whole * old;
      store<T>(to + j, now);
      sums += now * load<T>(C + j);
    }
    T sum = 0;
    for (int k = 0; k < W; k++) sum += sums[k];
    for (; j < n; j++) {
      to[j] = (rest * from[j] + add * B[j]) + whole * from[j];
      sum += to[j] * C[j];
    }
    y[i] = sum;
  }
}

template <class T> struct Work {  // tiles of one thread
  long n, pp;
  Buffer<T> right, scores, weights, inputs, scaled, memory, change, output;
  Work(long n, long p)
      : n(n), pp(padded<T>(p)), right(n * CHUNK), scores(CHUNK * CHUNK), weights(CHUNK * CHUNK),
        inputs(CHUNK * pp), scaled(CHUNK * n), memory(n * pp), change(n * pp), output(CHUNK * pp) {}
};

// One chunk of `q` tokens of one head. `w.memory` is the transposed state, (n, p padded).
template <class T>
void chunk_of_head(const Scan<T> &s, Work<T> &w, long row, long head, long start, long q, const T *B, const T *C) {
  const long qp = padded<T>(q), pp = w.pp;
  double decay[CHUNK], before[CHUNK], after[CHUNK], kept[CHUNK];
  double sum = 0, run = 1;
  for (long i = 0; i < q; i++) {
    const double log_decay = s.log_decay[(row * s.t + start + i) * s.h + head];
    decay[i] = std::exp(log_decay);
    sum += log_decay;
    run *= decay[i];
    before[i] = run < LEAST ? 0 : run;
  }
  run = 1;
  for (long i = q - 1; i >= 0; i--) {
    after[i] = run < LEAST ? 0 : run;
    run *= decay[i];
  }
  for (long i = 0; i < q; i++) {
    const T *x = s.x + row * s.x_row + (start + i) * s.x_token + head * s.p;
    const T gain = s.gain ? s.gain[(row * s.t + start + i) * s.h + head] : T(1);
    T *to = w.inputs + i * pp;
    for (long j = 0; j < s.p; j++) to[j] = x[j] * gain;
    for (long j = s.p; j < pp; j++) to[j] = 0;
  }
  for (long i = 0; i < q; i++) {  // scores times the decays from token j to token i
    for (long j = 0; j < i; j++) {
      const double one = kept[j] * decay[i];
      kept[j] = one < LEAST ? 0 : one;
    }
    kept[i] = 1;
    const T *from = w.scores + i * CHUNK;
    T *to = w.weights + i * CHUNK;
    for (long j = 0; j <= i; j++) to[j] = from[j] * T(kept[j]);
    const long stop = std::min(qp, i + ROWS);
    for (long j = i + 1; j < stop; j++) to[j] = 0;
  }
  for (long i = 0; i < q; i++) {
    const T *from = C + i * s.bc_token;
    T *to = w.scaled + i * s.n;
    const T factor = T(before[i]);
    for (long j = 0; j < s.n; j++) to[j] = from[j] * factor;
  }
  T *y = s.y + ((row * s.t + start) * s.h + head) * s.p;
  const bool direct = pp == s.p;
  T *out = direct ? y : static_cast<T *>(w.output);
  const long ldo = direct ? s.h * s.p : pp;
  product<T>(q, pp, q, w.weights, CHUNK, 1, w.inputs, pp, out, ldo, false, true);
  product<T>(q, pp, s.n, w.scaled, s.n, 1, w.memory, pp, out, ldo, true);
  if (!direct)
    for (long i = 0; i < q; i++) std::memcpy(y + i * s.h * s.p, out + i * pp, s.p * sizeof(T));
  for (long i = 0; i < q; i++) {
    const T *from = B + i * s.bc_token;
    T *to = w.scaled + i * s.n;
    const T factor = T(after[i]);
    for (long j = 0; j < s.n; j++) to[j] = from[j] * factor;
  }
  // The small changes are summed before they meet a memory that may be large.
  const double total = std::exp(sum);
  const bool keeps = total >= 0.5;
  const T rest = keeps ? T(std::expm1(sum)) : T(total < LEAST ? 0 : total);
  T *change = w.change;
  for (long i = 0; i < s.n * pp; i++) change[i] = rest * w.memory[i];
  product<T>(s.n, pp, q, w.scaled, 1, s.n, w.inputs, pp, change, pp, true);
  for (long i = 0; i < s.n * pp; i++) w.memory[i] = keeps ? w.memory[i] + change[i] : change[i];
}

int threads_for(double work) {
#ifdef _OPENMP
  return work < PARALLEL_WORK ? 1 : omp_get_max_threads();
#else
  return 1;
#endif
}

template <class T> void scan(const Scan<T> &s) {
  const long r = s.h / s.g;
  const int threads = threads_for(double(s.b) * s.t * s.h * s.p * s.n);
  if (s.t <= 2) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long task = 0; task < s.b * s.h; task++) {
      const long row = task / s.h, head = task % s.h;
      for (long i = 0; i < s.t; i++) {
        const long at = (row * s.t + i) * s.h + head, bc = row * s.bc_row + i * s.bc_token + head / r * s.n;
        T *after = s.final_state + task * s.p * s.n;
        one_token<T>(s.p, s.n, s.x + row * s.x_row + i * s.x_token + head * s.p, s.gain ? s.gain[at] : T(1),
                     s.log_decay[at], s.B + bc, s.C + bc, i ? after : s.state + task * s.p * s.n, after,
                     s.y + at * s.p);
      }
    }
    return;
  }
  // Heads of a group are divided among threads only as far as rows and groups do not suffice.
  const long parts = std::min(r, (threads + s.b * s.g - 1) / (s.b * s.g)), each = (r + parts - 1) / parts;
#pragma omp parallel num_threads(threads)
  {
    Work<T> w(s.n, s.p);
    Buffer<T> memories(each * s.n * w.pp);
#pragma omp for schedule(static)
    for (long task = 0; task < s.b * s.g * parts; task++) {
      const long row = task / (s.g * parts), group = task / parts % s.g;
      const long first = group * r + task % parts * each, last = std::min(group * r + r, first + each);
      for (long head = first; head < last; head++) {  // transposed
        const T *from = s.state + (row * s.h + head) * s.p * s.n;
        T *to = memories + (head - first) * s.n * w.pp;
        for (long j = 0; j < s.n; j++) {
          for (long i = 0; i < s.p; i++) to[j * w.pp + i] = from[i * s.n + j];
          for (long i = s.p; i < w.pp; i++) to[j * w.pp + i] = 0;
        }
      }
      T *const own = w.memory.data;
      for (long start = 0; start < s.t; start += CHUNK) {
        const long q = std::min(CHUNK, s.t - start), qp = padded<T>(q);
        const long bc = row * s.bc_row + start * s.bc_token + group * s.n;
        const T *B = s.B + bc, *C = s.C + bc;
        for (long j = 0; j < s.n; j++) {
          for (long i = 0; i < q; i++) w.right[j * CHUNK + i] = B[i * s.bc_token + j];
          for (long i = q; i < qp; i++) w.right[j * CHUNK + i] = 0;
        }
        product<T>(q, qp, s.n, C, s.bc_token, 1, w.right, CHUNK, w.scores, CHUNK, false, false, true);
        for (long head = first; head < last; head++) {
          w.memory.data = memories + (head - first) * s.n * w.pp;
          chunk_of_head<T>(s, w, row, head, start, q, B, C);
        }
      }
      w.memory.data = own;
      for (long head = first; head < last; head++) {
        T *to = s.final_state + (row * s.h + head) * s.p * s.n;
        const T *from = memories + (head - first) * s.n * w.pp;
        for (long i = 0; i < s.p; i++)
          for (long j = 0; j < s.n; j++) to[i * s.n + j] = from[j * w.pp + i];
      }
    }
  }
}

// ---- convolution and norm -----------------------------------------------------------------------

// A tensor in the dtype of the state, or in bfloat16.
struct Mixed {
  void *data;
  long is_bfloat16;
};

inline void widen(const uint16_t *from, long n, float *to) {
  for (long i = 0; i < n; i++) {
    const uint32_t bits = uint32_t(from[i]) << 16;
    std::memcpy(to + i, &bits, sizeof bits);
  }
}
inline void narrow(const float *from, long n, uint16_t *to) {  // rounds to nearest, ties to even
  for (long i = 0; i < n; i++) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof bits);
    to[i] = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}
// Only float states meet bfloat16.
inline void widen(const uint16_t *, long, double *) { std::abort(); }
inline void narrow(const double *, long, uint16_t *) { std::abort(); }

template <class T> struct Wide {  // reads a Mixed tensor
  Buffer<T> copy;
  const T *data;
  Wide(const Mixed &of, long n) : copy(of.is_bfloat16 ? n : 0), data(static_cast<const T *>(of.data)) {
    if (!of.is_bfloat16) return;
    widen(static_cast<const uint16_t *>(of.data), n, copy.data);
    data = copy.data;
  }
  operator const T *() const { return data; }
};

template <class T> struct Narrowed {  // writes a Mixed tensor when it is destroyed
  const Mixed &to;
  long n;
  Buffer<T> copy;
  Narrowed(const Mixed &to, long n) : to(to), n(n), copy(to.is_bfloat16 ? n : 0) {}
  ~Narrowed() {
    if (to.is_bfloat16) narrow(copy.data, n, static_cast<uint16_t *>(to.data));
  }
  operator T *() { return to.is_bfloat16 ? copy.data : static_cast<T *>(to.data); }
};

template <class T> struct Given {  // the arguments of a cell
  long b, t, h, p, g, n, k, norm_groups;
  T norm_eps, dt_least, dt_largest;
  const T *state;                   // (b, h, p, n)
  T *state_after;
  Mixed projected;                  // (b, t, z | x B C | dt)
  Mixed conv_weight, conv_bias;     // (c, k), (c,) or null
  Mixed dt_bias, A_log, D;          // (h,)
  Mixed norm_weight;                // (h p,)
  Mixed conv, conv_after;           // (b, k - 1, c)
  Mixed y;                          // (b, t, h p)
};

template <class T> struct Cell {
  long b, t, h, p, g, n, k, norm_groups;
  T norm_eps, dt_least, dt_largest;
  const T *projected;               // (b, t, z | x B C | dt)
  const T *conv_weight, *conv_bias; // (k, c), (c,) or null
  const T *dt_bias, *A, *D;         // (h,)
  const T *norm_weight;             // (h p,)
  const T *conv, *state;            // (b, k - 1, c), (b, h, p, n)
  T *y, *conv_after, *state_after;  // (b, t, h p), …
};

// out (b, t, c) = silu(convolution of x B C over time), continuing `conv`.
template <class T> void convolve(const Cell<T> &s, long c, long width, long offset, T *out, int threads) {
  constexpr int W = Lane<T>::W;
  const long taps = s.k - 1;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
  for (long row = 0; row < s.b; row++)
    for (long i = 0; i < s.t; i++) {
      T *to = out + (row * s.t + i) * c;
      const T *from[16];
      for (long tap = 0; tap < s.k; tap++) {
        const long at = i + tap - taps;
        from[tap] = at < 0 ? s.conv + (row * taps + at + taps) * c
                           : s.projected + (row * s.t + at) * width + offset;
      }
      long j = 0;
      for (; j + W <= c; j += W) {
        Vec<T> sum = s.conv_bias ? load<T>(s.conv_bias + j) : Vec<T>{};
        for (long tap = 0; tap < s.k; tap++) sum += load<T>(s.conv_weight + tap * c + j) * load<T>(from[tap] + j);
        store<T>(to + j, silu<T>(sum));
      }
      for (; j < c; j++) {
        T sum = s.conv_bias ? s.conv_bias[j] : T(0);
        for (long tap = 0; tap < s.k; tap++) sum += s.conv_weight[tap * c + j] * from[tap][j];
        to[j] = sum / (T(1) + std::exp(-sum));
      }
    }
  for (long row = 0; row < s.b; row++)
    for (long tap = 0; tap < taps; tap++) {
      const long at = s.t + tap - taps;
      const T *from = at < 0 ? s.conv + (row * taps + at + taps) * c
                             : s.projected + (row * s.t + at) * width + offset;
      std::memcpy(s.conv_after + (row * taps + tap) * c, from, c * sizeof(T));
    }
}

// y ← norm((y + D x) silu(z)) weight, in place.
template <class T> void gate(const Cell<T> &s, long c, long width, const T *mixed, int threads) {
  constexpr int W = Lane<T>::W;
  const long d = s.h * s.p, size = d / s.norm_groups;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long token = 0; token < s.b * s.t; token++) {
    T *y = s.y + token * d;
    const T *x = mixed + token * c, *z = s.projected + token * width;
    for (long head = 0; head < s.h; head++)
      for (long i = head * s.p; i < head * s.p + s.p; i++) y[i] += s.D[head] * x[i];
    for (long group = 0; group < s.norm_groups; group++) {
      const long first = group * size, last = first + size;
      Vec<T> squares{};
      T square = 0;
      long i = first;
      for (; i + W <= last; i += W) {
        const Vec<T> gated = load<T>(y + i) * silu<T>(load<T>(z + i));
        store<T>(y + i, gated);
        squares += gated * gated;
      }
      for (int k = 0; k < W; k++) square += squares[k];
      for (; i < last; i++) {
        y[i] *= z[i] / (T(1) + std::exp(-z[i]));
        square += y[i] * y[i];
      }
      const T scale = T(1) / std::sqrt(square / T(size) + s.norm_eps);
      for (i = first; i < last; i++) y[i] = y[i] * scale * s.norm_weight[i];
    }
  }
}

template <class T> void cell_between(const Cell<T> &s) {
  const long d = s.h * s.p, c = d + 2 * s.g * s.n, width = d + c + s.h, tokens = s.b * s.t;
  const int threads = threads_for(double(tokens) * d * 32);
  Buffer<T> mixed(tokens * c), dt(tokens * s.h), log_decay(tokens * s.h);
  convolve<T>(s, c, width, d, mixed, threads);
  for (long token = 0; token < tokens; token++)
    for (long head = 0; head < s.h; head++) {
      const T step = softplus<T>(s.projected[token * width + d + c + head] + s.dt_bias[head]);
      // Comparisons keep a NaN.
      const T limited = step < s.dt_least ? s.dt_least : step > s.dt_largest ? s.dt_largest : step;
      dt[token * s.h + head] = limited;
      log_decay[token * s.h + head] = limited * s.A[head];
    }
  scan<T>({s.b, s.t, s.h, s.p, s.g, s.n, mixed, s.t * c, c, dt, log_decay, mixed + d, mixed + d + s.g * s.n,
           s.t * c, c, s.state, s.y, s.state_after});
  gate<T>(s, c, width, mixed, threads);
}

template <class T> bool all_finite(const T *from, long n) {  // 0 times what is not finite is NaN
  constexpr int W = Lane<T>::W;
  Vec<T> sums{};
  T sum = 0;
  long i = 0;
  for (; i + W <= n; i += W) sums += load<T>(from + i) * T(0);
  for (; i < n; i++) sum += from[i] * T(0);
  for (int k = 0; k < W; k++) sum += sums[k];
  return sum == T(0);
}

// Returns whether every entry of y is finite.
template <class T> int cell(const Given<T> &s) {
  const long d = s.h * s.p, c = d + 2 * s.g * s.n, tokens = s.b * s.t, kept = s.b * (s.k - 1) * c;
  const Wide<T> projected(s.projected, tokens * (d + c + s.h)), conv(s.conv, kept);
  const Wide<T> weight(s.conv_weight, c * s.k), conv_bias(s.conv_bias, c), norm_weight(s.norm_weight, d);
  const Wide<T> dt_bias(s.dt_bias, s.h), A_log(s.A_log, s.h), D(s.D, s.h);
  Narrowed<T> y(s.y, tokens * d), conv_after(s.conv_after, kept);
  Buffer<T> taps(s.k * c), A(s.h);
  for (long i = 0; i < c; i++)
    for (long tap = 0; tap < s.k; tap++) taps[tap * c + i] = weight[i * s.k + tap];
  for (long head = 0; head < s.h; head++) A[head] = -std::exp(A_log[head]);
  cell_between<T>({s.b, s.t, s.h, s.p, s.g, s.n, s.k, s.norm_groups, s.norm_eps, s.dt_least, s.dt_largest, projected,
                   taps, conv_bias, dt_bias, A, D, norm_weight, conv, s.state, y, conv_after, s.state_after});
  return all_finite<T>(y, tokens * d);
}

// ---- products of few rows -----------------------------------------------------------------------

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
// would save reads of x, and take up to twice as long: processors prefetch one stream best.
template <Kind K, int R> inline void one_output(const Few &s, const float *x, long row) {
  constexpr int W = Lane<float>::W;
  const long begin = row * s.k;
  Vec<float> sums[R] = {};
  long j = 0;
  for (; j + 2 * W <= s.k; j += 2 * W) {
    Vec<float> first, second;
    two_vectors<K>(s.weight, begin + j, first, second);
    for (int r = 0; r < R; r++) {
      sums[r] += first * load<float>(x + r * s.k + j);
      sums[r] += second * load<float>(x + r * s.k + j + W);
    }
  }
  for (int r = 0; r < R; r++) {
    float sum = total(sums[r]);
    for (long at = j; at < s.k; at++) sum += one_weight<K>(s.weight, begin + at) * s.x[r * s.k + at];
    s.y[r * s.m + row] = sum;
  }
}

template <Kind K, int R> void few_rows(const Few &s) {
  constexpr int W = Lane<float>::W;
  Buffer<float> ordered(K == FLOAT32 ? 0 : R * s.k);
  for (long at = 0; K != FLOAT32 && at < R * s.k; at += s.k)
    for (long j = at; j + 2 * W <= at + s.k; j += 2 * W)
      for (int i = 0; i < W; i++) {
        ordered[j + i] = s.x[j + 2 * i];
        ordered[j + W + i] = s.x[j + 2 * i + 1];
      }
  const float *x = K == FLOAT32 ? s.x : ordered;
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

}  // namespace

extern "C" {
void longrnn_scan_f32(const Scan<float> *s) { scan<float>(*s); }
void longrnn_scan_f64(const Scan<double> *s) { scan<double>(*s); }
int longrnn_cell_f32(const Given<float> *s) { return cell<float>(*s); }
int longrnn_cell_f64(const Given<double> *s) { return cell<double>(*s); }
void longrnn_few(const Few *s) {
  s->kind == FLOAT32 ? few<FLOAT32>(*s) : s->kind == BFLOAT16 ? few<BFLOAT16>(*s) : few<FLOAT16>(*s);
}
}

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

template <class T> struct Cell {
  long b, t, h, p, g, n, k, norm_groups;
  const T *projected;               // (b, t, z | x B C | dt)
  const T *conv_weight, *conv_bias; // (k, c), (c,) or null
  const T *dt_bias, *A, *D;         // (h,)
  const T *norm_weight;             // (h p,)
  T norm_eps, dt_least, dt_largest;
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

template <class T> void cell(const Cell<T> &s) {
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

}  // namespace

extern "C" {
void longrnn_scan_f32(const Scan<float> *s) { scan<float>(*s); }
void longrnn_scan_f64(const Scan<double> *s) { scan<double>(*s); }
void longrnn_cell_f32(const Cell<float> *s) { cell<float>(*s); }
void longrnn_cell_f64(const Cell<double> *s) { cell<double>(*s); }
}

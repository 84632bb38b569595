// Tensors that are in the dtype of the state or in bfloat16.

#pragma once
#include "signatures.h"
#include "simd.h"

namespace {

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

// n numbers of a tensor from `at`, which are widened to `copy` if need be.
template <class T> const T *numbers(const Mixed &of, long at, long n, T *copy) {
  if (!of.is_bfloat16) return static_cast<const T *>(of.data) + at;
  widen(static_cast<const uint16_t *>(of.data) + at, n, copy);
  return copy;
}
template <class T> void write(const Mixed &to, long at, long n, const T *from) {
  if (to.is_bfloat16) narrow(from, n, static_cast<uint16_t *>(to.data) + at);
  else std::memcpy(static_cast<T *>(to.data) + at, from, n * sizeof(T));
}

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

}  // namespace

// Fields of the arguments of kernels: see signatures.py.

#pragma once

namespace {

// A tensor in the dtype of the state, or in bfloat16.
struct Mixed {
  void *data;
  long is_bfloat16;
};

// A tensor (b, t, …) whose tokens are contiguous, and how far apart its rows and tokens are.
template <class T> struct Strided {
  const T *data;
  long row, token;
  const T *at(long i, long j) const { return data + i * row + j * token; }
};

}  // namespace

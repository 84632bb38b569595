// Written by signatures.py.
#pragma once

namespace {

// A tensor in the dtype of the state, or in bfloat16.
struct Mixed {
  void *data;
  long is_bfloat16;
};

template <class T>
struct Scan {
  long b;
  long t;
  long h;
  long p;
  long g;
  long n;
  const T * x;
  long x_row;
  long x_token;
  const T * gain;
  const T * log_decay;
  const T * B;
  const T * C;
  long bc_row;
  long bc_token;
  const T * state;
  T * y;
  T * final_state;
  T * kept;
  long segment;
};

template <class T>
struct ScanGradient {
  Scan<T> of;
  const T * grad_y;
  const T * grad_final;
  T * grad_x;
  long grad_x_row;
  long grad_x_token;
  long adds_x;
  T * grad_gain;
  T * grad_log_decay;
  T * grad_B;
  T * grad_C;
  long grad_bc_row;
  long grad_bc_token;
  T * grad_state;
};

template <class T>
struct Limited {
  Scan<T> of;
  const double * limit;
  double unlimited;
};

template <class T>
struct Convolution {
  long b;
  long t;
  long c;
  long k;
  const T * x;
  long x_row;
  long x_token;
  const T * before;
  const T * weight;
  const T * bias;
  T * y;
  T * after;
};

template <class T>
struct Gate {
  long tokens;
  long h;
  long p;
  long groups;
  T eps;
  const T * scanned;
  const T * x;
  const T * z;
  long x_token;
  long z_token;
  const T * D;
  const T * weight;
  T * y;
};

template <class T>
struct CellCall {
  long b;
  long t;
  long h;
  long p;
  long g;
  long n;
  long k;
  T norm_eps;
  T dt_least;
  T dt_largest;
  const T * state;
  T * state_after;
  Mixed projected;
  Mixed conv_weight;
  Mixed conv_bias;
  Mixed dt_bias;
  Mixed A_log;
  Mixed D;
  Mixed norm_weight;
  Mixed conv;
  Mixed conv_after;
  Mixed y;
  T * scanned;
  T * kept;
  long segment;
};

template <class T>
struct CellGradient {
  long b;
  long t;
  long h;
  long p;
  long g;
  long n;
  long k;
  T norm_eps;
  T dt_least;
  T dt_largest;
  const T * projected;
  const T * conv_weight;
  const T * conv_bias;
  const T * dt_bias;
  const T * A_log;
  const T * D;
  const T * norm_weight;
  const T * conv;
  const T * state;
  T * scanned;
  T * kept;
  long segment;
  const T * grad_y;
  const T * grad_conv_after;
  const T * grad_state_after;
  T * grad_projected;
  T * grad_conv_weight;
  T * grad_conv_bias;
  T * grad_dt_bias;
  T * grad_A_log;
  T * grad_D;
  T * grad_norm_weight;
  T * grad_conv;
  T * grad_state;
  T * work;
};

template <class T>
struct Stepwise {
  long cell;
  long b;
  long t;
  long d;
  const T * projected;
  const T * weight;
  const T * bias;
  const T * h;
  const T * memory;
  T * y;
  T * h_after;
  T * memory_after;
  double keep;
  double add;
  double limit;
};

struct FewRows {
  long rows;
  long m;
  long k;
  long kind;
  const void * weight;
  float * x;
  float * y;
};

template <class T>
struct Layer {
  CellCall<T> of;
  long d;
  T eps;
  Mixed norm;
  long in_kind;
  const void * in_weight;
  Mixed in_bias;
  long out_kind;
  const void * out_weight;
  Mixed out_bias;
};

struct Stack {
  long count;
  long rows;
  const void * layers;
  const void * states;
  Mixed x;
  Mixed x_after;
};

}  // namespace

#define KERNELS(TYPED, UNTYPED) \
  TYPED(scan, Scan) \
  TYPED(scan_gradient, ScanGradient) \
  TYPED(limited_scan, Limited) \
  TYPED(convolution, Convolution) \
  TYPED(gated_norm, Gate) \
  TYPED(cell, CellCall) \
  TYPED(cell_gradient, CellGradient) \
  TYPED(stepwise, Stepwise) \
  UNTYPED(few_rows, FewRows) \
  UNTYPED(layers, Stack) \


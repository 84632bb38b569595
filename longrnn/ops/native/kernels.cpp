// Fused CPU kernels: the table of functions that `longrnn.ops.native` calls.
//
// Notable choices:
// - Plain C interface, no torch headers: it is compiled in seconds, and works with any torch version.
//   `setup.py` compiles this file once per instruction set; `longrnn.ops.native` loads the best one.
// - No exception leaves a function: a caller of C could not catch it. Memory is taken outside of parallel
//   regions, see `PerThread`.
// - One translation unit: the headers, one per topic, have internal linkage, so that two libraries in
//   one process cannot use each other's functions.

#include "cell_gradient.h"
#include "few_rows.h"
#include "layer.h"
#include "limited.h"
#include "scan_gradient.h"
#include "stepwise.h"
#include "window.h"

#ifndef LONGRNN_SOURCES
#define LONGRNN_SOURCES ""
#endif

// What a kernel returns, 1 if that is nothing, or OUT_OF_MEMORY of __init__.py.
template <class Kernel, class Arguments> int guarded(Kernel kernel, const Arguments *arguments) {
  try {
    if constexpr (std::is_void_v<decltype(kernel(*arguments))>) return kernel(*arguments), 1;
    else return kernel(*arguments);
  } catch (const std::bad_alloc &) {
    return -1;
  }
}

#define KERNEL(name, Arguments, kernel) \
  int longrnn_##name(const Arguments *arguments) { return guarded(kernel, arguments); }
#define KERNELS(name, Arguments, kernel)               \
  KERNEL(name##_f32, Arguments<float>, kernel<float>) \
  KERNEL(name##_f64, Arguments<double>, kernel<double>)

extern "C" {
const char *longrnn_sources() { return LONGRNN_SOURCES; }  // see sources.py
int longrnn_vector_bytes() { return BYTES; }
KERNELS(scan, Scan, scan)
KERNELS(limited_scan, Limited, limited_scan)
KERNELS(windowed_scan, Windowed, windowed_scan)
KERNELS(scan_gradient, ScanGradient, scan_gradient)
KERNELS(convolution, Convolution, convolution)
KERNELS(gated_norm, Gate, gated_norm)
KERNELS(cell, Given, cell)
KERNELS(cell_gradient, CellGradient, cell_gradient)
KERNELS(stepwise, Stepwise, stepwise)
KERNEL(few, Few, static_cast<void (*)(const Few &)>(few))
KERNEL(layers, Stack, layers)
}

// Fused CPU kernels: the functions that `longrnn.ops.cpu` calls, by the table in signatures.py.
//
// Notable choices:
// - Plain C interface, no torch headers: it is compiled in seconds, and works with any torch version.
//   `setup.py` compiles this file once per instruction set; `longrnn.ops.cpu` loads the best one.
// - One translation unit: the headers, one per topic, have internal linkage, so that two libraries in
//   one process cannot use each other's functions.

#include "channels.h"
#include "convolution_gradient.h"
#include "delta.h"
#include "gate_gradient.h"
#include "layers.h"
#include "scan_gradient.h"
#include "stepwise.h"

#ifndef LONGRNN_SOURCES
#define LONGRNN_SOURCES ""
#endif

namespace {

// Whether there was enough memory for the kernel `run`.
template <class Arguments> int guarded(void (*run)(const Arguments &), const void *arguments) {
  try {
    run(*static_cast<const Arguments *>(arguments));
    return 1;
  } catch (const std::bad_alloc &) {
    return 0;
  }
}

}  // namespace

#define TYPED(kernel, Arguments)                                                                              \
  int longrnn_##kernel##_f32(const void *s) { return guarded<Arguments<float>>(&kernel<float>, s); }   \
  int longrnn_##kernel##_f64(const void *s) { return guarded<Arguments<double>>(&kernel<double>, s); }
#define UNTYPED(kernel, Arguments) \
  int longrnn_##kernel(const void *s) { return guarded<Arguments>(&kernel, s); }

extern "C" {
const char *longrnn_sources() { return LONGRNN_SOURCES; }  // see signatures.py
KERNELS(TYPED, UNTYPED)
}

// Fused CPU kernels: the table of functions that `longrnn.ops.native` calls.
//
// Notable choices:
// - Plain C interface, no torch headers: it is compiled in seconds, and works with any torch version.
//   `setup.py` compiles this file once per instruction set; `longrnn.ops.native` loads the best one.
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

extern "C" {
const char *longrnn_sources() { return LONGRNN_SOURCES; }  // see sources.py
int longrnn_vector_bytes() { return BYTES; }
void longrnn_scan_f32(const Scan<float> *s) { scan<float>(*s); }
void longrnn_scan_f64(const Scan<double> *s) { scan<double>(*s); }
int longrnn_limited_scan_f32(const Limited<float> *s) { return limited_scan<float>(*s); }
int longrnn_limited_scan_f64(const Limited<double> *s) { return limited_scan<double>(*s); }
void longrnn_windowed_scan_f32(const Windowed<float> *s) { windowed_scan<float>(*s); }
void longrnn_windowed_scan_f64(const Windowed<double> *s) { windowed_scan<double>(*s); }
void longrnn_scan_gradient_f32(const ScanGradient<float> *s) { scan_gradient<float>(*s); }
void longrnn_scan_gradient_f64(const ScanGradient<double> *s) { scan_gradient<double>(*s); }
void longrnn_convolution_f32(const Convolution<float> *s) { convolution<float>(*s); }
void longrnn_convolution_f64(const Convolution<double> *s) { convolution<double>(*s); }
void longrnn_gated_norm_f32(const Gate<float> *s) { gated_norm<float>(*s); }
void longrnn_gated_norm_f64(const Gate<double> *s) { gated_norm<double>(*s); }
void longrnn_cell_f32(const Given<float> *s) { cell<float>(*s); }
void longrnn_cell_f64(const Given<double> *s) { cell<double>(*s); }
void longrnn_cell_gradient_f32(const CellGradient<float> *s) { cell_gradient<float>(*s); }
void longrnn_cell_gradient_f64(const CellGradient<double> *s) { cell_gradient<double>(*s); }
void longrnn_stepwise_f32(const Stepwise<float> *s) { stepwise<float>(*s); }
void longrnn_stepwise_f64(const Stepwise<double> *s) { stepwise<double>(*s); }
void longrnn_few(const Few *s) { few(*s); }
void longrnn_layers(const Stack *s) { layers(*s); }
}

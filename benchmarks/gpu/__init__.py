"""Correctness, speed and memory of longrnn on one GPU; run it with `python -m benchmarks.gpu`."""

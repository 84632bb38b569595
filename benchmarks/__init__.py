"""Benchmarks; `python -m benchmarks.<name> --help` describes what each one compares."""

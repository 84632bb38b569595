"""Side-by-side measurements; `python -m benchmarks.<name> --help` says what each compares."""

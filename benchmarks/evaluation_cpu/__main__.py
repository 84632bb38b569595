"""Runs the parts of the benchmark, one after another.

python -m benchmarks.evaluation_cpu                              # all parts, with their defaults
python -m benchmarks.evaluation_cpu passkey --scale 16           # one part, with its options
"""

from __future__ import annotations

import sys
from importlib import import_module

PARTS = ("passkey", "perplexity", "harness")


def main() -> None:
    """Runs the parts that are named before the first option, each with all options."""
    arguments = sys.argv[1:]
    first = next((i for i, text in enumerate(arguments) if text.startswith("-")), len(arguments))
    chosen, options = arguments[:first] or list(PARTS), arguments[first:]
    unknown = [part for part in chosen if part not in PARTS]
    if unknown or ("--help" in options and first == 0):
        print(f"{__doc__}\nparts: {', '.join(PARTS)}; PART --help shows the options of a part")
        sys.exit(2 if unknown else 0)
    for part in chosen:
        print(f"{part}:", flush=True)
        module = import_module(f"benchmarks.evaluation_cpu.{part}")
        sys.argv = [module.__file__ or part, *options]
        module.main()


if __name__ == "__main__":
    main()

"""Speed of the backends on a GPU (correctness is `pytest -m cuda`).

Forward pass, one decoded token, and forward with backward pass of a Mamba-2, for every backend that
is installed, by `triton.testing.do_bench`, which repeats each for `--repeats` milliseconds.

Example:
    python -m benchmarks.gpu --layers 24 --d-model 768 --lengths 1024 16384
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import build, draw
from benchmarks.timing import parser, write_json
from longrnn import RecurrentLM
from longrnn.errors import UserError


def measure(model: RecurrentLM, tokens: Tensor, milliseconds: int) -> list[float]:
    """Returns the ms of a forward pass, of one token after it, and of both passes."""
    from triton.testing import do_bench as timed

    do_bench: Any = timed  # one number, as its options are

    with torch.inference_mode():
        state = model(tokens, keep=1).state
        read = do_bench(lambda: model(tokens, keep=1), rep=milliseconds)
        one = do_bench(lambda: model(tokens[:, :1], state, keep=1), rep=milliseconds)

    def both() -> None:
        model.hidden(tokens, model.init_state(len(tokens)))[0].sum().backward()

    return [float(ms) for ms in (read, one, do_bench(both, rep=milliseconds))]


def main() -> None:
    options = parser(__doc__, repeats=200)
    options.add_argument("--lengths", type=int, nargs="+", default=[1024, 16_384])
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    args = options.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: torch finds no GPU: run python -m benchmarks.speed on a CPU")
    figures: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "dtype": args.dtype}
    print(f"{figures['gpu']}, {args.dtype}; ms: read, one token, read with gradients")
    for backend in ("torch", "fla", "mamba_ssm"):
        model = build(args, backend).to("cuda", getattr(torch, args.dtype))
        for length in args.lengths:
            try:
                found = measure(model, draw(args.vocab, length).cuda(), args.repeats)
            except UserError as error:
                print(f"{backend:10} {error}")
                break
            print(f"{backend:10} {length:8,} tokens", *(f"{ms:10.3f}" for ms in found))
            figures[f"{backend}/{length}"] = found
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()

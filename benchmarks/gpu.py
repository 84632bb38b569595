"""Prefill and decoding of a Mamba-2 on a GPU, beside the libraries whose kernels are used there.

A model that a library lacks, or whose kernel fails, is a row with the reason. With `--device cpu`
the program can be checked on a machine without a GPU.

Example:
    python -m benchmarks.gpu --layers 24 --d-model 768 --lengths 1024 16384
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import MIXER, build, draw, transformers_twin
from benchmarks.timing import interleaved, parser, write_json
from longrnn.files import one_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BACKENDS = ("torch", "fla", "mamba_ssm")
Figures = dict[str, Any]
Calls = Sequence[Callable[[], object]]


def times(args: argparse.Namespace, make: Callable[[], Calls]) -> list[float]:
    """Returns the median times of calls in milliseconds."""
    seconds = interleaved({str(number): call for number, call in enumerate(make())}, args.repeats)
    return [1e3 * median(values) for values in seconds.values()]


def record(figures: Figures, name: str, measure: Callable[[], list[float]]) -> None:
    """Adds the figures of a row and prints them; the reason in their place if it fails."""
    try:
        figures[name] = measure()
    except Exception as error:  # libraries and their kernels raise many types
        figures[name] = f"{type(error).__name__}: {one_line(error)}"
    row = figures[name]
    print(f"{name:44}", row if isinstance(row, str) else "  ".join(f"{value:.4g}" for value in row))


def ours(args: argparse.Namespace, backend: str, tokens: Tensor) -> Calls:
    """Returns a prefill, and one token after it."""
    model = build(args, backend).to(args.device, DTYPES[args.dtype])
    state = model(tokens, keep=1).state
    return lambda: model(tokens, keep=1), lambda: model(tokens[:, :1], state, keep=1)


def transformers(args: argparse.Namespace, tokens: Tensor) -> Calls:
    twin = transformers_twin(build(args)).to(args.device, DTYPES[args.dtype])
    cache = twin(tokens, use_cache=True, logits_to_keep=1).cache_params
    more = {"cache_params": cache, "use_cache": True}
    return lambda: twin(tokens, logits_to_keep=1), lambda: twin(tokens[:, :1], **more)


def mamba_ssm(args: argparse.Namespace, tokens: Tensor) -> Calls:
    from mamba_ssm.models.config_mamba import MambaConfig  # pyright: ignore
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel  # pyright: ignore
    from mamba_ssm.utils.generation import InferenceParams  # pyright: ignore

    config = MambaConfig(args.d_model, 0, args.layers, args.vocab, ssm_cfg={"layer": "Mamba2"})
    model = MambaLMHeadModel(config, device=args.device, dtype=DTYPES[args.dtype]).eval()
    length = tokens.shape[1]
    cache = InferenceParams(max_seqlen=length + 1, max_batch_size=1)
    model(tokens, inference_params=cache, num_last_tokens=1)
    cache.seqlen_offset = length
    one = tokens[:, :1]
    return lambda: model(tokens, num_last_tokens=1), lambda: model(one, inference_params=cache)


def fla(args: argparse.Namespace, tokens: Tensor) -> Calls:
    """Returns a prefill."""
    from fla.models import Mamba2Config, Mamba2ForCausalLM  # pyright: ignore

    config = Mamba2Config(
        vocab_size=args.vocab,
        hidden_size=args.d_model,
        num_hidden_layers=args.layers,
        num_heads=MIXER["expand"] * args.d_model // MIXER["head_dim"],
        head_dim=MIXER["head_dim"],
        state_size=MIXER["d_state"],
        n_groups=MIXER["n_groups"],
    )
    model = Mamba2ForCausalLM(config).to(args.device, DTYPES[args.dtype]).eval()
    return (lambda: model(tokens, use_cache=False, logits_to_keep=1),)


@torch.inference_mode()
def measure(args: argparse.Namespace) -> Figures:
    """Returns ms of a prefill, and of one token after it, by library and length."""
    figures: Figures = {}
    libraries = {"mamba-ssm": mamba_ssm, "fla": fla, "transformers": transformers}
    for length in args.lengths:
        tokens = draw(args.vocab, length).to(args.device)
        rows = {f"longrnn, {backend}": partial(ours, args, backend, tokens) for backend in BACKENDS}
        rows |= {name: partial(make, args, tokens) for name, make in libraries.items()}
        for name, make in rows.items():
            record(figures, f"{name}, {length:,} tokens", partial(times, args, make))
    return figures


def main() -> None:
    options = parser(__doc__, repeats=20)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--lengths", type=int, nargs="+", default=[1024, 16_384])
    options.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    args = options.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        options.error("torch finds no GPU: give --device cpu to check the program")
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    print(f"{args.dtype}; ms of a prefill, and of one token after it")
    figures = measure(args)
    if args.json:
        write_json(args.json, {"gpu": gpu, **figures})


if __name__ == "__main__":
    main()

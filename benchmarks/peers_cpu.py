"""Prefill and decoding on the CPU, beside transformers, llama.cpp and what the hardware allows.

The model has the shape of mamba2-130m and random weights, batch size 1. Its calls are interleaved
with those of transformers with the same weights, and with a bound: for prefill the matrix products
with weights alone, for decoding a single read of all weights. The logits are those of the last
token only. `passkey-tiny` reads a long text with each backend.

llama.cpp is timed by its own program `llama-bench`, if it is found and `--gguf` names a folder with
the model: see `benchmarks.llama_bench`.

Example:
    python -m benchmarks.peers_cpu --threads 1 2 --json benchmarks/results/peers_cpu.json
    python -m benchmarks.peers_cpu --quick
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Any

import torch
from longrnn.models.segments import segment_tokens
from longrnn.ops.ssd import BACKENDS

from benchmarks.llama_bench import Peer
from benchmarks.prefill_cpu import MIXER, draw, transformers_twin
from benchmarks.timing import interleaved, write_json
from longrnn.cells import Mamba2
from longrnn.hf.load import load_recurrent
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM
from longrnn.ops import native

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PARTS = ("prefill", "decode", "long")
QUICK = {"layers": 2, "d_model": 128, "vocab": 512, "tokens": 128, "long": 1024, "repeats": 1}
Calls = dict[str, Callable[[], object]]
Timers = dict[str, Callable[[], float]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--d-model", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=50_288)
    parser.add_argument("--tokens", type=int, default=1024, help="length of the prefill")
    parser.add_argument("--steps", type=int, default=4, help="tokens per measurement of decoding")
    parser.add_argument("--long", type=int, default=65_536, help="tokens that passkey-tiny reads")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=[1, 2],
        help="numbers of threads; with 1, processor time is measured instead of wall time",
    )
    parser.add_argument("--gguf", type=Path, help="folder with float32.gguf and bfloat16.gguf")
    parser.add_argument(
        "--llama-bench", default=which("llama-bench"), help="program of llama.cpp (default: PATH)"
    )
    parser.add_argument("--quick", action="store_true", help="a small model, once: does it run?")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    if args.quick:
        vars(args).update(QUICK)
    return args


def backends() -> list[str]:
    return [name for name in ("native", "chunked") if name in BACKENDS]


def build(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, RecurrentLM]:
    """One model per backend, with the same weights."""
    models = {}
    for name in backends():
        torch.manual_seed(0)
        config = RecurrentConfig(
            args.vocab, args.d_model, args.layers, {**MIXER, "backend": name}, residual_in_fp32=True
        )
        models[name] = RecurrentLM(config).eval().to(dtype)
    return models


@contextmanager
def torch_products() -> Iterator[None]:
    """Computes products of few rows with torch's operators instead of the C++ kernel."""
    before, native.FEW_ROWS = native.FEW_ROWS, 0
    try:
        yield
    finally:
        native.FEW_ROWS = before


def prefill(args: argparse.Namespace, models: dict[str, RecurrentLM], twin: Any) -> Calls:
    tokens = draw(args, args.tokens)
    calls: Calls = {
        name: lambda model=model: model(tokens, keep=1) for name, model in models.items()
    }
    calls["transformers"] = lambda: twin(tokens, logits_to_keep=1)
    calls["products alone"] = lambda: projections(models[backends()[0]], args.tokens)
    return calls


def projections(model: RecurrentLM, length: int) -> None:
    """The matrix products with weights, in the segments of a prefill."""
    dtype = model.embedding.weight.dtype
    segment = segment_tokens(model.config.d_model)
    for start in range(0, length, segment):
        width = min(segment, length - start)
        for mixer in model.cells:
            assert isinstance(mixer, Mamba2)
            mixer.in_proj(torch.ones(width, mixer.d_input, dtype=dtype))
            mixer.out_proj(torch.ones(width, mixer.d_inner, dtype=dtype))
    model.head(torch.ones(1, model.config.d_model, dtype=dtype))


def decode(args: argparse.Namespace, models: dict[str, RecurrentLM], twin: Any) -> Calls:
    tokens, prompt = draw(args, args.steps), draw(args, 8)

    def ours(model: RecurrentLM) -> Callable[[], None]:
        start = model(prompt, keep=1).state

        def run() -> None:
            state = start
            for token in tokens.split(1, dim=1):
                state = model(token, state, keep=1).state

        return run

    def with_torch_products(run: Callable[[], None]) -> None:
        with torch_products():
            run()

    cache = twin(prompt, use_cache=True).cache_params

    def theirs() -> None:
        for token in tokens.split(1, dim=1):
            twin(token, cache_params=cache, use_cache=True)

    calls: Calls = {name: ours(model) for name, model in models.items()}
    fastest = ours(models[backends()[0]])
    calls["torch's products"] = lambda: with_torch_products(fastest)
    calls["transformers"] = theirs
    # The head is the embedding: each weight is read once.
    weights = [weight.detach().view(-1) for weight in models[backends()[0]].parameters()]
    # Sums in bfloat16 are slow: pairs are read as one float32.
    whole = [one[: len(one) // 2 * 2].view(torch.float32) for one in weights]
    calls["reading the weights"] = lambda: [one.sum() for _ in range(args.steps) for one in whole]
    return calls


def long(args: argparse.Namespace) -> Calls:
    """`passkey-tiny` reads a long text."""
    calls: Calls = {}
    for name in backends():
        model = load_recurrent("passkey-tiny")
        for mixer in model.cells:
            assert isinstance(mixer, Mamba2)
            mixer.backend, mixer.ssd = name, BACKENDS[name]
        tokens = draw(argparse.Namespace(vocab=model.vocab_size), args.long)
        calls[name] = lambda model=model, tokens=tokens: model(tokens, keep=1)
    return calls


def report(
    title: str, tokens: int, calls: Calls, repeats: int, timers: Timers | None = None
) -> dict[str, float]:
    """Times the calls, prints one row per call, and returns tokens per second."""
    seconds = interleaved(calls, repeats, timers=timers)
    first = next(iter(seconds.values()))
    print(f"\n{title}, {repeats} repeats\n{'':22} tokens/s  time relative to {next(iter(seconds))}")
    for name, value in seconds.items():
        print(f"{name:22} {tokens / value:8.1f}  {value / first:.2f}", flush=True)
    return {name: tokens / value for name, value in seconds.items()}


def peer(args: argparse.Namespace) -> Peer | None:
    """llama.cpp; None where its program or its models are missing."""
    if args.gguf is None or args.llama_bench is None:
        return None
    return Peer(args.llama_bench, args.gguf)


def measure(args: argparse.Namespace, threads: int) -> dict[str, dict[str, float]]:
    figures = {}
    llama = peer(args)
    for dtype in args.dtypes if {"prefill", "decode"} & set(args.parts) else ():
        models = build(args, DTYPES[dtype])
        twin = transformers_twin(models[backends()[0]]).to(DTYPES[dtype])
        for part, of, tokens in (("prefill", prefill, args.tokens), ("decode", decode, args.steps)):
            if part in args.parts:
                calls, timers = of(args, models, twin), {}
                if llama is not None:
                    timers = llama.timers(part, dtype, tokens)
                title = f"{part}, {dtype}, {threads} threads"
                figures[title] = report(title, tokens, calls, args.repeats, timers)
    if "long" in args.parts:
        title = f"passkey-tiny, prefill of {args.long:,} tokens, {threads} threads"
        figures[title] = report(title, args.long, long(args), args.repeats)
    return figures


@torch.inference_mode()
def main() -> None:
    args = arguments()
    if peer(args) is None:
        print("llama.cpp is left out: it needs its program llama-bench and its models (--gguf)")
    if (why := native.missing()) is not None:
        print(f"the backend native is left out: {why}")
    figures: dict[str, Any] = {"shape": [args.layers, args.d_model, args.vocab]}
    before = torch.get_num_threads()
    for threads in args.threads:
        torch.set_num_threads(threads)
        figures |= measure(args, threads)
    torch.set_num_threads(before)
    if args.json:
        write_json(args.json, {**figures, "repeats": args.repeats, "all_threads": args.threads})


if __name__ == "__main__":
    main()

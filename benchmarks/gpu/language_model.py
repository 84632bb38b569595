"""Part 4: prefill and decoding with a model of random weights in bfloat16."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.harness import Bench
from benchmarks.gpu.inputs import randomness
from benchmarks.gpu.sizes import Cost, nbytes, scan_flops
from longrnn.inference.prefill import PREFILL_TOKENS, prefill
from longrnn.mitigations import Mitigated, mitigation
from longrnn.models import LanguageModel, RecurrentLM, generate
from longrnn.models.checkpoint import cast_weights
from longrnn.progress import Progress
from longrnn.state import leaves

# Largest milliseconds per token that pass at the full size.
DECODE_MS = 3.0
MITIGATIONS = {"state_norm": "state_norm(threshold=100)", "window": "sliding_window(window={})"}


def run(bench: Bench) -> None:
    """Builds the model once, and times what it is used for."""
    sizes = bench.sizes
    model: list[RecurrentLM] = []
    bench.attempt("build the model", lambda: model.append(_build(bench)), seconds=20)
    if not model:
        return
    lm = model[0]
    seconds: list[float] = []
    what = f"prefill of {sizes.tokens:,}"
    bench.attempt(what, lambda: seconds.append(_prefill(bench, lm, sizes.tokens, what)), seconds=20)
    bench.attempt("decoding", partial(_decode, bench, lm), seconds=10)
    for name, text in MITIGATIONS.items():
        mitigated = partial(_mitigated, bench, lm, text.format(sizes.window), name, seconds)
        bench.attempt(f"prefill with {name}", mitigated, seconds=20)
    # Last, because it takes most of the time; twice the estimate, because it is one.
    expected = 2 * seconds[0] * sizes.long / sizes.tokens if seconds else 60.0
    what = f"prefill of {sizes.long:,}"
    bench.attempt(what, partial(_prefill, bench, lm, sizes.long, what), seconds=expected)


def _build(bench: Bench) -> RecurrentLM:
    torch.manual_seed(0)
    with bench.device:
        model = RecurrentLM(bench.sizes.config)
    return cast_weights(model, torch.bfloat16).eval()


def _read(bench: Bench, model: LanguageModel, tokens: Tensor) -> None:
    zero = model.init_state(len(tokens))
    with Progress("prefill", tokens.numel(), unit="tokens", quiet=True) as progress:
        prefill(model, lambda a, b: tokens[:, a:b], 0, tokens.shape[1], zero, progress)


@torch.no_grad()
def _prefill(bench: Bench, model: RecurrentLM | Mitigated, length: int, what: str) -> float:
    """Seconds of one prefill, after one of the first piece; records time and memory."""
    sizes = bench.sizes
    shape = (1, length)
    tokens = torch.randint(
        sizes.vocab_size, shape, device=bench.device, generator=randomness(bench.device, 5)
    )
    _read(bench, model, tokens[:, : min(length, PREFILL_TOKENS)])
    bench.reset_peak()
    ms = bench.once(lambda: _read(bench, model, tokens))
    flops = 0.0
    if isinstance(model, RecurrentLM):
        in_blocks = sum(p.numel() for p in model.blocks.parameters())
        scans = scan_flops(length, sizes.heads, sizes.head_dim, sizes.d_state)
        flops = 2.0 * length * in_blocks + sizes.n_layers * scans
    cost = Cost(nbytes(model.parameters()), flops) if flops else None
    bench.figure(what, ms, "ms", cost=cost)
    rate = None if ms is None else length / ms * 1e3
    bench.figure(f"{what}, speed", rate, "tokens/s")
    bench.figure(f"{what}, peak memory", bench.peak_gib(), "GiB")
    return 0.0 if ms is None else ms / 1e3


def _mitigated(bench: Bench, model: RecurrentLM, spec: str, name: str, plain: list[float]) -> None:
    """A prefill under a mitigation, short where the mitigation is slow, beside the plain one."""
    sizes = bench.sizes
    length = sizes.tokens // 16
    ms = _prefill(
        bench, Mitigated(model, mitigation(spec)), length, f"prefill of {length:,}, {name}"
    )
    expected = 1e3 * plain[0] / 16 if plain and plain[0] else None
    timed = None if expected is None else 1e3 * ms
    bench.compare(f"prefill of {length:,}, {name}, per token", timed, expected, "plain")


@torch.no_grad()
def _decode(bench: Bench, model: RecurrentLM) -> None:
    """Milliseconds per token of one row and of 16 rows."""
    sizes = bench.sizes
    for rows in (1, 16):
        prompt = torch.zeros(rows, 8, dtype=torch.long, device=bench.device)
        generate(model, prompt, max_new_tokens=2)

        def call(count: int, prompt: Tensor = prompt) -> None:
            generate(model, prompt, max_new_tokens=count)

        short = bench.once(partial(call, 1))
        long = bench.once(partial(call, 1 + sizes.decoded))
        each = None if short is None or long is None else (long - short) / sizes.decoded
        states = nbytes(leaf for _, leaf in leaves(model.init_state(rows)))
        cost = Cost(nbytes(model.parameters()) + 2 * states)
        limit = DECODE_MS if rows == 1 and bench.device.type == "cuda" else None
        name = f"decoding, {rows} row{'s' if rows > 1 else ''}, per token"
        bench.figure(name, each, "ms", cost=cost, limit=limit)

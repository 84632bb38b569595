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
from longrnn.models import LanguageModel, RecurrentLM
from longrnn.models.checkpoint import cast_weights
from longrnn.models.decoding import CallingDecoder, StaticDecoder, captured
from longrnn.progress import Progress
from longrnn.state import leaves

# Largest milliseconds per token that pass at the full size.
DECODE_MS = 3.0
# Rows that are decoded together.
ROWS = (1, 16)
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
    for rows in ROWS:
        for how in ("graph", "calls"):
            name = f"decoding by {how}, {rows} rows"
            bench.attempt(name, partial(_decode, bench, lm, rows, how), seconds=5)
    bench.attempt("decoding under a window", partial(_decode_window, bench, lm), seconds=15)
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


def _decode_window(bench: Bench, model: RecurrentLM) -> None:
    """Milliseconds per token of one row in the first chunk of a window, by a graph and by calls."""
    window, chunk = bench.sizes.window, bench.sizes.window // 16
    mitigated = Mitigated(model, mitigation(f"sliding_window(window={window}, chunk={chunk})"))
    for how in ("graph", "calls"):
        _decode(bench, mitigated, 1, how, ", window")


@torch.no_grad()
def _decode(
    bench: Bench, model: RecurrentLM | Mitigated, rows: int, how: str, under: str = ""
) -> None:
    """Milliseconds per token of `rows` rows, by a CUDA graph or by calls of the model."""
    sizes = bench.sizes
    state = model.init_state(rows)
    tokens = torch.zeros(rows, dtype=torch.long, device=bench.device)
    by_graph = how == "graph"
    prepare = captured if bench.device.type == "cuda" else None
    decoder = (
        StaticDecoder(model, state, prepare=prepare) if by_graph else CallingDecoder(model, state)
    )

    def decode() -> None:
        chosen = tokens
        for _ in range(sizes.decoded):
            chosen = decoder.step(chosen, None).argmax(-1)

    decoder.step(tokens, None)  # captures the graph
    ms = bench.once(decode)
    # A token reads some chunks of a window only.
    states = nbytes(leaf for _, leaf in leaves(state.layers))
    cost = Cost(nbytes(model.parameters()) + 2 * states)
    limit = DECODE_MS if rows == 1 and by_graph and not under else None
    each = None if ms is None else ms / sizes.decoded
    name = f"decoding by {'a graph' if by_graph else 'calls'}, {rows} rows{under}, per token"
    bench.figure(name, each, "ms", cost=cost, limit=limit)

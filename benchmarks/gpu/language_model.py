"""Part 5: prefill and decoding with a model of random weights in bfloat16."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.harness import Bench
from benchmarks.gpu.inputs import randomness
from benchmarks.gpu.sizes import Cost, nbytes, scan_flops
from longrnn.inference.prefill import prefill
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
# Timed calls, of which the median counts, where they are short.
REPEATS = 3
MITIGATIONS = {
    "state_norm": "state_norm(threshold=100)",
    "window": "sliding_window(window={0.window}, chunk={0.window_chunk})",
}


def run(bench: Bench) -> None:
    """Builds the model once, and times what it is used for."""
    sizes = bench.sizes
    model: list[RecurrentLM] = []
    build = partial(_build, bench, model)
    bench.attempt("build the model", build, seconds=15, again=True)
    if not model:
        return
    lm = model[0]
    # Decoding first, because its limit is the only one here.
    for rows in ROWS:
        for how in ("graph", "calls"):
            name = f"decoding by {how}, {rows} rows"
            bench.attempt(name, partial(_decode, bench, lm, rows, how), seconds=5)
    bench.attempt("decoding under a window", partial(_decode_window, bench, lm), seconds=15)
    times: dict[int, float | None] = {}
    for length in (sizes.piece, sizes.tokens, sizes.long):
        # Twice the estimate from a shorter one, because it is an estimate.
        known = [2e-3 * ms * length / shorter for shorter, ms in times.items() if ms is not None]
        needed = known[-1] if known else 30.0
        work = partial(_prefill, bench, lm, length, times)
        bench.attempt(f"prefill of {length:,}", work, seconds=needed)
    # Last, because a mitigation without kernels would take all the time that is left.
    for name, text in MITIGATIONS.items():
        mitigated = partial(_mitigated, bench, lm, text.format(sizes), name, times)
        bench.attempt(f"prefill under {name}", mitigated, seconds=20)


def _build(bench: Bench, into: list[RecurrentLM]) -> None:
    torch.manual_seed(0)
    with bench.device:
        model = RecurrentLM(bench.sizes.config)
    into.append(cast_weights(model, torch.bfloat16).eval())


def _read(bench: Bench, model: LanguageModel, tokens: Tensor) -> None:
    zero = model.init_state(len(tokens))
    with Progress("prefill", tokens.numel(), unit="tokens", quiet=True) as progress:
        prefill(model, lambda a, b: tokens[:, a:b], 0, tokens.shape[1], zero, progress)


@torch.no_grad()
def _timed(bench: Bench, model: RecurrentLM | Mitigated, length: int) -> float | None:
    """Milliseconds of a prefill, after one of a piece; the peak of memory is then its own."""
    tokens = torch.randint(
        bench.sizes.vocab_size,
        (1, length),
        device=bench.device,
        generator=randomness(bench.device, 5),
    )
    _read(bench, model, tokens[:, : bench.sizes.piece])
    bench.reset_peak()
    return bench.on_host(lambda: _read(bench, model, tokens), repeats=REPEATS)


def _prefill(bench: Bench, model: RecurrentLM, length: int, times: dict[int, float | None]) -> None:
    """Records time, bound, speed and memory of a prefill."""
    sizes, what = bench.sizes, f"prefill of {length:,}"
    ms = times[length] = _timed(bench, model, length)
    in_blocks = sum(p.numel() for p in model.blocks.parameters())
    scans = scan_flops(length, sizes.heads, sizes.head_dim, sizes.d_state)
    flops = 2.0 * length * in_blocks + sizes.n_layers * scans
    bench.figure(what, ms, "ms", cost=Cost(nbytes(model.blocks.parameters()), flops))
    rate = None if ms is None else length / ms * 1e3
    bench.figure(f"{what}, speed", rate, "tokens/s")
    bench.figure(f"{what}, peak memory", bench.peak_gib(), "GiB")


def _mitigated(
    bench: Bench, model: RecurrentLM, spec: str, name: str, times: dict[int, float | None]
) -> None:
    """The shortest prefill under a mitigation, beside the plain one of the same length."""
    length = bench.sizes.piece
    what = f"prefill of {length:,} under {name}"
    ms = _timed(bench, Mitigated(model, mitigation(spec)), length)
    bench.compare(what, ms, times.get(length), "plain")
    bench.figure(f"{what}, peak memory", bench.peak_gib(), "GiB")


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

    decoder.step(tokens, None)  # compiles the kernels and captures the graph
    ms = bench.on_host(decode, repeats=REPEATS)
    # The whole embedding is read, as the head; of a window a token reads some chunks only.
    states = nbytes(leaf for _, leaf in leaves(state.layers))
    cost = Cost(nbytes(model.parameters()) + 2 * states)
    limit = DECODE_MS if rows == 1 and by_graph and not under else None
    each = None if ms is None else ms / sizes.decoded
    name = f"decoding by {'a graph' if by_graph else 'calls'}, {rows} rows{under}, per token"
    bench.figure(name, each, "ms", cost=cost, limit=limit)

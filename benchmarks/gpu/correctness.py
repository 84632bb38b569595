"""Part 2: results of the GPU against float64, against the CPU, and against themselves."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.harness import Bench, error
from benchmarks.gpu.inputs import LIMIT, backends, projected, randomness, scan_inputs
from longrnn.mitigations import Mitigated, mitigation
from longrnn.mixers import MIXERS
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.models.decoding import CallingDecoder, StaticDecoder, captured
from longrnn.ops.ssd import BACKENDS, ScanInputs
from longrnn.ops.ssd.rescale import UNLIMITED, rescaled_ssd
from longrnn.ops.ssd.window import windowed_ssd
from longrnn.ops.ssd.window_carry import init_carry
from longrnn.state import leaves

# Largest errors, relative to the largest entry: inputs in float32; inputs in bfloat16 without
# gradients, where kernels split computed operands into two bfloat16; and with gradients, where they
# round them to one.
FLOAT32, EVALUATION, TRAINING, GRADIENTS = 1e-5, 2e-5, 8e-3, 2e-2
# Whole models in float32, CPU and GPU: products of different libraries, layer after layer.
MODELS = 1e-4
# Tokens decoded by a graph and by calls.
DECODED = 8
# A norm that every state of the random inputs exceeds by far: one that equals its limit to rounding
# has a gradient on either side, and float32 and float64 may choose different ones.
EXCEEDED = 0.2
# Chunks shorter than these tokens.
WINDOW = "sliding_window(window=23, chunk=5)"
MITIGATIONS = ("state_norm(threshold=1)", "sliding_window(window={window})")


def run(bench: Bench) -> None:
    """All checks; each backend that computes on this device has its own."""
    names = backends(bench)
    for name in names:
        for dtype in (torch.float32, torch.bfloat16):
            short = str(dtype).removeprefix("torch.")
            bench.attempt(f"{name}, {short}", partial(_against_the_loop, bench, name, dtype))
        bench.attempt(f"{name}, repeated", partial(_repeated, bench, name))
        bench.attempt(f"{name}, mitigated", partial(_changed, bench, name))
        # The dry run has one dtype here: Triton's interpreter is slow, and has no bfloat16.
        for dtype in (torch.float32,) if bench.sizes.dry else (torch.float32, torch.bfloat16):
            short = str(dtype).removeprefix("torch.")
            what = f"{name}, {short}, state_norm"
            bench.attempt(what, partial(_limited, bench, name, dtype, what))
    for kind in MIXERS:
        bench.attempt(f"model of {kind}", partial(_model, bench, kind))
    for text in MITIGATIONS:
        spec = text.format(window=bench.sizes.checked_tokens // 5)
        for name in names:
            bench.attempt(f"{spec}, {name}", partial(_mitigated, bench, spec, name))
    bench.attempt("decoding by a graph", partial(_decoding, bench, "none"))
    bench.attempt("decoding by a graph, window", partial(_decoding, bench, WINDOW))
    for name in names:
        what = f"{name}, {bench.sizes.long:,} tokens"
        bench.attempt(what, partial(_long, bench, name, what), seconds=10)


def _against_the_loop(bench: Bench, name: str, dtype: torch.dtype) -> None:
    """Values and gradients of a backend against a loop over tokens in float64."""
    sizes, narrow = bench.sizes, dtype != torch.float32
    short = str(dtype).removeprefix("torch.")
    wide = projected(sizes, sizes.checked_tokens, bench.device, dtype)
    inputs, state = scan_inputs(sizes, wide)
    exact = _outcome("reference", _cast(inputs, torch.float64), state.double())
    with torch.no_grad():
        values = BACKENDS[name](inputs, state)
    found = max(error(a, b) for a, b in zip(values, exact[:2], strict=True))
    limit = EVALUATION if narrow else FLOAT32
    bench.check(f"{name}, {short}, values without gradients", found, limit)
    ours = _outcome(name, inputs, state)
    errors = [error(a, b) for a, b in zip(ours, exact, strict=True)]
    limits = (TRAINING, GRADIENTS) if narrow else (FLOAT32, FLOAT32)
    bench.check(f"{name}, {short}, values with gradients", max(errors[:2]), limits[0])
    bench.check(f"{name}, {short}, gradients", max(errors[2:]), limits[1])


def _limited(bench: Bench, name: str, dtype: torch.dtype, what: str) -> None:
    """Values and gradients under a limit on the norm of the state, against float64 in torch."""
    sizes, narrow = bench.sizes, dtype != torch.float32
    limits = torch.full((sizes.heads,), EXCEEDED, dtype=torch.float64, device=bench.device)
    limits[1::2] = UNLIMITED
    inputs, state = scan_inputs(sizes, projected(sizes, sizes.checked_tokens, bench.device, dtype))
    exact = _outcome("reference", _cast(inputs, torch.float64), state.double(), limits)
    ours = _outcome(name, inputs, state, limits)
    errors = [error(a, b) for a, b in zip(ours, exact, strict=True)]
    bounds = (TRAINING, GRADIENTS) if narrow else (FLOAT32, FLOAT32)
    bench.check(f"{what}, values with gradients", max(errors[:2]), bounds[0])
    bench.check(f"{what}, gradients", max(errors[2:]), bounds[1])


@torch.no_grad()
def _changed(bench: Bench, name: str) -> None:
    """The limited and the windowed recurrence in bfloat16, against plain torch in float64."""
    sizes, window = bench.sizes, bench.sizes.checked_tokens // 5
    wide = projected(sizes, sizes.checked_tokens, bench.device, torch.bfloat16)
    limits = torch.full((sizes.heads,), LIMIT, dtype=torch.float64, device=bench.device)
    given, start = scan_inputs(sizes, wide)
    pairs = ((name, given, start), ("chunked", _cast(given, torch.float64), start.double()))
    limited, windowed = [], []
    for backend, inputs, state in pairs:
        limited.append(rescaled_ssd(inputs, state, limits, BACKENDS[backend]))
        carry = init_carry(ScanInputs(*(one[0, :1] for one in inputs)), state, window)
        windowed.append(windowed_ssd(inputs, carry, window, BACKENDS[backend])[:2])
    for what, (ours, exact) in (("state_norm", limited), (f"window of {window}", windowed)):
        found = max(error(a, b) for a, b in zip(ours, exact, strict=True))
        bench.check(f"{name}, bfloat16, {what}", found, EVALUATION)


def _outcome(
    name: str, inputs: ScanInputs, state: Tensor, limits: Tensor | None = None
) -> list[Tensor]:
    """Outputs, final state, and the gradients of a fixed functional of both.

    Args:
        name: of the backend.
        inputs: see `ScanInputs`.
        state: `(b, h, p, n)`.
        limits: the largest norm of each head's state, `(h,)`; None without state_norm.
    """
    tensors = [tensor.detach().requires_grad_() for tensor in (*inputs, state)]
    again, ssd = ScanInputs(*tensors[:-1]), BACKENDS[name]
    if limits is None:
        y, final = ssd(again, tensors[-1])
    else:
        y, final = rescaled_ssd(again, tensors[-1], limits, ssd)
    # The same weights whatever the dtype.
    draw = randomness(y.device, 3)
    weights = [
        torch.randn(o.shape, generator=draw, device=o.device, dtype=torch.float32).to(o.dtype)
        for o in (y, final)
    ]
    loss = (y * weights[0]).sum() + (final * weights[1]).sum()
    return [y.detach(), final.detach(), *torch.autograd.grad(loss, tensors)]


def _cast(inputs: ScanInputs, dtype: torch.dtype) -> ScanInputs:
    return ScanInputs(*(tensor.to(dtype) for tensor in inputs))


def _repeated(bench: Bench, name: str) -> None:
    """Two runs give the same bits, gradients included."""
    sizes = bench.sizes
    wide = projected(sizes, sizes.checked_tokens, bench.device, torch.bfloat16)
    inputs, state = scan_inputs(sizes, wide)
    one, two = (_outcome(name, inputs, state) for _ in range(2))
    bench.check_equal(f"{name}, two runs, tensors that differ", one, two)


def _build(bench: Bench, mixer: dict[str, Any]) -> RecurrentLM:
    """A small model in float32 on the CPU."""
    torch.manual_seed(0)
    sizes = bench.sizes
    return RecurrentLM(RecurrentConfig(sizes.vocab_size, sizes.small_d_model, 2, mixer))


def _tokens(bench: Bench, rows: int = 2) -> Tensor:
    sizes = bench.sizes
    shape = (rows, sizes.checked_tokens)
    return torch.randint(sizes.vocab_size, shape, generator=randomness(torch.device("cpu"), 4))


def _model(bench: Bench, kind: str) -> None:
    """Logits, states and gradients of a model, on this device and on the CPU."""
    mixer = bench.sizes.mixer if kind == bench.sizes.mixer["kind"] else {"kind": kind}
    model, tokens = _build(bench, mixer), _tokens(bench)
    on_device = deepcopy(model).to(bench.device)
    found = []
    for one in (model, on_device):
        logits, state = one(tokens.to(one.embedding.weight.device))
        logits.float().logsumexp(-1).mean().backward()
        gradients = [p.grad for p in one.parameters() if p.grad is not None]
        found.append((logits.detach(), [leaf.detach() for _, leaf in leaves(state)], gradients))
    (logits, states, gradients), (ours, our_states, our_gradients) = found
    bench.check(f"model of {kind}, logits, against the CPU", error(ours, logits), MODELS)
    pairs = zip(our_states, states, strict=True)
    largest = max(error(a, b) for a, b in pairs if a.is_floating_point())
    bench.check(f"model of {kind}, states, against the CPU", largest, MODELS)
    flat = [torch.cat([g.cpu().flatten() for g in each]) for each in (our_gradients, gradients)]
    bench.check(f"model of {kind}, gradients, against the CPU", error(*flat), MODELS)


@torch.no_grad()
def _decoding(bench: Bench, spec: str) -> None:
    """Logits and states of a CUDA graph are those of calls; without a GPU, those of its buffers."""
    plain = _build(bench, bench.sizes.mixer).to(bench.device)
    model = Mitigated(plain, mitigation(spec))
    prompt = _tokens(bench).to(bench.device)
    state = model(prompt).state
    prepare = captured if bench.device.type == "cuda" else None
    decoders = [CallingDecoder(model, state), StaticDecoder(model, state, prepare=prepare)]
    results: list[list[Tensor]] = []
    for decoder in decoders:
        logits = [decoder.step(tokens, None).clone() for tokens in prompt[:, :DECODED].t()]
        results.append([*logits, *(leaf for _, leaf in leaves(decoder.state))])
    pairs = [(a, b) for a, b in zip(*results, strict=True) if a.is_floating_point()]
    under = "" if spec == "none" else f", {spec}"
    found = max(error(a, b) for a, b in pairs)
    bench.check(f"decoding by a graph and by calls{under}", found, FLOAT32)


def _mitigated(bench: Bench, spec: str, backend: str) -> None:
    """Logits and gradients under a mitigation, on this device and in plain torch on the CPU."""
    mixer = bench.sizes.mixer
    exact = Mitigated(_build(bench, {**mixer, "backend": "chunked"}), mitigation(spec))
    model = _build(bench, {**mixer, "backend": backend}).to(bench.device)
    ours = Mitigated(model, mitigation(spec))
    tokens = _tokens(bench)
    with torch.no_grad():
        found = error(ours(tokens.to(bench.device)).logits, exact(tokens).logits)
    bench.check(f"{spec}, {backend}, against the CPU", found, MODELS)
    gradients = []
    for one, given in ((ours, tokens.to(bench.device)), (exact, tokens)):
        one(given).logits.logsumexp(-1).mean().backward()
        flat = [p.grad.cpu().flatten() for p in one.parameters() if p.grad is not None]
        gradients.append(torch.cat(flat))
    bench.check(f"{spec}, {backend}, gradients, against the CPU", error(*gradients), MODELS)


@torch.no_grad()
def _long(bench: Bench, name: str, what: str) -> None:
    """One call far beyond 2^31 entries ends as calls of pieces do, which stay below."""
    sizes = bench.sizes
    # Per token: the projected tensor in bfloat16, steps and decays, and two outputs in float32.
    per_token = 2 * (sizes.d_inner + sizes.d_conv_input) + 8 * sizes.heads + 8 * sizes.d_inner
    if not bench.fits(what, 1.1 * sizes.long * per_token):
        return
    wide = projected(sizes, sizes.long, bench.device, torch.bfloat16)
    inputs, start = scan_inputs(sizes, wide)
    y, final = BACKENDS[name](inputs, start)
    last, state = y[:, -sizes.compared :].clone(), start
    del y
    pieces: list[Tensor] = []
    for begin in range(0, sizes.long, sizes.piece):
        piece, state = BACKENDS[name](inputs.slice(begin, begin + sizes.piece), state)
        pieces = [*pieces, piece][-1 - sizes.compared // sizes.piece :]
    expected = torch.cat(pieces, 1)[:, -sizes.compared :]
    bench.check(f"{what}, last {sizes.compared:,}, and pieces", error(last, expected), EVALUATION)
    bench.check(f"{what}, state, and pieces", error(final, state), EVALUATION)

"""Cost of the mitigations on a CPU, and their peak memory on a long stream.

The model has the layers of mamba2-130m with random weights, float32, batch size 1, without logits.
Every variant is timed in the same process as the plain model, with interleaved calls. The scan of
one layer alone is timed in the same way. The token loop computes state normalisation by its
definition, one token at a time.

Example:
    python -m benchmarks.mitigations_cpu --json results/mitigations_cpu.json
    python -m benchmarks.mitigations_cpu --layers 2 --d-model 128 --tokens 1024 --stream 0
    python -m benchmarks.mitigations_cpu --model collapse-tiny --tokens 8192 --stream 0
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path
from typing import Any

import torch
from longrnn.ops.ssd import BACKENDS, SSD, ScanInputs, resolve
from longrnn.ops.ssd.rescale import rescaled_ssd, scale_to
from longrnn.ops.ssd.window import windowed_ssd
from longrnn.ops.ssd.window_carry import init_carry
from torch import Tensor

from benchmarks.timing import add_threads, clock, in_a_process, interleaved, use_threads, write_json
from longrnn import load
from longrnn.cells import Cell, Edit
from longrnn.mitigations import Mitigated, mitigation
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM

MIXER = {"kind": "mamba2", "d_state": 128, "head_dim": 64}
# Largest permitted time relative to the plain model.
BARS = {
    "state_norm, most rescaled": 1.6,
    "state_norm, none, far": 1.15,
    "state_norm, none, near": 1.15,
    "sliding_window": 1.25,
    "forget_more": 1.05,
}
STREAMED = ("state_norm(threshold=1.0)", "sliding_window(window=1000)", "forget_more")


class TokenLoop(Edit):
    """State normalisation by its definition: updates, measures and scales every state."""

    def __init__(self, threshold: float) -> None:
        self.threshold = torch.tensor(threshold, dtype=torch.float64)

    def scan(
        self, inputs: ScanInputs, state: Tensor, carry: Any, ssd: SSD
    ) -> tuple[Tensor, Tensor, Any]:
        outputs = []
        for t in range(inputs.x.shape[1]):
            decay, x, B, C = (
                inputs.log_decay[:, t].exp(),
                *(tensor[:, t] for tensor in (inputs.scaled_x(state.dtype), inputs.B, inputs.C)),
            )
            state = decay[..., None, None] * state + x[..., None] * B[:, :, None]
            square = state.square().sum((2, 3)).double()
            state = state * scale_to(self.threshold, square).to(state)[..., None, None]
            outputs.append((state @ C[:, 0, :, None])[..., 0])
        return torch.stack(outputs, dim=1), state, carry


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="an embedded checkpoint instead of the 130m shape")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--d-model", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument(
        "--loop-tokens", type=int, default=128, help="number of tokens for the token loop"
    )
    parser.add_argument("--window", type=int, default=1000)
    parser.add_argument(
        "--continued",
        action="store_true",
        help="each call of the stack continues the one before: windows are full, and norms grow",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--stream", type=int, default=2**20, help="length of the long stream in tokens; 0 skips it"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)  # used by child processes
    add_threads(parser)
    return parser.parse_args()


class LargestNorms(Edit):
    """Leaves the scan unchanged and records the largest norm of every head's state, `(b, h)`."""

    def init_carry(self, mixer: Cell, batch_size: int) -> Tensor:
        return torch.zeros(batch_size, mixer.n_heads)

    def scan(
        self, inputs: ScanInputs, state: Tensor, carry: Tensor, ssd: SSD
    ) -> tuple[Tensor, Tensor, Tensor]:
        memory, largest = state, carry
        parts = (inputs.scaled_x(state.dtype), inputs.log_decay, inputs.B)
        for x, log_decay, B in zip(*(part.unbind(1) for part in parts), strict=True):
            memory = log_decay.exp()[..., None, None] * memory + x[..., None] * B[:, :, None]
            largest = torch.maximum(largest, memory.square().sum((2, 3)).sqrt())
        return *ssd(inputs, state), largest


def stack(args: argparse.Namespace) -> dict[str, float]:
    """Returns the time of every variant of the whole model relative to the plain model."""
    torch.manual_seed(0)
    model = model_of(args)
    layers, vocab = model.config.n_layers, model.vocab_size
    tokens = torch.randint(vocab, (1, args.tokens), generator=torch.Generator().manual_seed(1))
    norms = model(tokens, keep=0, edits=[LargestNorms()] * layers).state.extra
    low = [(0.3 * layer[0]).tolist() for layer in norms]
    near = [(1.01 * layer[0]).tolist() for layer in norms]
    variants: dict[str, Any] = {
        "plain": model,
        "forget_more": Mitigated(model, mitigation("forget_more")),
        "state_norm, none, far": Mitigated(model, mitigation("state_norm(threshold=1e6)")),
        "state_norm, none, near": mitigated_norm(model, near),
        "state_norm, most rescaled": mitigated_norm(model, low),
        "sliding_window": Mitigated(model, mitigation(f"sliding_window(window={args.window})")),
    }
    expected = model(tokens).logits
    for name in ("far", "near"):  # check that nothing was rescaled
        logits = variants[f"state_norm, none, {name}"](tokens).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)
    states: dict[str, Any] = dict.fromkeys(variants)

    def read(name: str) -> None:
        state = variants[name](tokens, states[name], keep=0).state
        if args.continued:
            states[name] = state

    calls = {name: lambda name=name: read(name) for name in variants}
    seconds = interleaved(calls, args.repeats)
    figures = report("stack", seconds)
    loop = [TokenLoop(1.0)] * layers
    few = tokens[:, : args.loop_tokens]
    start, state = clock(), model.init_state(1, loop)
    for token in few.split(1, dim=1):  # as without a chunked implementation
        state = model(token, state, keep=0, edits=loop).state
    per_token = (clock() - start) / few.shape[1]
    ours = seconds["state_norm, most rescaled"] / args.tokens
    figures["token_loop_over_chunks"] = per_token / ours
    print(f"token loop, token by token: {per_token / ours:.1f} x the time of state_norm")
    return figures


def model_of(args: argparse.Namespace) -> RecurrentLM:
    if args.model is None:
        return RecurrentLM(RecurrentConfig(256, args.d_model, args.layers, MIXER)).eval()
    model = load(args.model)
    assert isinstance(model, RecurrentLM)
    return model


def mitigated_norm(model: RecurrentLM, threshold: list[list[float]]) -> Mitigated:
    return Mitigated(model, mitigation({"kind": "state_norm", "threshold": threshold}))


def report(what: str, seconds: dict[str, float]) -> dict[str, float]:
    """Prints times, ratios to the plain model and required ratios, and returns the ratios."""
    figures = {}
    for name, value in seconds.items():
        ratio = value / seconds["plain"]
        bar = f"   (at most {BARS[name]})" if what == "stack" and name in BARS else ""
        print(f"{what:6} {name:28} {value:8.3f} s   {ratio:6.2f} x{bar}")
        figures[f"{what}/{name}"] = ratio
    return figures


def scan_alone(args: argparse.Namespace) -> dict[str, float]:
    """Returns the same ratios for the scan of one layer, without its projections."""
    generator = torch.Generator().manual_seed(2)
    heads, ssd = 2 * args.d_model // MIXER["head_dim"], BACKENDS[resolve("auto")]

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, args.tokens, *shape, generator=generator)

    inputs = ScanInputs(
        x=normal(heads, 64),
        gain=torch.full((1, args.tokens, heads), 0.05),
        log_decay=-0.05 * torch.rand(1, args.tokens, heads, generator=generator),
        B=normal(1, 128),
        C=normal(1, 128),
    )
    state = torch.zeros(1, heads, 64, 128)
    reached = ssd(inputs, state)[1].flatten(2).norm(dim=2)[0].double()
    carry = init_carry(ScanInputs(*(tensor[0, :1] for tensor in inputs)), state, args.window)

    def continued() -> None:
        """One more call of a long stream: the window is full."""
        nonlocal carry
        _, _, carry = windowed_ssd(inputs, carry, args.window, ssd)

    loop = TokenLoop(float(0.3 * reached.mean()))
    variants = {
        "plain": lambda: ssd(inputs, state),
        "state_norm, none, far": lambda: rescaled_ssd(inputs, state, 1e6 * reached, ssd),
        "state_norm, none, near": lambda: rescaled_ssd(inputs, state, 2 * reached, ssd),
        "state_norm, most rescaled": lambda: rescaled_ssd(inputs, state, 0.3 * reached, ssd),
        "state_norm, token loop": lambda: loop.scan(inputs, state, (), ssd),
        "sliding_window": continued,
    }
    return report("scan", interleaved(variants, args.repeats, warm=True))


def streams(args: argparse.Namespace) -> dict[str, float]:
    """Returns the peak memory of a long stream relative to 64k tokens, in separate processes."""
    figures = {}
    for spec in STREAMED:
        peaks = []
        for length in (2**16, args.stream):
            command = ["benchmarks.mitigations_cpu"]
            command += ["--memory-of", spec, str(length), "--threads", str(torch.get_num_threads())]
            peaks.append(in_a_process(*command))
        figures[f"memory/{spec}"] = peaks[1] / peaks[0]
        print(f"{spec}: {peaks[0]:.0f} MiB at 65,536, {peaks[1]:.0f} MiB at {args.stream:,}")
    return figures


def peak_of(spec: str, length: int) -> float:
    """Returns the peak memory in MiB of a small mitigated model on a stream of segments."""
    torch.manual_seed(0)
    mixer = {"kind": "mamba2", "d_state": 32, "head_dim": 64}
    model = Mitigated(RecurrentLM(RecurrentConfig(256, 128, 2, mixer)).eval(), mitigation(spec))
    generator, state = torch.Generator().manual_seed(1), None
    for start in range(0, length, 4096):
        piece = torch.randint(256, (1, min(4096, length - start)), generator=generator)
        state = model(piece, state, keep=0).state
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


@torch.no_grad()
def main() -> None:
    args = arguments()
    use_threads(args)
    if args.memory_of:
        print(json.dumps(peak_of(args.memory_of[0], int(args.memory_of[1]))))
        return
    figures: dict[str, Any] = {}
    if args.stream:
        figures |= streams(args)
    if args.model is None:
        figures |= scan_alone(args)
    figures |= stack(args)
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()

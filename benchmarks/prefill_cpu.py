"""Prefill on the CPU: speed relative to transformers, peak memory, and cost per token.

The model has the shape of mamba2-130m and random weights, in float32, with batch size 1. Three
questions:
- How much faster is it than `Mamba2ForCausalLM` of transformers with the same weights? Both compute
  the logits of the last token only; `--all-logits` also times transformers with its default, which
  computes the logits of every token.
- Is the peak memory of a long prefill equal to that of a short one? (in separate processes)
- Is the cost per token of a long prefill equal to that of a short one?

Example:
    python -m benchmarks.prefill_cpu --json benchmarks/results/prefill_cpu.json
    python -m benchmarks.prefill_cpu --layers 2 --d-model 128 --vocab 512 --tokens 512 --long 4096
"""

from __future__ import annotations

import argparse
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import add_threads, clock, in_a_process, interleaved, use_threads, write_json
from longrnn.cells import Mamba2
from longrnn.models import segments
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM

MIXER = {"kind": "mamba2", "d_state": 128, "head_dim": 64, "expand": 2, "d_conv": 4, "n_groups": 1}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--d-model", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=50_288)
    parser.add_argument("--tokens", type=int, default=4096, help="length of the short prefill")
    parser.add_argument(
        "--long", type=int, default=65_536, help="length of the long one; 0 skips it"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--all-logits", action="store_true", help="also time transformers with all logits"
    )
    parser.add_argument("--only-cost", action="store_true", help="measure only the cost per token")
    parser.add_argument(
        "--segment-tokens", type=int, nargs="+", help="compare only segments of so many tokens"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)  # used by child processes
    add_threads(parser)
    return parser.parse_args()


def build(args: argparse.Namespace) -> RecurrentLM:
    """Returns a model with random weights that depend only on its shape."""
    torch.manual_seed(0)
    return RecurrentLM(RecurrentConfig(args.vocab, args.d_model, args.layers, MIXER)).eval()


def draw(args: argparse.Namespace, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(args.vocab, (1, length), generator=generator)


def transformers_twin(model: RecurrentLM) -> Any:
    """Returns the Hugging Face model of the same shape with the same weights."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = model.config
    twin = Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            num_hidden_layers=config.n_layers,
            num_heads=MIXER["expand"] * config.d_model // MIXER["head_dim"],
            head_dim=MIXER["head_dim"],
            state_size=MIXER["d_state"],
            expand=MIXER["expand"],
            conv_kernel=MIXER["d_conv"],
            n_groups=MIXER["n_groups"],
            layer_norm_epsilon=config.norm_eps,
            tie_word_embeddings=True,
        )
    ).eval()
    renamed = {
        name.replace("embedding.", "backbone.embeddings.")
        .replace("blocks.", "backbone.layers.")
        .replace("head.", "lm_head."): tensor
        for name, tensor in model.state_dict().items()
    }
    renamed["backbone.norm_f.weight"] = renamed.pop("norm.weight")
    twin.load_state_dict(renamed)
    return twin


def against_transformers(model: RecurrentLM, args: argparse.Namespace) -> dict[str, float]:
    """Returns seconds and speedup at `--tokens` after checking that both logits are equal."""
    twin, tokens = transformers_twin(model), draw(args, args.tokens)
    ours = model(tokens, keep=1).logits[:, -1]
    theirs = twin(tokens, logits_to_keep=1).logits[:, -1]
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    timed: dict[str, Callable[[], object]] = {
        "longrnn": lambda: model(tokens, keep=1),
        "transformers": lambda: twin(tokens, logits_to_keep=1),
        "the projections alone": lambda: projections(model, args.tokens),
    }
    if args.all_logits:
        timed["transformers, all logits"] = lambda: twin(tokens)
    seconds = interleaved(timed, args.repeats, warm=True)
    figures = {"largest_difference_of_logits": (ours - theirs).abs().max().item()}
    for name, value in seconds.items():
        print(f"{name:26} {value:8.2f} s   {value / seconds['longrnn']:5.1f} x")
        figures[f"seconds_{name}"] = value
    figures["speedup"] = seconds["transformers"] / seconds["longrnn"]
    return figures


def projections(model: RecurrentLM, length: int) -> None:
    """Computes only the matrix products with weights: a lower bound on the time of a prefill."""
    width = min(length, segments.segment_tokens(model.config.d_model))
    for mixer in model.cells:
        assert isinstance(mixer, Mamba2)
        narrow, wide = torch.ones(width, mixer.d_model), torch.ones(width, mixer.d_inner)
        for _ in range(length // width):
            mixer.in_proj(narrow)
            mixer.out_proj(wide)


def mebibytes() -> tuple[float, float]:
    """Returns the current and the peak resident memory of this process in MiB."""
    now = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    return now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def memory(args: argparse.Namespace) -> dict[str, float]:
    """Returns the peak memory of both prefills. Call this before the parent process allocates much
    memory: ru_maxrss of a child starts at the value of its parent."""
    figures: dict[str, float] = {}
    for name, length in (("short", args.tokens), ("long", args.long)):
        shape = ["--layers", args.layers, "--d-model", args.d_model, "--vocab", args.vocab]
        command = ["benchmarks.prefill_cpu", *map(str, shape)]
        command += ["--memory-of", str(length), "--threads", str(torch.get_num_threads())]
        figures |= {f"{key}_{name}": value for key, value in in_a_process(*command).items()}
    for key, what in (("peak_mib", "total"), ("peak_over_model_mib", "above the loaded model")):
        short, long = figures[f"{key}_short"], figures[f"{key}_long"]
        figures[f"{key}_ratio"] = long / short
        print(f"peak memory {what}: {short:.0f} MiB, {long:.0f} MiB, ratio {long / short:.3f}")
    return figures


def cost_per_token(model: RecurrentLM, args: argparse.Namespace) -> dict[str, float]:
    """Returns microseconds per token of a short prefill and of a long one, split into parts.

    Each part has the length of the short prefill. A short prefill runs alternately before and after
    each part, so that changes in the speed of the machine affect both. Splitting does not change
    the computation: a prefill is computed in segments that are not longer than these parts.
    """
    short, state = draw(args, args.tokens), None
    of_short, of_long = [], []
    for number, piece in enumerate(draw(args, args.long).split(args.tokens, dim=1)):
        for what in ("short", "long") if number % 2 else ("long", "short"):
            start = clock()
            if what == "short":
                model(short, keep=1)
                of_short.append((clock() - start) * 1e6 / args.tokens)
            else:
                state = model(piece, state, keep=1).state
                of_long.append((clock() - start) * 1e6 / args.tokens)
    a, b = sum(of_short) / len(of_short), sum(of_long) / len(of_long)
    print(f"cost per token: {a:.0f} us at {args.tokens}, {b:.0f} us at {args.long}: {b / a:.3f} x")
    half = len(of_long) // 2
    later = sum(of_long[half:]) / sum(of_short[half:])
    print(f"  in the second half of the long prefill: {later:.3f} x")
    figures = {"us_per_token_short": a, "us_per_token_long": b, "us_per_token_ratio": b / a}
    return {**figures, "us_per_token_ratio_second_half": later}


def compare_segments(model: RecurrentLM, args: argparse.Namespace) -> None:
    tokens = draw(args, args.tokens)

    def prefill(size: int) -> None:
        segments.segment_tokens = lambda d_model: size
        model(tokens, keep=1)

    sizes = {str(size): lambda size=size: prefill(size) for size in args.segment_tokens}
    for name, seconds in interleaved(sizes, args.repeats).items():
        print(f"segments of {name:>5} tokens: {seconds:.2f} s")


@torch.no_grad()
def main() -> None:
    args = arguments()
    use_threads(args)
    if args.memory_of:
        model = build(args)
        model(draw(args, 8), keep=1)
        before, _ = mebibytes()
        model(draw(args, args.memory_of), keep=1)
        _, peak = mebibytes()
        print(json.dumps({"peak_mib": peak, "peak_over_model_mib": peak - before}))
        return
    if args.segment_tokens:
        compare_segments(build(args), args)
        return
    if args.only_cost:
        cost_per_token(build(args), args)
        return
    figures: dict[str, Any] = {"shape": [args.layers, args.d_model, args.vocab]}
    figures |= {"tokens": args.tokens, "long": args.long, "repeats": args.repeats}
    if args.long:
        figures |= memory(args)
    model = build(args)
    figures |= against_transformers(model, args)
    if args.long:
        figures |= cost_per_token(model, args)
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()

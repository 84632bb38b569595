"""Speed on the CPU, beside transformers, llama.cpp and what the hardware allows.

The model is a Mamba-2 (or `--cell mamba`) of the shape of mamba2-130m with random weights, batch
size 1 but for `--rows`. All variants of a case are interleaved in one process, and outputs are
compared before anything is timed.

| case | what is timed |
| --- | --- |
| prefill | reading a prompt, logits of the last token only; bound: the matrix products alone |
| decode | one token per call; bound: reading all weights once per token |
| train | forward, backward and optimizer step, float32; bound: products and their gradients |
| hybrid | the same of four rows of tiny hybrids of the tests |
| mitigations | reading without logits, under each mitigation; also one token at a time |
| layer | a layer of each cell and its gradients, beside that of transformers without GPU kernels |
| question | `--steps` tokens after a stored text of 1k, 4k and 16k, beside a Llama with its cache |

llama.cpp takes part where `--gguf` names a folder with its models, see `models.llama_timers`.

Examples:
    python -m benchmarks.speed prefill decode --threads 1 --json speed.json
    python -m benchmarks.speed train --layers 12 --d-model 512 --vocab 256 --repeats 7 --threads 1
    python -m benchmarks.speed mitigations --layers 2 --tokens 2048 --repeats 11 --threads 1
    python -m benchmarks.speed question --steps 32 --threads 1
    python -m benchmarks.speed layer --d-model 1024 --steps 16 --repeats 9 --threads 1
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.layers import LAYERS, timed_model
from benchmarks.models import build, draw, llama_timers, products_of, transformer, transformers_twin
from benchmarks.timing import interleaved, parser, report, write_json
from longrnn import load
from longrnn.data.batch import Batch, row_starts
from longrnn.hf.hybrid.model import HybridLM
from longrnn.models import TrainableLM
from longrnn.state import detach
from longrnn.training.objective import Objective
from tests.hf.foreign import VOCAB, architecture

DTYPES = ("float32", "bfloat16")
HYBRIDS = ("falcon_h1", "granitemoehybrid", "qwen3_next", "kimi_linear")
# Lengths of the texts that a question follows.
STORED = (1024, 4096, 16_384)
Figures = dict[str, Any]


def arguments() -> argparse.Namespace:
    options = parser(__doc__, repeats=5)
    options.add_argument("cases", nargs="+", choices=CASES, metavar="CASE")
    options.add_argument("--tokens", type=int, default=1024, help="length of a prompt or row")
    options.add_argument("--steps", type=int, default=4, help="tokens per measurement of decoding")
    options.add_argument("--rows", type=int, default=1, help="of a batch, in decoding")
    options.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    options.add_argument("--window", type=int, default=1000, help="tokens of sliding_window")
    options.add_argument("--model", help="an embedded checkpoint instead of random weights")
    options.add_argument(
        "--continued", action="store_true", help="each call continues the one before"
    )
    options.add_argument("--gguf", type=Path, help="folder with float32.gguf and bfloat16.gguf")
    options.add_argument("--llama-bench", default=which("llama-bench"), help="of llama.cpp")
    return options.parse_args()


@torch.inference_mode()
def prefill(args: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    tokens = draw(args.vocab, args.tokens)
    for dtype in args.dtypes:
        calls = timed_model(args, getattr(torch, dtype)).prefill(tokens)
        if dtype == "float32":
            ours, theirs = calls["longrnn"]().logits, calls["transformers"]().logits
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
        title = f"prefill of {args.tokens:,} tokens, {dtype}"
        timers = llama_timers(args, "prefill", dtype, args.tokens)
        yield title, report(title, args.tokens, interleaved(calls, args.repeats, timers))


@torch.inference_mode()
def decode(args: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    prompt, tokens = (draw(args.vocab, n).expand(args.rows, -1) for n in (8, args.steps))
    for dtype in args.dtypes:
        calls = timed_model(args, getattr(torch, dtype)).decoding(prompt, tokens)
        title = f"decoding of {args.rows} rows, {dtype}"
        timers = llama_timers(args, "decode", dtype, args.steps) if args.rows == 1 else {}
        count = args.rows * args.steps
        yield title, report(title, count, interleaved(calls, args.repeats, timers))


def optimizer_step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], float]:
    """Returns a function that does a training step on `loss`, and returns the loss before it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> float:
        value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return value.item()

    return step


def our_step(
    model: TrainableLM, tokens: Tensor, targets: Tensor, *, carry: bool = False
) -> Callable[[], float]:
    """Returns a training step of a model of longrnn.

    Args:
        model: what is trained.
        tokens: `(b, t)`.
        targets: `(b, t)`.
        carry: whether a step starts from the states that the last one ended with, not from zero.
    """
    objective, state = Objective(model.train()), model.init_state(len(tokens))
    batch = Batch(tokens, targets, row_starts(tokens))

    def loss() -> Tensor:
        nonlocal state
        output = objective([batch], state)
        state = detach(output.state) if carry else state
        return output.loss

    return optimizer_step(model, loss)


def their_step(model: Any, tokens: Tensor, targets: Tensor) -> Callable[[], float]:
    """Returns a training step of a Hugging Face model."""
    model.train()

    def loss() -> Tensor:
        logits = model(tokens, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    return optimizer_step(model, loss)


def train(args: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    ids = draw(args.vocab, args.tokens + 1)
    rows = ids[:, :-1], ids[:, 1:]
    recomputing = build(args)
    recomputing.gradient_checkpointing_enable()
    calls = {
        "longrnn": our_step(build(args), *rows),
        "longrnn, carried state": our_step(build(args), *rows, carry=True),
        "longrnn, backend torch": our_step(build(args, "torch"), *rows),
        "longrnn, checkpointing": our_step(recomputing, *rows),
        "transformers": their_step(transformers_twin(build(args)), *rows),
    }
    title = f"training step of {args.tokens:,} tokens, vocabulary {args.vocab:,}, float32"
    check_losses(calls)
    bound = {"products alone": partial(products_of, build(args), args.tokens)}
    yield title, report(title, args.tokens, interleaved({**calls, **bound}, args.repeats))


def hybrid(args: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    ids = draw(VOCAB, 4 * (args.tokens + 1)).view(4, -1)
    rows = ids[:, :-1], ids[:, 1:]
    for kind in HYBRIDS:
        theirs = partial(architecture, kind, max_position_embeddings=args.tokens)

        def ours(theirs: Callable[[], Any] = theirs) -> HybridLM:
            return HybridLM(theirs()).with_attention_window(args.tokens)

        calls = {
            "transformers": their_step(theirs(), *rows),
            "longrnn": our_step(ours(), *rows),
            "longrnn, carried state": our_step(ours(), *rows, carry=True),
        }
        title = f"training step of a tiny {kind}, 4 rows of {args.tokens:,} tokens, float32"
        check_losses(calls)
        yield title, report(title, 4 * args.tokens, interleaved(calls, args.repeats))


def check_losses(calls: Mapping[str, Callable[[], float]]) -> None:
    """Takes one training step by each call, whose losses must be equal."""
    losses = {name: call() for name, call in calls.items()}
    for value in losses.values():
        assert abs(value - next(iter(losses.values()))) < 1e-3 * value, losses


@torch.inference_mode()
def mitigations(args: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    model = load(args.model) if args.model else build(args)
    tokens = draw(model.vocab_size, args.tokens)
    state, largest = model.init_state(1), [torch.zeros(1)] * len(model.cells)
    for token in tokens.split(1, dim=1):  # the largest norm of each head
        state = model(token, state, keep=0).state
        norms = [memory[0].flatten(1).norm(dim=1) for memory in model.memories(state)]
        largest = [a.maximum(b) for a, b in zip(largest, norms, strict=True)]

    def limited(factor: float) -> Any:
        threshold = [(factor * norms).tolist() for norms in largest]
        return model.under({"kind": "state_norm", "threshold": threshold})

    variants = {
        "plain": model,
        "forget_more": model.under("forget_more"),
        "state_norm, far": limited(1e6),
        "state_norm, near": limited(1.01),
        "state_norm, most rescaled": limited(0.3),
        f"sliding_window, {args.window:,}": model.under(f"sliding_window(window={args.window})"),
    }
    expected = model(tokens, keep=1).logits
    for name in ("state_norm, far", "state_norm, near"):  # nothing is rescaled
        logits = variants[name](tokens, keep=1).logits
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    states: dict[str, Any] = dict.fromkeys(variants)

    def read(name: str) -> None:
        end = variants[name](tokens, states[name], keep=0).state
        states[name] = end if args.continued else None

    def one_by_one(name: str) -> None:
        for token in tokens[:, : args.steps].split(1, dim=1):
            latest[name] = variants[name](token, latest[name], keep=0).state

    shape = args.model or f"{args.layers} layers × {args.d_model}"
    title = f"{args.tokens:,} tokens under mitigations, {shape}"
    calls = {name: lambda name=name: read(name) for name in variants}
    yield title, report(title, args.tokens, interleaved(calls, args.repeats))
    latest = {name: variant(tokens, keep=0).state for name, variant in variants.items()}
    title = f"{args.steps:,} tokens one at a time after these, {shape}"
    calls = {name: lambda name=name: one_by_one(name) for name in variants}
    yield title, report(title, args.steps, interleaved(calls, args.repeats))


def layer(args: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    for cell in [args.cell] if args.cell else LAYERS:
        timed = LAYERS[cell](args.d_model)
        text = torch.randn(1, max(args.tokens, args.steps), args.d_model)
        tokens = text.shape[1]
        name = f"{timed.title} layer, prefill of {tokens:,} tokens"
        with torch.inference_mode():
            yield name, report(name, tokens, interleaved(timed.prefill(text), args.repeats))
        name = f"{timed.title} layer, gradients of {tokens:,} tokens"
        yield name, report(name, tokens, interleaved(timed.training(text), args.repeats))
        name = f"{timed.title} layer, decoding"
        with torch.inference_mode():
            decoding = timed.decoding(text, text[:, : args.steps])
            yield name, report(name, args.steps, interleaved(decoding, args.repeats))


@torch.inference_mode()
def question(args: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    from transformers import DynamicCache

    model, llama = build(args), transformer(args.vocab)
    tokens, title = draw(args.vocab, args.steps), f"{args.steps} tokens after a stored text"
    for stored in STORED:
        state = model(draw(args.vocab, stored), keep=1).state
        # What the cache holds does not change the time.
        keys = torch.randn(1, llama.config.num_key_value_heads, stored, llama.config.head_dim)
        cache = DynamicCache([(keys, keys)] * llama.config.num_hidden_layers)

        def theirs(cache: Any = cache) -> None:
            llama(tokens, past_key_values=cache, logits_to_keep=1)
            cache.crop(-args.steps)

        calls: dict[str, Callable[[], object]] = {
            "longrnn": partial(model, tokens, state, keep=1),
            "transformers, Llama": theirs,
        }
        name = f"{title} of {stored:,}"
        yield name, report(name, args.steps, interleaved(calls, args.repeats))


CASES: dict[str, Callable[[argparse.Namespace], Iterator[tuple[str, Figures]]]] = {
    case.__name__: case for case in (prefill, decode, train, hybrid, mitigations, layer, question)
}


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    figures: Figures = {"shape": [args.layers, args.d_model, args.vocab], "repeats": args.repeats}
    for name in args.cases:
        for title, result in CASES[name](args):
            figures[title] = result
            if args.json:
                write_json(args.json, figures)


if __name__ == "__main__":
    main()

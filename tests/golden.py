"""Numbers that are recorded in `tests/data/golden.json`, and the cases that compute them.

`python -m tests.golden NAME …` records the cases whose names begin with one of these names again,
and drops those that no longer exist: for results that are meant to change.

Inputs are functions of fixed seeds of numpy, and the text in `tests/data/book.txt`.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from longrnn import (
    LanguageModel,
    RecurrentConfig,
    RecurrentLM,
    evaluate,
    generate,
    load,
    mitigation,
    train,
)
from longrnn.models.checkpoint import save_model
from longrnn.results import read_rows
from tests.contracts.subjects import cell_leaves, read
from tests.texts import BOOK, DATA

RECORD = DATA / "golden.json"
Numbers = dict[str, list[Any]]
Split = Callable[[int], list[int]]
# Tokens read when a result is recorded; two are longer than a chunk of the scans (64 tokens).
LENGTHS = (6, 70, 400)
CHECKPOINTS = (
    "collapse-tiny",
    "passkey-tiny",
    "passkey-tiny-short",
    "recall-tiny",
    "recall-tiny-numbered",
)
# Under which mitigations: "" is none. Some act only on the longer texts, some on some heads.
MITIGATIONS = (
    "",
    "forget_more",
    "forget_more(decay_scale=0.98, input_scale=1.0)",
    "sliding_window(window=16)",
    "sliding_window(window=60)",
    "state_norm(threshold=0.3)",
    "state_norm(threshold=3, layers=[1])",
    "forget_more(decay_scale=0.9)+sliding_window(window=9, layers=[0])",
    "scale_delta(scale=0.5)",
    "scale_delta(scale=2, heads=[0])",
    "scale_decay(scale=2)",
    "scale_decay(scale=0.1, layers=[1])",
    "power_decay(scale=0.5)",
    "power_decay(scale=1.5)",
    "token_filter(threshold=0.01)",
    "token_filter(threshold=0.08, heads=[[0, 0], [1, 1]])",
    "sliding_window(window=300, heads=[1])",
    "state_norm(threshold=0.05, heads=[0])",
    "power_decay(scale=0.8)+scale_delta(scale=0.7)+token_filter(threshold=0.005)"
    "+state_norm(threshold=1)",
)
CELLS: dict[str, dict[str, Any]] = {
    "rnn": {"kind": "rnn"},
    "gru": {"kind": "gru"},
    "lstm": {"kind": "lstm"},
    "mamba2": {"kind": "mamba2", "d_state": 6, "head_dim": 4, "n_groups": 2},
}


def one_call(length: int) -> list[int]:
    return [length]


def token_by_token(length: int) -> list[int]:
    return [1] * length


def random_pieces(length: int) -> list[int]:
    """Sizes from 1 token to a third of the whole, which sum to `length`."""
    cuts = np.random.default_rng(length).integers(1, length, 7)
    edges = sorted({0, *map(int, cuts), length})
    return np.diff(edges).tolist()


@lru_cache(maxsize=4)
def opened(name: str, dtype: torch.dtype, backend: str) -> Any:
    return load(name, dtype=dtype, backend=backend)


def outputs(
    name: str,
    spec: str,
    split: Split = one_call,
    *,
    dtype: torch.dtype = torch.float64,
    lengths: Sequence[int] = LENGTHS,
    backend: str = "auto",
) -> Numbers:
    """Logits, losses and norms of the states of a checkpoint after each length, by name."""
    plain: LanguageModel = opened(name, dtype, backend)
    model, found = plain.under(mitigation(spec) if spec else None), Numbers()
    directions = np.random.default_rng(1).standard_normal((256, 1)) / 16
    for length in lengths:
        drawn = np.random.default_rng(0).integers(0, 256, length)
        text = np.frombuffer(BOOK.read_bytes()[:length], np.uint8).astype(np.int64)
        ids = torch.from_numpy(np.stack([drawn, text]))
        with torch.no_grad():
            logits, state = read(model, ids, None, split(length))
        logits = logits.double()
        last = torch.cat([logits[:, -1, :2], logits[:, -1] @ torch.from_numpy(directions)], 1)
        found[f"{length} logits"] = last.flatten().tolist()
        found[f"{length} logsumexp"] = logits[:, -1].logsumexp(-1).tolist()
        loss = F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")
        found[f"{length} loss"] = loss.mean(1).tolist()
        for key, leaf in cell_leaves(model, state).items():
            norm = leaf.double().norm().item()
            found[f"{length} state {key.removeprefix('final ')}"] = [norm]
    return found


MODELS: dict[str, Callable[..., Numbers]] = {
    f"{name} {spec}".strip(): partial(outputs, name, spec)
    for name in CHECKPOINTS
    for spec in MITIGATIONS
}

# Training. The data are one repeated byte, in which all rows are equal, so that they do not depend
# on how rows are drawn (a document is 100 rows of 40 tokens with the byte after the last); and the
# text, and tasks, where they do.


def weights(key: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Values of a parameter, a function of its name and shape."""
    randomness = np.random.default_rng(zlib.crc32(key.encode()))
    if key.endswith("A_log"):  # rates from 0.02 to 7
        return randomness.uniform(-4, 2, shape)
    drawn = randomness.standard_normal(shape)
    if key.endswith("dt_bias"):  # steps of about 0.1
        return 0.5 * drawn - 2
    if key.endswith(("norm.weight", ".D")):
        return 1 + 0.1 * drawn
    return 0.1 * drawn if len(shape) == 1 else 0.7 * drawn / shape[-1] ** 0.5


def options(cell: str, vocab_size: int = 256) -> dict[str, Any]:
    return {"vocab_size": vocab_size, "d_model": 8, "n_layers": 2, "mixer": CELLS[cell]}


def losses(folder: Path, config: dict[str, Any]) -> Numbers:
    """The loss of each of 20 steps of training."""
    values = {
        "output_dir": str(folder / "run"),
        "max_steps": 20,
        "warmup_steps": 4,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "adam_epsilon": 1e-3,  # with a tiny one, Adam turns rounding near 0 into steps
        **config,
    }
    return {"loss": train(values).values("loss")}


def trained(cell: str, data: str, **config: Any) -> Numbers:
    """The losses of a small model of bytes, from weights that are functions of their names."""
    model = RecurrentLM(RecurrentConfig(**options(cell)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parts = [one for one in name.split(".") if one not in ("blocks", "mixer", "cell")]
            values = weights(".".join(parts), tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(values))
    with TemporaryDirectory() as name:
        folder = Path(name)
        save_model(model, folder / "start")
        text = BOOK.read_bytes() if data == "book" else b"a" * 4001
        files = [folder / f"{number}.txt" for number in range(4)]
        for file in files:
            file.write_bytes(text)
        task = {"kind": "text", "data": [str(file) for file in files]}
        given = {"init_from": str(folder / "start"), "task": task, "length": {"max": 40}}
        return losses(folder, given | config)


def trained_on_task(cell: str, task: dict[str, Any], vocab_size: int, **config: Any) -> Numbers:
    """The losses of a small model with random initial weights on a task."""
    with TemporaryDirectory() as name:
        return losses(Path(name), {"model": options(cell, vocab_size), "task": task, **config})


STARTS: dict[str, dict[str, Any]] = {
    "zero": {},
    "carry": {"initial_state": {"kind": "carry"}, "segments_per_step": 2},
    "pass": {"initial_state": {"kind": "pass"}},
    "fitted_noise": {"initial_state": {"kind": "fitted_noise"}},
    "random_noise": {"initial_state": {"kind": "random_noise", "std": 0.3}},
}
WINDOW = "sliding_window(window=20)"
CARRY: dict[str, Any] = {"initial_state": {"kind": "carry"}}
ACCUMULATED: dict[str, Any] = {"gradient_accumulation_steps": 2, "weight_decay": 0.1}
REVERSE = {"kind": "reverse", "vocab_size": 8}
REPEATED = {"kind": "passkey", "min_segments": 3, "max_segments": 3, "max_repeat": 50}
TRAINING: dict[str, Callable[[], Numbers]] = {
    **{
        f"train {data} {cell} {start}": partial(trained, cell, data, **config)
        for start, config in STARTS.items()
        for data, cell in [("byte", "mamba2"), ("byte", "lstm"), ("book", "mamba2")]
    },
    f"train byte mamba2 {WINDOW}": partial(trained, "mamba2", "byte", mitigation=WINDOW, **CARRY),
    "train book gru accumulated": partial(trained, "gru", "book", **ACCUMULATED),
    **{
        f"train reverse {cell}": partial(trained_on_task, cell, REVERSE, 9, length={"max": 8})
        for cell in CELLS
    },
    "train passkey repeated": partial(
        trained_on_task, "mamba2", REPEATED, 256, length={"max": 180}, segments_per_step=3, **CARRY
    ),
}

# Texts and evaluations.

PROMPTS = (
    BOOK.read_text()[:300],
    "The grass is green. The sky is blue. The sun is yellow. Here we",
)


def generated(name: str) -> Numbers:
    """The bytes that a checkpoint generates greedily after each prompt, by mitigation."""
    found = {}
    for spec in ("", "sliding_window(window=64)", "state_norm(threshold=3)"):
        model = load(f"{name}+{spec}" if spec else name)
        for number, prompt in enumerate(PROMPTS):
            ids = torch.tensor([list(prompt.encode())])
            done = generate(model, ids, max_new_tokens=40)
            found[f"{spec} {number}".strip()] = done.tokens[0]
    return found


def evaluated(name: str, evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """The items of an evaluation of a checkpoint with their results."""
    with TemporaryDirectory() as folder:
        evaluate(name, evaluation, folder)
        rows, _ = read_rows(Path(folder) / "rows.jsonl")
    return [{**row["item"], **row["result"]} for row in rows]


def passkeys() -> Numbers:
    """The answers of checkpoints to prompts of three lengths."""
    how = {"kind": "passkey", "lengths": "256,1k,4k", "n": 2, "depths": "0,0.5,1"}
    keys = ("length", "place", "key", "said")
    return {
        name: [list(one) for one in sorted(tuple(row[k] for k in keys) for row in found)]
        for name in ("passkey-tiny", "passkey-tiny-short", "recall-tiny")
        for found in [evaluated(name, how)]
    }


def perplexities() -> Numbers:
    """The loss of checkpoints in windows of the text: of all tokens, then between powers of 2."""
    found = {}
    for name in ("collapse-tiny", "recall-tiny"):
        how = {"kind": "perplexity", "texts": [str(BOOK)], "lengths": "1,2,4,8,2k"}
        for row in evaluated(name, how):
            edges, nats = row["edges"], row["nats"]
            # A row has sums from each power of 2 to the next.
            found[f"{name} {row['start']}"] = [sum(nats) / edges[-1]] + [
                part / (stop - start)
                for part, (start, stop) in zip(nats, pairwise(edges), strict=True)
            ]
    return found


EXACT: dict[str, Callable[[], Numbers]] = {
    **{f"generate {name}": partial(generated, name) for name in CHECKPOINTS},
    "passkey": passkeys,
}
EVALUATIONS: dict[str, Callable[[], Numbers]] = {"perplexity": perplexities}
CASES: dict[str, Callable[[], Numbers]] = {**MODELS, **TRAINING, **EXACT, **EVALUATIONS}


def main(prefixes: Sequence[str]) -> None:
    """Records the cases whose names begin with one of `prefixes`."""
    before = json.loads(RECORD.read_text())
    record = {
        name: case() if name.startswith(tuple(prefixes)) else before[name]
        for name, case in CASES.items()
    }
    for found in record.values():
        for key, values in found.items():
            found[key] = [float(f"{x:.10g}") if isinstance(x, float) else x for x in values]
    lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in record.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

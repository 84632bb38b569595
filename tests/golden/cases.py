"""The cases of the golden tests, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from longrnn import LanguageModel, Mitigated, generate, load, mitigation
from tests.golden.results import (
    LENGTHS,
    Numbers,
    Split,
    gradients,
    model,
    one_call,
    outputs,
    steps,
)
from tests.golden.today import (
    command,
    model_options,
    passkey_rows,
    perplexity_rows,
    save,
    text_task,
    train,
)
from tests.texts import BOOK

CHECKPOINTS = (
    "collapse-tiny",
    "passkey-tiny",
    "passkey-tiny-short",
    "recall-tiny",
    "recall-tiny-numbered",
)
# Under which mitigations: "" is none. Some act only on the longer texts, some on some heads.
GATED = (
    "forget_more",
    "forget_more(decay_scale=0.98, input_scale=1.0)",
    "sliding_window(window=16)",
    "sliding_window(window=60)",
    "state_norm(threshold=0.3)",
    "state_norm(threshold=3, layers=[1])",
    "forget_more(decay_scale=0.9)+sliding_window(window=9, layers=[0])",
)
STEPS = (
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
MITIGATIONS = {
    "mamba2": ("", *GATED, *STEPS),
    "gru": ("", *GATED),
    "lstm": ("", *GATED),
    "rnn": ("", "state_norm(threshold=0.3)", "state_norm(threshold=3, layers=[1])"),
}
MAMBA2 = {"kind": "mamba2", "d_state": 6, "head_dim": 4, "n_groups": 2}
CELLS: dict[str, dict[str, Any]] = {
    "rnn": {"kind": "rnn"},
    "gru": {"kind": "gru"},
    "lstm": {"kind": "lstm"},
    "mamba2": MAMBA2,
}
# Models whose options run code of their own, and mitigations that do so there.
OPTIONS: dict[str, dict[str, Any]] = {
    "rnn-relu": {"cell": {"kind": "rnn", "nonlinearity": "relu"}},
    "rnn-identity": {"cell": {"kind": "rnn", "nonlinearity": "identity"}},
    "mamba2-no-conv": {"cell": {"kind": "mamba2", "d_state": 5, "head_dim": 8, "d_conv": 1}},
    "mamba2-bias": {
        "cell": {**MAMBA2, "bias": True, "conv_bias": False, "d_conv": 2, "expand": 3},
    },
    "mamba2-dt-limit": {"cell": {**MAMBA2, "n_groups": 4, "dt_limit": [0.05, 0.2]}},
    "plain-untied": {"cell": MAMBA2, "block": "plain", "tie_embeddings": False},
    "sinusoidal": {"cell": {"kind": "gru"}, "position": {"kind": "sinusoidal"}},
    "learned": {"cell": {"kind": "lstm"}, "position": {"kind": "learned", "max_length": 400}},
    "random": {"cell": {"kind": "rnn"}, "position": {"kind": "random", "max_length": 400}},
    "duplicate": {"cell": MAMBA2, "position": {"kind": "duplicate"}},
}
OPTION_MITIGATIONS = ("", "state_norm(threshold=0.3)", "sliding_window(window=16)")


def checkpoint(name: str, spec: str, dtype: torch.dtype, **how: Any) -> LanguageModel:
    """An embedded checkpoint under a mitigation; the plain model is loaded once."""
    plain = opened(name, dtype, *how.values())
    return Mitigated(plain, mitigation(spec)) if spec else plain


@lru_cache(maxsize=4)
def opened(name: str, dtype: torch.dtype, backend: str = "auto") -> Any:
    return load(name, dtype=dtype, backend=backend)


def small(options: dict[str, Any], spec: str, dtype: torch.dtype, **how: Any) -> LanguageModel:
    """A small model under a mitigation; `backend` is an option of Mamba-2."""
    cell = {**options["cell"], **(how if options["cell"]["kind"] == "mamba2" else {})}
    plain = model(**{**options, "cell": cell}).to(dtype)
    return Mitigated(plain, mitigation(spec)) if spec else plain


class Model(NamedTuple):
    """A model whose numbers are recorded.

    Attributes:
        make: builds it in a dtype.
        vocab_size: its number of tokens.
        is_small: whether its gradients are recorded too.
        scans: whether its cell is a Mamba-2.
    """

    make: Callable[..., LanguageModel]
    vocab_size: int
    is_small: bool
    scans: bool


def small_models(name: str, options: dict[str, Any], specs: Sequence[str]) -> dict[str, Model]:
    scans = options["cell"]["kind"] == "mamba2"
    return {
        f"{name} {spec}".strip(): Model(partial(small, options, spec), 11, True, scans)
        for spec in specs
    }


MODELS: dict[str, Model] = {
    f"{name} {spec}".strip(): Model(partial(checkpoint, name, spec), 256, False, True)
    for name in CHECKPOINTS
    for spec in MITIGATIONS["mamba2"]
}
for name, cell in CELLS.items():
    MODELS |= small_models(name, {"cell": cell}, MITIGATIONS[name])
for name, options in OPTIONS.items():
    # A window is not defined for an RNN.
    specs = OPTION_MITIGATIONS[:2] if options["cell"]["kind"] == "rnn" else OPTION_MITIGATIONS
    MODELS |= small_models(name, options, specs)


def results(
    case: Model,
    split: Split = one_call,
    *,
    dtype: torch.dtype = torch.float64,
    lengths: Sequence[int] = LENGTHS,
    with_gradients: bool = True,
    **how: Any,
) -> Numbers:
    """The numbers of a model of `MODELS`; gradients only of small ones."""
    made = case.make(dtype, **how)
    found = outputs(made, case.vocab_size, split, lengths)
    if with_gradients and case.is_small:
        found |= gradients(made, case.vocab_size, split)
    return found


# Cases: training. The data are one repeated byte, in which all rows are equal, so that they do not
# depend on how rows are drawn (a document is 100 rows of 40 tokens with the byte after the last);
# and the text, and tasks, where they do.

STARTS: dict[str, dict[str, Any]] = {
    "zero": {},
    "carry": {"initial_state": {"kind": "carry"}, "segments_per_step": 2},
    "pass": {"initial_state": {"kind": "pass"}},
    "fitted_noise": {"initial_state": {"kind": "fitted_noise"}},
    "random_noise": {"initial_state": {"kind": "random_noise", "std": 0.3}},
}
TRAINED_SPEC = "sliding_window(window=20)"


def trained(cell: dict[str, Any], data: str, **config: Any) -> Numbers:
    """The losses of training a small model of bytes from fixed weights."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        save(model(cell, vocab_size=256), folder / "start")
        text = BOOK.read_bytes() if data == "book" else b"a" * 4001
        files = [folder / f"{number}.txt" for number in range(4)]
        for file in files:
            file.write_bytes(text)
        start = str(folder / "start")
        return {"loss": train(folder, init_from=start, **text_task(files), **config)}


def trained_on_task(cell: dict[str, Any], task: dict[str, Any], **config: Any) -> Numbers:
    """The losses of training a small model with random initial weights on a task."""
    vocab_size = 9 if task["kind"] == "reverse" else 256
    built = model_options(cell, vocab_size=vocab_size)
    with TemporaryDirectory() as name:
        return {"loss": train(Path(name), model=built, task=task, **config)}


TRAINING: dict[str, Callable[[], Numbers]] = {
    f"steps {cell} {start}": partial(
        lambda options, carried: steps(model(options), carried=carried), options, start == "carry"
    )
    for cell, options in CELLS.items()
    for start in ("zero", "carry")
}
TRAINING |= {
    f"train {data} {cell} {start}": partial(trained, CELLS[cell], data, **config)
    for start, config in STARTS.items()
    for data, cell in [("byte", "mamba2"), ("byte", "lstm"), ("book", "mamba2")]
}
TRAINING |= {
    f"train byte mamba2 {TRAINED_SPEC}": partial(
        trained, MAMBA2, "byte", mitigation=TRAINED_SPEC, initial_state={"kind": "carry"}
    ),
    "train book gru accumulated": partial(
        trained, CELLS["gru"], "book", gradient_accumulation_steps=2, weight_decay=0.1
    ),
}
TRAINING |= {
    f"train reverse {cell}": partial(
        trained_on_task, CELLS[cell], {"kind": "reverse", "vocab_size": 8}, length={"max": 8}
    )
    for cell in CELLS
}
TRAINING["train passkey repeated"] = partial(
    trained_on_task,
    MAMBA2,
    {"kind": "passkey", "min_segments": 3, "max_segments": 3, "max_repeat": 50},
    length={"max": 180},
    initial_state={"kind": "carry"},
    segments_per_step=3,
)

# Cases: texts and evaluations.

PROMPTS = (
    BOOK.read_text()[:300],
    "The grass is green. The sky is blue. The sun is yellow. Here we",
)
GENERATED_WITH = ("", "sliding_window(window=64)", "state_norm(threshold=3)")


def generated(name: str) -> dict[str, list[int]]:
    """The bytes that a checkpoint generates greedily after each prompt, by mitigation."""
    found = {}
    for spec in GENERATED_WITH:
        model = load(f"{name}+{spec}" if spec else name)
        for number, prompt in enumerate(PROMPTS):
            ids = torch.tensor([list(prompt.encode())])
            done = generate(model, ids, max_new_tokens=40)
            found[f"{spec} {number}".strip()] = done.tokens[0]
    return found


def passkeys() -> dict[str, list[Any]]:
    """The answers of checkpoints to prompts of three lengths."""
    with TemporaryDirectory() as name:
        out = Path(name) / "out"
        names = ("passkey-tiny", "passkey-tiny-short", "recall-tiny")
        found = {}
        for model in names:
            lengths = ("--lengths", "256,1k,4k", "--n", "2", "--depths", "0,0.5,1")
            command("eval", "passkey", model, *lengths, "--output", out / model, "--quiet")
            found[model] = [list(row) for row in passkey_rows(out / model)]
        return found


def perplexities() -> Numbers:
    """The loss of checkpoints by position in windows of the text."""
    with TemporaryDirectory() as name:
        found = {}
        for model in ("collapse-tiny", "recall-tiny"):
            how = ("--text", BOOK, "--lengths", "2k", "--output", Path(name) / model, "--quiet")
            command("eval", "perplexity", model, *how)
            for start, losses in perplexity_rows(Path(name) / model).items():
                found[f"{model} {start}"] = losses
        return found


EXACT: dict[str, Callable[[], dict[str, list[Any]]]] = {
    **{f"generate {name}": partial(generated, name) for name in CHECKPOINTS},
    "passkey": passkeys,
}
EVALUATIONS: dict[str, Callable[[], Numbers]] = {"perplexity": perplexities}

"""Grids: what they expand to, and what is refused before anything is trained."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from longrnn.config import build_config
from longrnn.errors import UserError
from longrnn.models.recurrent import RecurrentConfig
from longrnn.sweep.grid import GridRun, applied, expand, parse_axes, run_name
from longrnn.training.config import TrainConfig
from tests.training.runs import BASE, KINDS


def base(**changes: Any) -> TrainConfig:
    return build_config(TrainConfig, {**BASE, **KINDS["reverse"], **changes})


def model_of(config: TrainConfig) -> RecurrentConfig:
    assert config.model is not None
    return config.model


def points(*items: str, **changes: Any) -> list[GridRun]:
    return expand(base(**changes), parse_axes(items), Path("out"))


def test_every_combination_once() -> None:
    """Each combination is one run in its own folder, with its values applied."""
    found = points("position.kind=none,learned", "vocab_size=8,20", "seed=1,2")
    assert len(found) == 8
    assert [point.values["seed"] for point in found[:3]] == ["1", "2", "1"]
    assert len({point.config.output_dir for point in found}) == 8
    last = found[-1]
    assert last.values == {"position.kind": "learned", "vocab_size": "20", "seed": "2"}
    assert last.config.output_dir == "out/position.kind=learned,vocab_size=20,seed=2"
    assert model_of(last.config).position == {"kind": "learned"}
    assert last.config.task == {"kind": "reverse", "vocab_size": 20, "held_out": 16}
    assert model_of(last.config).vocab_size == 21  # with the query token
    assert last.config.seed == 2
    # What the grid does not name is as in the base.
    rest = asdict(last.config)
    for key in ("seed", "output_dir", "task", "model"):
        rest[key] = asdict(base())[key]
    assert rest == asdict(base())


def test_a_changed_kind_keeps_the_options_that_it_knows() -> None:
    """A changed kind keeps the options that both kinds have, and drops the others."""
    position = {"kind": "learned", "max_length": 40, "combine": "add"}
    model = {**KINDS["reverse"]["model"], "position": position}
    kinds = applied(base(model=model), {"position.kind": "random"})
    assert model_of(kinds).position == {"kind": "random", "max_length": 40, "combine": "add"}
    none = applied(base(model=model), {"position.kind": "none"})
    assert model_of(none).position == {"kind": "none"}
    # The order in which keys are given does not matter.
    for values in (
        {"position.kind": "learned", "position.max_length": "30"},
        {"position.max_length": "30", "position.kind": "learned"},
    ):
        assert model_of(applied(base(), values)).position == {"kind": "learned", "max_length": 30}


def test_values_may_hold_commas() -> None:
    """Commas inside brackets or quotes do not split a value."""
    axes = parse_axes(["mixer={kind: lstm},{kind: mamba2, d_state: 4, head_dim: 8}", "seed=1"])
    assert axes["mixer"][1] == "{kind: mamba2, d_state: 4, head_dim: 8}"
    config = expand(base(), axes, Path("out"))[1].config
    assert model_of(config).mixer == {"kind": "mamba2", "d_state": 4, "head_dim": 8}
    assert parse_axes(["freeze=[a, b],['c,d']"]) == {"freeze": ["[a, b]", "['c,d']"]}


def test_names_of_runs() -> None:
    """Every run has its own folder name, valid on any file system."""
    assert run_name({"seed": "1"}) == "seed=1"
    odd = [run_name({"freeze": "[a]"}), run_name({"freeze": "{a}"})]
    assert odd[0] != odd[1]
    assert "/" not in run_name({"init_from": "runs/a"})
    assert len(run_name({"freeze": "x" * 500})) < 120


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([], "grid"),
        (["seed="], ""),
        (["seed=1,,2"], ""),
        (["seed"], "KEY=VALUE"),
        (["=1"], "KEY=VALUE"),
        (["sede=1,2"], "seed"),
        (["posiion.kind=none"], "position"),
        (["model.posiion=none"], "position"),
        (["position.knd=1"], "knd"),
        (["position.kind=sinusodal"], "sinusoidal"),
        (["learning_rate=1e-3,0.001"], "learning_rate=0.001"),
        (["save_steps=10,20"], "save_steps=10"),
        (["num_processes=2"], "num_processes=2"),
        (["context_parallel_size=2"], "context_parallel_size=2"),
        (
            ["position={kind: learned, max_length: 40},{kind: none}", "position.kind=learned,none"],
            "keys",
        ),
        (["seed=1,2,1"], "seed=1"),
        (["seed=1", "seed=2"], "seed"),
        (["position.kind=none", "model.position.kind=none"], ""),
        (["output_dir=a,b"], "--output"),
        (["seed=abc"], ""),
        (["seed.a=1"], ""),
        (["seed={"], "YAML"),
        (["position.kind=none,learned", "length.max=100"], "200"),
        (["task.kind=delayed_sum", "length.max=4,5", "length.min=4"], "even, not 5"),
        (["task.kind=predecessor_query", "vocab_size=8,6"], "vocab_size=8"),
        (["lr_scheduler_type=cosin"], "cosine"),
        (["freeze=[embeding.*]"], ""),
        (["model.vocab_size=8"], "token"),
    ],
)
def test_what_is_refused(items: list[str], says: str) -> None:
    """An invalid, repeated or equal run is refused before anything is trained."""
    with pytest.raises(UserError, match=".*") as refusal:
        points(*items, length={"max": 8})
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)

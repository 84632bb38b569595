"""Names of default results folders can be typed, and differ where the models differ."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from longrnn.cli.results_folders import LONGEST, models_name, results_folder
from longrnn.mitigations import MITIGATIONS

SIMPLE = [
    (["passkey-tiny"], None, {}, "passkey-tiny"),
    (["runs/mine/checkpoint-00000500"], None, {}, "checkpoint-00000500"),
    (["a+sliding_window(window=64)"], None, {}, "a--sliding_window-64"),
    (["a"], "sliding_window(window=64)", {}, "a--sliding_window-64"),
    (
        ["a", "a+sliding_window(window=64)", "a+forget_more(decay_scale=0.98, input_scale=1.0)"],
        None,
        {},
        "a--plain--sliding_window-64--forget_more-0.98-1.0",
    ),
    (["a", "b+norm.yaml"], None, {}, "a--b--norm.yaml"),
    (["a"], "forget_more", {"chunk_select": "4096"}, "a--forget_more--chunk_select-4096"),
    (["a", "b"], None, {"suite": "quick"}, "a--b--suite-quick"),
]


@pytest.mark.parametrize(("checkpoints", "mitigation", "options", "name"), SIMPLE)
def test_simple_lists_have_readable_names(
    checkpoints: list[str], mitigation: str | None, options: dict[str, str], name: str
) -> None:
    """A list that its name describes completely has no hash."""
    assert models_name(checkpoints, mitigation, options) == name
    folder = results_folder("passkey", checkpoints, mitigation, options)
    assert folder == Path("results/passkey") / name


# Every entry is another list of models, and each pair was chosen because the texts are alike.
LISTS = [
    (["a"], None, {}),
    (["A"], None, {}),
    (["a", "b"], None, {}),
    (["b", "a"], None, {}),
    (["a--b"], None, {}),
    (["a-b"], None, {}),
    (["a_b"], None, {}),
    (["a b"], None, {}),
    (["a", "a+forget_more"], None, {}),
    (["a+forget_more"], None, {}),
    (["a", "forget_more"], None, {}),
    (["a--forget_more"], None, {}),
    (["a+none"], None, {}),
    (["a", "plain"], None, {}),
    (["a", "a"], None, {}),
    (["a+forget_more", "b+forget_more"], None, {}),
    (["a+forget_more", "b"], None, {}),
    (["a", "b+forget_more"], None, {}),
    (["a+forget_more(decay_scale=0.9)"], None, {}),
    (["a+forget_more(input_scale=0.9)"], None, {}),
    (["a+forget_more(decay_scale=0.9, heads=[0])"], None, {}),
    (["a+forget_more(decay_scale=0.9, heads=[1])"], None, {}),
    (["a+state_norm(threshold=[[1, 2]])"], None, {}),
    (["a+state_norm(threshold=[[12]])"], None, {}),
    (["a+scale_decay+power_decay"], None, {}),
    (["a+power_decay+scale_decay"], None, {}),
    (["a", "a+scale_decay", "a+power_decay"], None, {}),
    (["a+c.yaml"], None, {}),
    (["a+one/c.yaml"], None, {}),
    (["a+two/c.yaml"], None, {}),
    (["a", "c.yaml"], None, {}),
    (["a"], None, {"suite": "b"}),
    (["a"], None, {"suite": "b+c"}),
    (["a", "b"], None, {"suite": "c"}),
    (["a", "suite-b"], None, {}),
    (["a"], None, {"chunk_select": "128"}),
    (["a", "chunk_select-128"], None, {}),
    (["con"], None, {}),
    (["x/m", "y/m"], None, {}),
    (["m", "m"], None, {}),
    (["ü"], None, {}),
    (["é"], None, {}),
    (["a" * 80], None, {}),
    (["a" * 81], None, {}),
    ([f"model-{k}" for k in range(20)], None, {}),
    ([f"model-{k}" for k in range(21)], None, {}),
]


def test_different_lists_have_different_names() -> None:
    """No two lists of models share a folder, not even one whose checkpoint has another's name."""
    names = [models_name(*given) for given in LISTS]
    assert len(set(names)) == len(LISTS), sorted(n for n in names if names.count(n) > 1)
    for (checkpoints, _, _), name in zip(LISTS, names, strict=True):
        # Checkpoints that have the name of a folder, or of its last part, are told apart.
        for other in ([name], [*checkpoints, name.rpartition("--")[2]]):
            if (other, None, {}) not in LISTS:
                assert models_name(other) not in names


def test_names_can_be_typed() -> None:
    """Names have safe characters only, are short, and are the same every time."""
    for given in LISTS:
        name = models_name(*given)
        assert re.fullmatch(r"[a-z0-9_][a-z0-9._-]*", name), name
        assert len(name) <= LONGEST + 10
        assert name == models_name(*given)
        assert name not in (".", "..", "con")


def test_every_mitigation_has_a_readable_name() -> None:
    """A mitigation with its first number has a name without a hash."""
    for kind, plain in product(MITIGATIONS, (True, False)):
        options = list(MITIGATIONS[kind].numbers)
        if plain or not options:
            assert models_name([f"a+{kind}"]) == f"a--{kind}"
        elif len(options) == 1:
            assert models_name([f"a+{kind}({options[0]}=5)"]) == f"a--{kind}-5"

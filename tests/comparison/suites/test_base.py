"""Suites are read from files; lengths that a model cannot reach have a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longrnn.bundled import names
from longrnn.comparison.suites import read_suite
from longrnn.comparison.suites.base import settings
from longrnn.comparison.suites.passkey import PasskeyRetrieval
from longrnn.errors import UserError
from longrnn.inference.engine import out_of_reach
from longrnn.mitigations import Mitigated, mitigation
from tests.comparison.suites.small_models import SHORT, small_model

BUNDLED = names("eval/suites")


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", BUNDLED)
def test_the_bundled_suites(name: str) -> None:
    """Every bundled suite can be read."""
    suite = read_suite(name)
    assert suite.name == name
    assert suite.evaluations
    assert suite.identity.keys() == {"seed", "evaluations"}


def test_there_are_bundled_suites() -> None:
    """There are bundled suites."""
    assert {"quick", "long", "books"} <= set(BUNDLED)


def test_what_makes_another_suite(tmp_path: Path) -> None:
    """Added lengths keep the identity of a suite; another number of keys changes it."""
    text = "evaluations: [{kind: passkey, lengths: [1k, 200], n: 3, n_keys: 2, name: two}]\nseed: 7"
    suite = read_suite(write(tmp_path / "mine.yaml", text))
    assert suite.name == "mine"
    assert suite.text == text
    options = {"kind": "passkey", "n_keys": 2, "filler": None}
    assert suite.identity == {"seed": 7, "evaluations": {"two": options}}
    (evaluation,) = suite.evaluations
    assert isinstance(evaluation, PasskeyRetrieval)
    assert (evaluation.title, evaluation.seed, evaluation.n) == ("two", 7, 3)
    assert evaluation.lengths == [200, 1024]


def test_defaults_that_are_written_out_keep_a_suite(tmp_path: Path) -> None:
    """An option with its default value and one that is left out give the same suite."""
    for kind, default in (
        ("passkey, lengths: [1k]", "n_keys: 1"),
        ("perplexity, texts: [a], lengths: [1k]", "windows: 4"),
        ("task, task: {kind: recall}, lengths: [8]", "task: {kind: recall, vocab_size: 32}"),
    ):
        plain = read_suite(write(tmp_path / "a.yaml", f"evaluations: [{{kind: {kind}}}]"))
        if default.startswith("task"):
            text = f"evaluations: [{{kind: task, lengths: [8], {default}}}]"
        else:
            text = f"evaluations: [{{kind: {kind}, {default}}}]"
        assert read_suite(write(tmp_path / "b.yaml", text)).identity == plain.identity


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("evaluation: []", "evaluations"),
        ("seed: 1", "evaluations"),
        ("evaluations: [{kind: passkeys, lengths: [1k]}]", "passkey"),
        ("evaluations: [{kind: cost, length: [1k]}]", "lengths"),
        ("evaluations: [{kind: cost}]", "lengths"),
        ("evaluations: [{kind: cost, lengths: []}]", "lengths"),
        ("evaluations: [{kind: cost, lengths: [4kb]}]", "4kb"),
        ("evaluations: [{kind: cost, lengths: [1k], decode: 0}]", "decode"),
        ("evaluations: [{lengths: [1k]}]", "kind"),
        ("evaluations: [{kind: passkey, lengths: [1k], n: 0}]", "batch_size"),
        ("evaluations: [{kind: passkey, lengths: [1k], depths: [2]}]", ""),
        ("evaluations: [{kind: passkey, lengths: [1k], depths: []}]", ""),
        ("evaluations: [{kind: perplexity, texts: [], lengths: [64]}]", ""),
        ("evaluations: [{kind: cost, lengths: [1k], name: ..}]", ""),
        ("evaluations: [{kind: cost, lengths: [1k], name: a/b}]", ""),
        ("evaluations: [{kind: cost, lengths: [1k], name: /tmp}]", ""),
        ("evaluations: [{kind: cost, lengths: [1k], name: ''}]", ""),
        ("evaluations: [{kind: cost, lengths: [1k], name: NUL}]", ""),
        ("evaluations: [{kind: cost, lengths: [1k], name: suite.yaml}]", ""),
        (
            "evaluations: [{kind: cost, lengths: [64]}, {kind: cost, lengths: [65]}]",
            "cost",
        ),
        ("evaluations: {kind: cost}", "evaluations"),
        ("evaluations: [cost]", "evaluations"),
        ("- 1", ""),
    ],
)
def test_bad_suites(text: str, says: str, tmp_path: Path) -> None:
    """A malformed suite raises a UserError."""
    with pytest.raises(UserError) as refusal:
        read_suite(write(tmp_path / "bad.yaml", text))
    assert says in str(refusal.value)
    assert "bad.yaml" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["...yaml", "....yaml", " .yaml", "comparison.jsonl.yaml"])
def test_a_suite_whose_name_is_another_place_is_refused(name: str, tmp_path: Path) -> None:
    """Suite names that are not valid folder names are refused."""
    with pytest.raises(UserError):
        read_suite(write(tmp_path / name, "evaluations: [{kind: cost, lengths: [1k]}]"))


def test_unknown_suites(tmp_path: Path) -> None:
    """An unknown suite lists the nearest name; a missing file is refused."""
    with pytest.raises(UserError, match="'quik' is neither a file .*: did you mean 'quick'"):
        read_suite("quik")
    with pytest.raises(UserError, match=r"none\.yaml' is neither a file"):
        read_suite(str(tmp_path / "none.yaml"))


def test_out_of_reach() -> None:
    """Lengths up to the maximum length are measured, and longer ones have a reason."""
    short = small_model("short", position=SHORT).model
    assert out_of_reach(short, 300) is None
    assert "300" in str(out_of_reach(short, 301))
    endless = small_model("endless").model
    assert out_of_reach(endless, 2**40) is None
    mitigated = Mitigated(
        small_model("m", position=SHORT).model,  # type: ignore[arg-type]
        mitigation("forget_more"),
    )
    assert out_of_reach(mitigated, 300) is None
    assert "300" in str(out_of_reach(mitigated, 301))


@pytest.mark.parametrize("record", [{"kind": "task"}, {"kind": ["task"]}, {}], ids=str)
def test_settings_of_a_damaged_record_differ_from_those_of_a_suite(record: dict[str, Any]) -> None:
    """They are compared, and not an error of Python."""
    whole = {"kind": "task", "task": {"kind": "reverse"}, "lengths": ["8"]}
    assert settings(record) != settings(whole)

"""`longrnn.repair` on small models: what is said, chosen, proven and written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import longrnn
from longrnn import load
from longrnn.bundled import bundled
from longrnn.checkpoints.convert import OURS, convert, layout_of
from longrnn.diagnostics import choice, repair
from longrnn.diagnostics.job import METHODS, Job
from longrnn.errors import UserError
from longrnn.mitigations.spec import parse
from tests.contracts.builders import assert_near
from tests.hf.foreign import causal, with_bytes

CHOOSE, PROVE = (
    bundled("eval/data") / f"{name}_excerpt.txt" for name in ("tom_sawyer", "moby_dick")
)
FULL = dict(choice.ATTEMPTS)
OPTIONS: dict[str, Any] = {"texts": [CHOOSE, PROVE], "length": 1024, "train_length": 64}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer steps, windows and prompts."""
    for name, spec in (
        ("fit", "fit(steps=40, learning_rate=0.2)"),
        ("select", "fit(steps=40, learning_rate=0.2, select=true)"),
        ("scale_decay", "scale_decay(windows=1, steps=3)"),
    ):
        monkeypatch.setitem(choice.ATTEMPTS, name, choice.ATTEMPTS[name]._replace(spec=spec))
    monkeypatch.setattr(choice, "CHOICE_WINDOWS", 1)
    monkeypatch.setattr(repair, "PROOF_WINDOWS", 4)


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leaves some attempts, so that a test takes seconds."""
    for name in [name for name in choice.ATTEMPTS if name not in names]:
        monkeypatch.delitem(choice.ATTEMPTS, name)


@pytest.mark.parametrize(
    "layout", ["hf", *(pytest.param(one, marks=pytest.mark.slow) for one in (OURS, "native"))]
)
def test_a_repair_that_folds_leaves_in_the_layout_that_came_in(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss on other text than that of the choice is that of the training length."""
    only(monkeypatch, "fit", "per_head")
    source = "collapse-tiny"
    if layout != OURS:
        source = str(tmp_path / "source")
        convert("collapse-tiny", Path(source), to=layout)
    done = longrnn.repair(source, output=tmp_path / "out", folds_only=True, **OPTIONS)
    assert done.checkpoint is not None
    assert done.mitigation is not None
    assert layout_of(str(done.checkpoint)) == layout
    what, before, reached = done.sentences
    assert "24 of 24 heads collapse" in what
    assert "The first leaves its range at token 1" in what
    assert "inside the training length of 64" in before
    for words in (PROVE.name, "(n = 4 windows)", "repaired by", "without the repair"):
        assert words in reached
    tokens = torch.tensor([list(PROVE.read_bytes()[:3000])])
    model, plain = load(done.checkpoint), load(source)
    assert model.mitigation is None
    with torch.no_grad():
        expected = plain.under(str(done.mitigation))(tokens).logits
        assert_near(model(tokens).logits, expected, 1e-4)
    losses = [m.token_losses(tokens[:, :-1], tokens[:, 1:])[0] for m in (model, plain)]
    repaired, broken = (float(loss[0, 1000:].mean()) for loss in losses)
    assert repaired < 0.7 * broken
    page = done.report.read_text()
    for words in (what, reached, "left out", "per_head"):
        assert words in page


def test_the_choice_reads_other_text_than_the_proof_and_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second command tries what the file of attempts lacks; a folder of another is refused."""
    only(monkeypatch, "forget_more", "token_filter")
    one = tmp_path / "one.txt"
    one.write_text(PROVE.read_text()[:40_000])
    how: dict[str, Any] = OPTIONS | {"texts": one, "output": tmp_path / "out"}
    done = longrnn.repair("collapse-tiny", **how)
    assert done.choice == "forget_more"
    assert done.checkpoint is not None
    assert str(load(done.checkpoint).mitigation).startswith("forget_more(decay_scale=0.984375")
    halves = [(tmp_path / f"out/one_{part}.txt").read_text() for part in ("choose", "prove")]
    assert "".join(halves) == one.read_text()
    record = json.loads((tmp_path / "out/tried.json").read_text())
    del record["rows"]["token_filter"]
    record["rows"]["unrepaired"]["seconds"] = 12345.6
    (tmp_path / "out/tried.json").write_text(json.dumps(record))
    # A model so slow tells that no attempt fits into the 250 s that are left.
    longrnn.repair("collapse-tiny", **how, budget=210)
    left_out = json.loads((tmp_path / "out/tried.json").read_text())["rows"].pop("token_filter")
    assert "left out" in left_out["why"]
    again = longrnn.repair("collapse-tiny", **how, budget=10_000)
    assert again == done
    rows = json.loads((tmp_path / "out/tried.json").read_text())["rows"]
    assert rows["unrepaired"]["seconds"] == 12345.6
    assert "loss" in rows["token_filter"]
    record["rows"] |= rows
    record["rows"]["forget_more"]["loss"] = 99.0  # so that the choice is another one
    (tmp_path / "out/tried.json").write_text(json.dumps(record))
    other = longrnn.repair("collapse-tiny", **how)
    assert other.choice != "forget_more"
    assert (tmp_path / "out/checkpoint").exists() == (other.checkpoint is not None)
    assert (tmp_path / "out/mitigation.yaml").exists() == (other.mitigation is not None)
    with pytest.raises(UserError, match="another repair"):
        how["length"] = 512
        longrnn.repair("collapse-tiny", **how)


def test_a_repair_that_changes_the_weights_of_steps_keeps_them_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is found where the folder is now."""
    only(monkeypatch, "select")
    done = longrnn.repair("collapse-tiny", output=tmp_path / "out", folds_only=True, **OPTIONS)
    assert done.choice == "select"
    (tmp_path / "out").rename(tmp_path / "moved")
    again = longrnn.repair("collapse-tiny", output=tmp_path / "moved", folds_only=True, **OPTIONS)
    assert again.sentences == done.sentences
    assert again.checkpoint is not None
    tokens = torch.tensor([list(PROVE.read_bytes()[:500])])
    with torch.no_grad():
        expected = load("collapse-tiny").under(str(again.mitigation))(tokens).logits
        assert_near(load(again.checkpoint)(tokens).logits, expected, 1e-5)


def test_where_nothing_helps_no_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that is not possible says why; one that does not fit the budget is named."""
    only(monkeypatch, "scale_decay", "fit")
    monkeypatch.setattr(choice, "CHOICE_WINDOWS", 4)
    how: dict[str, Any] = OPTIONS | {"train_length": 512}
    done = longrnn.repair("recall-tiny", output=tmp_path / "out", budget=1e-6, **how)
    assert (done.choice, done.checkpoint, done.mitigation) == (None, None, None)
    assert "no checkpoint" in done.sentences[-1]
    assert "the loss does not rise" in done.sentences[-1].lower()
    assert not (tmp_path / "out/checkpoint").exists()
    assert done.report.read_text().count("left out, because of the budget: give --budget") == 2


def test_keys_count_in_choice_and_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "forget_more", "token_filter")
    filler = tmp_path / "filler.txt"
    filler.write_text(longrnn.data.prompts.FILLER * 800)  # type: ignore[attr-defined]
    monkeypatch.setattr(choice, "DEPTHS", [0.1, 0.5])
    how: dict[str, Any] = {"texts": filler, "length": 8192, "keys": True}
    done = longrnn.repair("passkey-tiny-short", output=tmp_path / "out", **how)
    assert done.choice == "token_filter"
    assert "of the keys are recalled" in done.sentences[1]
    assert "recalls 1.00" in done.sentences[2]
    assert "(n = 8 prompts)" in done.sentences[2]


def test_a_budget_bounds_what_an_attempt_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow one is stopped; below twice the training length, sentences name what is measured."""
    only(monkeypatch, "state_norm", "forget_more")
    monkeypatch.setattr(choice, "OVERTIME", 0)
    monkeypatch.setattr(choice, "TIME_SHARE", 1e-9)
    how: dict[str, Any] = OPTIONS | {"length": 96, "output": tmp_path / "out"}
    assert longrnn.repair("collapse-tiny", **how).choice is None
    rows = json.loads((tmp_path / "out/tried.json").read_text())["rows"]
    left_out = {name for name, row in rows.items() if "left out" in row.get("why", "")}
    assert left_out == set(choice.ATTEMPTS)
    monkeypatch.undo()
    only(monkeypatch, "forget_more")
    again = longrnn.repair("collapse-tiny", **how, budget=60)
    assert "from 64 to 96" in again.sentences[1]
    rows = json.loads((tmp_path / "out/tried.json").read_text())["rows"]
    assert "loss" in rows["forget_more"]


def test_a_repair_with_keys_tries_the_settings_of_the_record() -> None:
    """By docs/results.md, a fit with 4 rows of keys and then a filter of 0.9997 of the tokens bring
    back the keys of recall-collapse at 64k; a fit with 3 rows does not."""
    job = Job(load("recall-collapse"), [], train_length=384, target_length=65536)
    found = {}
    for name in ("fit", "fit + strict token_filter", "select"):
        kind, options = parse(FULL[name].filled(job, repair.CALIBRATED_KEYS))
        found[name] = METHODS.build({"kind": kind, **options})
    assert found["fit"] == METHODS.build({"kind": "fit", "keys": 4})
    selecting = {"kind": "fit", "keys": 4, "steps": 600, "select": True}
    assert found["select"] == METHODS.build(selecting)
    strict = found["fit + strict token_filter"].quantile
    assert strict == pytest.approx(0.9997, abs=5e-5)


def test_a_hybrid_leaves_as_its_own_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    folder = with_bytes(causal("falcon_h1", vocab_size=256), tmp_path / "falcon")
    monkeypatch.setattr(repair, "helps", lambda outcomes, length: True)
    how: dict[str, Any] = {"texts": [CHOOSE, PROVE], "length": 200, "train_length": 64}
    for name, is_whole in (("scale_decay", True), ("state_norm", False)):
        with monkeypatch.context() as patch:
            only(patch, name)
            patch.setattr(choice.Choice, "best", lambda self, name=name, **_: name)
            done = longrnn.repair(f"{folder}+beyond", output=tmp_path / name, **how)
        assert (done.checkpoint is not None) == is_whole
        assert done.mitigation is not None
        if done.checkpoint is not None:
            text = torch.arange(97, 177)[None]
            with torch.no_grad():
                expected = load(folder).under(str(done.mitigation))(text).logits
                stock = AutoModelForCausalLM.from_pretrained(done.checkpoint)(text).logits
            assert_near(stock, expected, 1e-5)


def test_a_repair_without_a_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no text"):
        longrnn.repair("collapse-tiny", [], tmp_path / "out")

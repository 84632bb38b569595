"""The parts of the study of state collapse: settings, calibration, choice, streams and tables."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import longrnn
from longrnn.data.prompts import FILLER, is_held_out
from longrnn.errors import UserError
from longrnn.evaluation import passkey
from longrnn.evaluation.calibrate import Settings
from longrnn.evaluation.passkey_grid import Grid
from longrnn.evaluation.perplexity import STRETCH, edges
from longrnn.evaluation.texts import Document, tokenised
from longrnn.hf.loading import load_recurrent
from longrnn.hf.opened import OpenCheckpoint
from longrnn.mitigations import MITIGATIONS, Mitigated, mitigation
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.results import Row
from longrnn.studies.collapse import (
    SETTINGS,
    Calibrator,
    Variant,
    best,
    keyed_prompts,
    refuse_shared,
    select,
    variants,
)
from longrnn.studies.collapse_tables import axes_table, books_table, stream_table
from longrnn.studies.long_stream import Stream, late_against_fresh, read_stream
from longrnn.studies.loss_inside import INSIDE_TOKENS, Losses, beginnings, evaluate
from longrnn.text import ByteTokenizer

SCRIPTS = Path(longrnn.__file__).parents[1] / "scripts"
TRAINED, TARGET = 8, 24


def model(kind: str = "mamba2", **options: Any) -> RecurrentLM:
    torch.manual_seed(0)
    spec = {"kind": kind, **options}
    if kind == "mamba2":
        spec = {"d_state": 4, "head_dim": 4, **spec}
    return RecurrentLM(RecurrentConfig(vocab_size=256, d_model=8, n_layers=1, mixer=spec))


def document(n: int, seed: int = 0, name: str = "text") -> Document:
    tokens = torch.randint(256, (n,), generator=torch.Generator().manual_seed(seed))
    return Document(name, f"{name}{seed}", tokens, torch.arange(1, n + 1))


def rows_of(losses: list[float], length: int = 2 * STRETCH) -> list[Row]:
    """Rows of `perplexity.evaluate` with one loss at all positions of a window."""
    return [
        {
            "nats_per_token": loss,
            "length": length,
            "bytes": length,
            "buckets": [loss] * (len(edges(length)) - 1),
            "bucket_bytes": [b - a for a, b in zip(edges(length), edges(length)[1:], strict=False)],
            "stretches": [loss] * (length // STRETCH),
        }
        for loss in losses
    ]


def test_every_registered_mitigation_has_settings() -> None:
    """A new mitigation needs an entry in SETTINGS, with three settings or more."""
    assert set(SETTINGS) == set(MITIGATIONS)
    for method, settings in SETTINGS.items():
        assert len(settings(64, 8192)) >= (1 if method == "none" else 3)


@pytest.mark.parametrize("kind", ["mamba2", "lstm", "rnn"])
def test_variants_are_those_defined_for_the_model(kind: str) -> None:
    """A mitigation that is undefined for the model's cells has no variant."""
    built = model(kind)
    methods = {one.method for one in variants(built, TRAINED, TARGET).values()}
    cell = type(built.cells[0])
    assert methods == {name for name, m in MITIGATIONS.items() if m.undefined(cell) is None}


def test_settings_are_multiples_of_the_training_length() -> None:
    """The window and the memory of forget_more follow the training length."""
    found = variants(model(), 100, 1000)
    windows = [one.setting for one in found.values() if one.method == "sliding_window"]
    assert windows == [{"window": 100}, {"window": 400}, {"window": 1600}]
    assert found["forget_more-1x"].setting == {"decay_scale": 0.99, "input_scale": 1.0}


def test_an_unknown_variant_is_refused() -> None:
    """The nearest variant is named."""
    found = variants(model(), TRAINED, TARGET)
    assert list(select(found, ["sliding_window-1x"])) == ["sliding_window-1x"]
    assert select(found, []) == found
    with pytest.raises(UserError, match="sliding_window-1x"):
        select(found, ["sliding_window-1"])


def test_every_variant_builds_a_model_and_keeps_its_file(tmp_path: Path) -> None:
    """A second calibrator reads the same files; one with other texts is refused."""
    plain, texts = model(A_init=[0.001, 0.02], dt_min=0.01, dt_max=0.1), [document(600)]
    how = {"trained": TRAINED, "target": TARGET, "quiet": True}
    calibrator = Calibrator(plain, texts, tmp_path, **how)
    found = variants(plain, TRAINED, TARGET)
    for one in found.values():
        spec = calibrator.spec(one)
        assert Mitigated(plain, mitigation(spec)).vocab_size == 256
        assert isinstance(spec, Path) == isinstance(one.setting, Settings)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.yaml")}
    again = Calibrator(plain, texts, tmp_path, **how)
    for one in found.values():
        again.spec(one)
    assert {path: path.stat().st_mtime_ns for path in files} == files
    with pytest.raises(UserError):
        Calibrator(plain, [document(600, seed=1)], tmp_path, **how)


def test_the_best_setting_of_each_mitigation_has_the_lowest_loss() -> None:
    """Each mitigation is chosen for itself; one without rows is left out."""
    names = ("a-1", "a-2", "b-1", "c-1")
    found = {name: Variant(name, name[0], {}) for name in names}
    rows = {"a-1": rows_of([3.0, 2.0]), "a-2": rows_of([2.0, 2.5]), "b-1": rows_of([9.0, 9.0])}
    assert best(rows, found) == {"a": "a-2", "b": "b-1"}


def test_keyed_prompts_hold_keys_of_training_only() -> None:
    """Every prompt has the exact length and a key that no evaluation asks for."""
    prompts = keyed_prompts(ByteTokenizer(), 256, 5)
    assert len(prompts.tokens) == 5 * 256
    texts = [bytes(row.tolist()).decode() for row in prompts.tokens.view(5, 256)]
    keys = [text.split("The passkey is ")[1][:5] for text in texts]
    assert len(set(keys)) == 5
    assert not any(is_held_out(key) for key in keys)
    assert all(text.endswith("The passkey is") for text in texts)


@pytest.mark.slow
def test_thresholds_from_prompts_with_keys_keep_keys(tmp_path: Path) -> None:
    """`state_norm` erases a key if its thresholds come from text without keys."""
    plain, tokenizer = load_recurrent("passkey-tiny"), ByteTokenizer()
    text = FILLER * 200
    without = tokenised("filler", "filler", text, tokenizer)
    one = variants(plain, 256, 1024)["state_norm-1x"]
    shares = {}
    for name, given in (("keyed", keyed_prompts(tokenizer, 256, 16)), ("filler", without)):
        how = {"trained": 256, "target": 1024, "quiet": True}
        spec = Calibrator(plain, [given], tmp_path / name, **how).spec(one)
        model = OpenCheckpoint(name, Mitigated(plain, mitigation(spec)), tokenizer)
        rows = passkey.evaluate(
            [model], Grid([1024], 2, (0.0, 0.5)), output=tmp_path / f"{name}.jsonl", quiet=True
        )
        shares[name] = passkey.summarise(rows)[1024, None].mean
    assert shares == {"keyed": 1.0, "filler": 0.0}


def test_the_loss_inside_is_that_of_windows_of_the_training_length(tmp_path: Path) -> None:
    """Long windows and short ones read the same text, cut at INSIDE_TOKENS."""
    texts = [document(4 * 128 + 1), document(3 * 128, seed=1, name="other")]
    found = evaluate(
        model(), texts, train_length=32, length=128, output=tmp_path / "a.jsonl", quiet=True
    )
    assert [row["length"] for row in found.long] == [128] * 6
    assert [row["length"] for row in found.inside] == [32] * (16 + 11)
    # A window of 32 tokens that starts where a long one starts has its first 32 positions.
    first = sum(
        row["buckets"][k] * (b - a)
        for row in found.long[:1]
        for k, (a, b) in enumerate(zip(edges(32), edges(32)[1:], strict=False))
    )
    assert found.inside[0]["nats_per_token"] == pytest.approx(first / 32, abs=1e-6)
    assert len(beginnings([document(INSIDE_TOKENS * 2)], INSIDE_TOKENS)[0].tokens) == (
        INSIDE_TOKENS + 1
    )


def test_a_model_without_a_long_memory_reads_a_stream_as_it_reads_its_blocks(
    tmp_path: Path,
) -> None:
    """With a short window, late positions have exactly the loss of early ones on the same text."""
    bounded = Mitigated(model(), mitigation("sliding_window(window=4)"))
    text = document(8 * 128 + 1)
    how = {"length": 8 * 128, "block": 128, "quiet": True}
    stream = read_stream(bounded, text, output=tmp_path / "bounded.jsonl", **how)
    assert [row["start"] for row in stream.fresh] == [512, 640, 768, 896]
    ratio, fresh = late_against_fresh(stream)
    assert (ratio.mean, ratio.n) == (pytest.approx(1, abs=1e-5), 4)
    assert fresh.mean == pytest.approx(
        sum(row["buckets"][-1] for row in stream.fresh) / 4, abs=1e-9
    )
    table = stream_table({"bounded": stream})
    assert table[0].startswith("| mitigation | 64 to 128 | 128 to 256 | 256 to 512 | 512 to 1k |")
    assert table[2].endswith("| 1.000 [1.000, 1.000] |")


def test_a_loss_that_doubles_late_in_a_stream_has_a_ratio_of_two() -> None:
    """The ratio compares the second halves of the blocks of the last octave."""
    fresh = [{"start": start, "buckets": [9.0, 1.5]} for start in (256, 384)]
    stretches = [1.0, 1.0, 1.0, 1.0, 7.0, 3.0, 7.0, 3.0]
    ratio, early = late_against_fresh(Stream({"stretches": stretches}, fresh, 128))
    assert (ratio.mean, early.mean) == (2.0, 1.5)


@pytest.mark.parametrize(("length", "block"), [(384, 128), (128, 128), (512, 96), (500, 128)])
def test_a_stream_of_no_whole_octaves_is_refused(tmp_path: Path, length: int, block: int) -> None:
    """The length is 2, 4, 8, … blocks of whole stretches."""
    with pytest.raises(UserError):
        read_stream(model(), document(600), length=length, block=block, output=tmp_path / "a.jsonl")


def test_tables_show_what_was_not_measured_as_a_dash() -> None:
    """A variant that was evaluated for the choice only has no other figures."""
    on_choice = {name: rows_of([loss]) for name, loss in (("none", 3.0), ("a", 1.0), ("b", 2.0))}
    found = {name: Losses(rows_of([v, v]), rows_of([v, v])) for name, v in (("none", 4), ("a", 1))}
    lines = books_table(found, on_choice, STRETCH, [2 * STRETCH], {"a"})
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[:3] for row in cells] == [
        ["none", "3.000", "4.000"],
        ["**a**", "1.000", "-3.000 [-3.000, -3.000]"],
        ["b", "2.000", "–"],
    ]
    assert cells[1][3:] == ["1.000 [1.000, 1.000]", "1.443 [1.443, 1.443]", "1.00", "yes"]
    assert set(cells[2][2:]) == {"–"}
    keys = [{"length": 99, "depth": 0.5, "correct": right} for right in (True, True, False, False)]
    table = axes_table({"none": rows_of([2.0, 2.0])}, {"m": {"none": keys, "b": keys}})
    assert table[2] == "| none | 2.000 [2.000, 2.000] | 0.50 [0.15, 0.85] (4) at 99 |"
    assert table[3] == "| b | – | 0.50 [0.15, 0.85] (4) at 99 |"


def test_one_text_for_two_purposes_is_refused() -> None:
    """Calibration, choice and evaluation never share a text."""
    refuse_shared([document(5)], [document(5, seed=1)])
    with pytest.raises(UserError):
        refuse_shared([document(5)], [document(5, seed=1)], [document(5)])


def test_rows_that_do_not_fill_a_step_are_refused() -> None:
    """Every run of the study of initial states has the same number of tokens."""
    script = runpy.run_path(str(SCRIPTS / "study_initial_states.py"))
    budget = script["Budget"](10, 2048)
    policies = {name: script["initial_state"](name) for name in ("zero", "carry-0.1")}
    found = script["variants"](policies, [256, 1024], 64, budget)
    assert list(found) == ["zero", "carry-0.1", "zero-256", "zero-1k"]
    assert found["carry-0.1"] == ({"kind": "carry", "zero_share": 0.1}, 64)
    assert found["zero-1k"] == ({"kind": "zero"}, 1024)
    with pytest.raises(UserError, match="x"):
        script["initial_state"]("carry-x")
    with pytest.raises(UserError, match="96"):
        script["variants"](policies, [96], 64, budget)

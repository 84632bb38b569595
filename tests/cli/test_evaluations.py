"""`longrnn eval …`, `diagnose memory` and `compare` on tiny checkpoints."""

import json
import shutil
from pathlib import Path

import pytest

from longrnn.cli.options import results_folder
from longrnn.data.prompts import FILLER
from tests.cli.conftest import CLI, refused
from tests.evaluation.small_models import rows
from tests.hf.foreign import causal, with_bytes


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A folder with a text of 2,000 characters and two suites; commands run there."""
    (tmp_path / "book.txt").write_text("".join(f"{i * 7919 % 1000} and " for i in range(300)))
    one = "evaluations: [{kind: passkey, lengths: [180, 240], depths: [0, 1], n: 2}]"
    (tmp_path / "mine.yaml").write_text(one)
    (tmp_path / "also.yaml").write_text(
        f"{one[:-1]}, {{kind: perplexity, texts: [book.txt], lengths: [64, 256], windows: 2}}]"
    )
    return tmp_path


def test_eval_and_compare_share_their_rows(cli: CLI, models: Path, shelf: Path) -> None:
    out = ["--output", "out"]
    result = cli("compare", models / "text", "--suite", "mine.yaml", *out)
    assert (result.code, "mine" in result.out) == (0, False), "one suite needs no name"
    written = (shelf / "out/rows.jsonl").read_bytes()
    asked = ["--lengths", "180,240", "--depths", "0,1.0", "--n", "2"]
    assert cli("eval", "passkey", models / "text", *asked, *out).code == 0
    assert (shelf / "out/rows.jsonl").read_bytes() == written
    assert cli("eval", "passkey", models / "text", *asked, "--seed", "1", *out).code == 0
    assert cli("eval", "task", models / "backwards", "--n", "2", *out).code == 0
    assert (shelf / "out/rows.jsonl").read_bytes().startswith(written)
    assert len(rows(shelf / "out")) == 8 + 8 + 2


def test_several_suites_and_names(cli: CLI, models: Path, shelf: Path) -> None:
    for name in ("a", "[b]"):
        shutil.copytree(models / "text", shelf / name / "model")
    result = cli("compare", "a/model", "[b]/model", "--suite", "also.yaml", "--suite", "mine.yaml")
    assert result.code == 0, result.err
    for piece in ("a/model", "[b]/model", "also passkey", "mine passkey"):
        assert piece in result.out
    shutil.copy("mine.yaml", "a")
    suites = ["--suite", "mine.yaml", "--suite", "a/mine.yaml"]
    refused(cli, "compare", "a/model", *suites, says=("'mine passkey' is given twice",))


def test_a_transformer_is_compared_with_a_window_beyond_its_length(cli: CLI, shelf: Path) -> None:
    """With its own sinks and keys; one whose attention cannot have a window is reported."""
    for kind in ("llama", "gpt2"):
        with_bytes(causal(kind, vocab_size=256), shelf / kind)
    suite = "evaluations: [{kind: cost, lengths: [64, 256], decode: 2}]"
    (shelf / "long.yaml").write_text(suite)
    result = cli("compare", "llama", "gpt2", "--suite", "long.yaml", "--output", "out")
    assert result.code == 0, result.err
    assert "gpt2 is not measured with a window" in result.out
    content = json.loads((shelf / "out/cells.json").read_text())
    named = {name: about["max_length"] for name, about in content["models"].items()}
    windowed = "llama+attention_window(window=124, sinks=4)"
    assert named == {"llama": 128, windowed: None, "gpt2": 128}
    reached = {(c["model"], c["at"]): c["estimate"] for c in content["cells"]}
    assert reached[windowed, 256] is not None
    assert reached["llama", 256] is None


def test_default_folders_name_models_and_mitigations() -> None:
    """In characters that need no quotes, and not longer than a line."""
    specs = ["runs/A", "b+state_norm(threshold=3)"]
    found = results_folder("compare", [f"{spec}+forget_more" for spec in specs])
    assert found == Path("results/compare/a-forget_more--b-state_norm-threshold-3-forget_more")
    long = [results_folder("compare", specs * n).name for n in (9, 10)]
    assert max(map(len, long)) < 120
    assert long[0] != long[1], "of other models"
    steps = [results_folder("states", [f"runs/{run}/checkpoint-00000500"]).name for run in "ab"]
    assert steps == ["a-checkpoint-00000500", "b-checkpoint-00000500"]


def test_another_text_or_option_has_a_folder_of_its_own(
    cli: CLI, models: Path, shelf: Path
) -> None:
    """The report of an evaluation is not replaced by that of another; lengths share a folder."""
    (shelf / "other.txt").write_text("".join(f"{i * 7907 % 1000} or " for i in range(300)))
    folders = []
    for options in (
        "perplexity --text book.txt --lengths 64",
        "perplexity --text book.txt --lengths 64,128",
        "perplexity --text other.txt --lengths 64",
        "passkey --lengths 180 --n 1 --depths 0",
        "passkey --lengths 180 --n 1 --depths 0 --chunk-select 100",
    ):
        kind, *words = options.split()
        result = cli("eval", kind, models / "text", *words)
        assert result.code == 0, result.err
        folders.append(Path(result.out.splitlines()[-1]).parent)
    assert folders[0] == folders[1]
    assert len(set(folders)) == 4


def test_a_filler_that_was_calibrated_on(
    cli: CLI, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`eval passkey` warns if the mitigation was calibrated on the filler."""
    (tmp_path / "filler.txt").write_text(FILLER * 12)
    (tmp_path / "prose.txt").write_text("Call me Ishmael. Some years ago I went to sea. " * 14)
    calibrate = "calibrate passkey-tiny-short --text filler.txt --method state_norm --output n.yaml"
    assert cli(*calibrate.split()).code == 0
    command = "eval passkey passkey-tiny-short --lengths 160 --depths 1 --n 2 --filler"
    for options, is_warned in (
        ("filler.txt --mitigation n.yaml", True),
        ("prose.txt --mitigation n.yaml", False),
        ("filler.txt", False),
    ):
        caplog.clear()
        assert cli(*f"{command} {options}".split()).code == 0
        assert ("filler.txt" in caplog.text) == bool(caplog.text) == is_warned

"""`longrnn eval perplexity` on a tiny checkpoint."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from longrnn import load
from longrnn.files import sha256
from longrnn.hf.load import load_recurrent
from longrnn.mitigations import mitigation
from longrnn.mitigations.base import Calibration, Mitigation
from longrnn.mitigations.spec import write_calibration
from longrnn.results import read_results
from tests.cli.conftest import CLI, refused

LONG = ["--length", "200", "--quiet"]


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """Options that name two texts, which give 5 windows of 200 tokens in all."""
    (tmp_path / "a.txt").write_text("It was a dark and stormy night. " * 20)
    (tmp_path / "b.txt").write_text("Call me Ishmael, some years ago. " * 13)
    return ["--text", "a.txt", "--text", "b.txt"]


def test_eval_perplexity(cli: CLI, models: Path, texts: list[str], tmp_path: Path) -> None:
    """`eval perplexity` prints loss and verdict, and writes rows and a picture."""
    command = ["eval", "perplexity", models / "text", *texts, *LONG, "--by-position"]
    result = cli(*command, "--train-length", "64")
    assert result.code == 0
    assert result.err == ""
    folder = Path("results/perplexity/text")
    written = f"{folder}/results.jsonl\n{folder}/loss_by_position_200.png\n"
    assert result.out.endswith(written)
    for piece in ("[0, 1)", "[128, 200)", "(n = 5 windows, 95 % intervals)", "bits per byte"):
        assert piece in result.out
    assert "forgets robustly: yes" in result.out
    header, rows = read_results(tmp_path / folder / "results.jsonl")
    assert header == {
        "evaluation": "perplexity",
        "model": load(models / "text").fingerprint(),
        "tokenizer": "bytes",
    }
    assert [(row["text"], row["window"]) for row in rows] == [
        ("a.txt", 0), ("a.txt", 1), ("a.txt", 2), ("b.txt", 0), ("b.txt", 1)
    ]  # fmt: skip
    assert (tmp_path / folder / "loss_by_position_200.png").stat().st_size > 10_000
    # Twice the same command asks nothing again, and by default there is no table.
    short = cli(*command[:-1])
    assert short.out.splitlines()[-1] == f"{folder}/results.jsonl"
    assert len(short.out.splitlines()) == 2
    assert read_results(tmp_path / folder / "results.jsonl")[1] == rows


def test_one_window_has_no_interval(cli: CLI, models: Path, texts: list[str]) -> None:
    """A single document gives no interval."""
    command = ["eval", "perplexity", models / "text", *texts[:2], "--length", "600", "--quiet"]
    result = cli(*command, "--by-position")
    assert "inf" not in result.out
    assert "--train-length" in result.out


def test_the_training_length_of_a_run(
    cli: CLI, models: Path, texts: list[str], tmp_path: Path
) -> None:
    """The training length is read from train.yaml, and --train-length overrides it."""
    shutil.copytree(models / "text", tmp_path / "run")
    (tmp_path / "run/train.yaml").write_text("length: {max: 128}\n")
    command = ["eval", "perplexity", "run", *texts, *LONG, "--by-position"]
    assert "length of 128 " in cli(*command).out
    assert "length of 64 " in cli(*command, "--train-length", "64").out
    beyond = cli(*command, "--train-length", "4k").out
    assert "not judged" in beyond


def test_a_text_that_is_foreign_to_the_model(
    cli: CLI, models: Path, tmp_path: Path, texts: list[str]
) -> None:
    """A loss above that of a uniform guess is pointed out."""
    import torch

    from longrnn.models.checkpoint import save_model

    model = load_recurrent(models / "text")
    with torch.no_grad():
        model.embedding.weight.mul_(50)
    save_model(model, tmp_path / "loud")
    command = ["eval", "perplexity", "loud", *texts, *LONG, "--by-position", "--train-length", "64"]
    assert "5.545" in cli(*command).out


def test_a_mitigation(cli: CLI, models: Path, texts: list[str], tmp_path: Path) -> None:
    """A mitigation changes the loss, and has a results folder of its own."""
    command = ["eval", "perplexity", models / "text", *texts, *LONG]
    spec = "forget_more(decay_scale=0.5, input_scale=0.5)"
    result = cli(*command, "--mitigation", spec)
    assert result.code == 0, result.err
    assert result.out != cli(*command).out
    folders = sorted(path.name for path in (tmp_path / "results/perplexity").iterdir())
    assert folders == ["text", "text--forget_more-0.5-0.5"]
    header, _ = read_results(tmp_path / "results/perplexity" / folders[1] / "results.jsonl")
    assert header["model"] != load(models / "text").fingerprint()


def test_a_text_that_was_calibrated_on(
    cli: CLI, models: Path, texts: list[str], tmp_path: Path
) -> None:
    """`eval perplexity` warns if the mitigation was calibrated on the text."""
    fingerprint = load(models / "text").fingerprint()
    known = Calibration("c.yaml", fingerprint, 64, (sha256(tmp_path / "a.txt"),))
    write_calibration(tmp_path / "c.yaml", [{"kind": "forget_more"}], known)
    stored = mitigation(str(tmp_path / "c.yaml"))
    assert isinstance(stored, Mitigation)
    assert stored.calibration is not None
    result = cli("eval", "perplexity", models / "text", *texts, *LONG, "--mitigation", "c.yaml")
    assert result.code == 0
    (warning,) = result.err.splitlines()
    assert "a.txt" in warning


def test_several_models(cli: CLI, models: Path, texts: list[str], tmp_path: Path) -> None:
    """Several models are compared with intervals, and a second run evaluates nothing again."""
    spec = f"{models}/text+forget_more(decay_scale=0.5, input_scale=0.5)"
    command = ["eval", "perplexity", models / "text", spec, *texts, *LONG]
    result = cli(*command, "--by-position", "--train-length", "64")
    assert result.code == 0, result.err
    folder = tmp_path / "results/perplexity/text--plain--forget_more-0.5-0.5"
    assert sorted(path.name for path in folder.iterdir()) == [
        "loss_by_position_200.png",
        "paired.jsonl",
        "text--forget_more-0.5-0.5.jsonl",
        "text.jsonl",
    ]
    assert "5 windows, 1,000 bytes" in result.out
    assert result.out.count("forgets robustly: ") == 2
    header, rows = read_results(folder / "paired.jsonl")
    assert header["evaluation"] == "perplexity_paired"
    assert list(header["models"]) == [f"{models}/text", spec]
    whole, *buckets = rows
    assert (whole["unit"], whole["drawn"], whole["n"]) == ("bits per byte", "windows", 5)
    assert whole["difference"] == pytest.approx(whole["mean_second"] - whole["mean_first"])
    assert whole["low"] < whole["difference"] < whole["high"]
    assert [(row["start"], row["stop"]) for row in buckets][-1] == (128, 200)
    before = {path: path.read_bytes() for path in folder.glob("text*.jsonl")}
    again = cli(*command)
    assert again.code == 0
    assert {path: path.read_bytes() for path in before} == before


def test_several_models_have_one_table_by_position(
    cli: CLI, models: Path, texts: list[str]
) -> None:
    """One table has the loss of every model in each range of positions."""
    spec = f"{models}/text+forget_more(decay_scale=0.5, input_scale=0.5)"
    result = cli("eval", "perplexity", models / "text", spec, *texts, *LONG, "--by-position")
    assert result.code == 0, result.err
    assert result.out.count("positions") == 1
    (line,) = [line for line in result.out.splitlines() if "[128, 200)" in line]
    assert re.search(r"│ \d\.\d{3} +│ \d\.\d{3} \([+-]\d\.\d{4} \[", line)


def test_files_of_earlier_versions_are_continued(
    cli: CLI, models: Path, texts: list[str], tmp_path: Path
) -> None:
    """With --output, an evaluation goes on in the files that an earlier version named."""
    spec = f"{models}/text+forget_more(decay_scale=0.5, input_scale=0.5)"
    command = ["eval", "perplexity", models / "text", spec, *texts, *LONG, "--output", "old+(1)"]
    assert cli(*command).code == 0
    folder = tmp_path / "old+(1)"
    before = folder / "text+forget_more(decay_scale=0.5,_input_scale=0.5).jsonl"
    (folder / "text--forget_more-0.5-0.5.jsonl").rename(before)
    content = before.read_bytes()
    assert cli(*command).code == 0
    assert before.read_bytes() == content
    assert {path.name for path in folder.iterdir()} == {"text.jsonl", before.name, "paired.jsonl"}


def test_the_same_model_twice(cli: CLI, models: Path, texts: list[str], tmp_path: Path) -> None:
    """Two models of one name have separate files; equal models have difference 0."""
    shutil.copytree(models / "text", tmp_path / "other/text")
    command = ["eval", "perplexity", models / "text", "other/text", *texts[:2], *LONG]
    result = cli(*command, "--output", "out")
    assert result.code == 0, result.err
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"text-1.jsonl", "text-2.jsonl", "paired.jsonl"}
    assert "+0.0000" in result.out
    assert "no interval: 3 windows" in result.out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--text", "none.txt"], ("none.txt", "UTF-8")),
        (["--text", "empty.txt"], ("empty.txt",)),
        (["--text", "binary.txt"], ("binary.txt",)),
        (["--text", "latin.txt"], ("latin.txt",)),
        (["--text", "."], ()),
        (["--text", "a.txt"], ()),
        (["--length", "1k"], ("640", "1,025")),
        (["--length", "0"], ("length",)),
        (["--train-length", "long"], ("long",)),
        (["--batch-size", "0"], ("batch",)),
        (["--device", "abacus"], ()),
        (
            ["--mitigation", "slidingwindow"],
            ("slidingwindow", "sliding_window"),
        ),
        (["--mitigation", "forget_more(x=1)"], ("'x'",)),
    ],
)
def test_bad_input(
    options: list[str], says: tuple[str, ...], cli: CLI, models: Path, tmp_path: Path
) -> None:
    """Bad input is refused in one sentence, and nothing is written."""
    (tmp_path / "a.txt").write_text("It was a dark and stormy night. " * 20)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\x89PNG\x00\x01")
    (tmp_path / "latin.txt").write_bytes("Käse".encode("latin-1") * 100)
    command = ["eval", "perplexity", models / "text", "--text", "a.txt", *LONG]
    refused(cli, *command, *options, says=says)


def test_results_of_another_model(cli: CLI, models: Path, texts: list[str]) -> None:
    """Windows of another model are not added to an existing results file."""
    command = ["eval", "perplexity", models / "text", *texts, *LONG, "--output", "out"]
    assert cli(*command).code == 0
    spec = ["--mitigation", "forget_more"]
    refused(cli, *command, *spec, says=("model",))


OVERLAP = ["--context", "64", "--stride", "24"]


def test_overlapping_windows(cli: CLI, models: Path, texts: list[str], tmp_path: Path) -> None:
    """`--context` and `--stride` score in windows of a folder of their own, and print the cost."""
    command = ["eval", "perplexity", models / "text", *texts, *LONG]
    result = cli(*command, *OVERLAP, "--by-position", "--train-length", "64")
    assert result.code == 0
    # 64 tokens first, then 5 windows of 64, then one of the last 56 tokens.
    assert "2.20 per scored token" in result.out
    assert "forgets robustly: not judged" in result.out
    folder = tmp_path / "results/perplexity/text--overlap-64_24"
    header, rows = read_results(folder / "results.jsonl")
    assert (header["context"], header["stride"], len(rows)) == (64, 24, 5)
    other = cli(*command, "--context", "64", "--stride", "32", "--output", folder)
    assert (other.code, "stride" in other.err) == (2, True)
    carried = cli(*command, "--output", folder)
    assert (carried.code, "context" in carried.err) == (2, True)
    changed = "text+forget_more(decay_scale=0.9)"
    paired = cli(*command[:2], models / "text", models / changed, *texts, *LONG, *OVERLAP)
    assert paired.code == 0, paired.err
    assert "2.20 per scored token" in paired.out
    (written,) = tmp_path.glob("results/perplexity/*/paired.jsonl")
    assert '"context": 64, "stride": 24' in written.read_text()
    for file in written.parent.glob("text*.jsonl"):
        assert read_results(file)[0]["stride"] == 24


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--stride", "8"], "--context"),
        (["--context", "8", "--stride", "9"], "context"),
    ],
)
def test_overlapping_windows_that_do_not_fit(
    cli: CLI, models: Path, texts: list[str], options: list[str], reason: str
) -> None:
    """One of the two options alone, or a stride above the context, is refused."""
    refused(cli, "eval", "perplexity", models / "text", *texts, *LONG, *options, says=(reason,))


def test_newlines(cli: CLI, models: Path, texts: list[str], tmp_path: Path) -> None:
    """`--newlines` measures one window of newlines, with or without a text beside it."""
    command = ["eval", "perplexity", models / "text", *LONG, "--newlines"]
    assert cli(*command, "--by-position").code == 0
    path = tmp_path / "results/perplexity/text/results.jsonl"
    (alone,) = read_results(path)[1]
    model = load(models / "text")
    tokens = torch.full((1, 200), ord("\n"))
    with torch.no_grad():
        nats = -model(tokens).logits[0].double().log_softmax(-1)[:, ord("\n")]
    assert alone["text"] == "newlines"
    assert alone["bytes"] == 200
    assert alone["nats_per_token"] == pytest.approx(float(nats.mean()), rel=1e-5)
    assert alone["buckets"][-1] == pytest.approx(float(nats[128:].mean()), rel=1e-5)
    assert cli(*command, *texts).code == 0
    assert [row["text"] for row in read_results(path)[1]].count("newlines") == 1
    assert len(read_results(path)[1]) == 6
    refused(cli, *command[:3], *LONG, says=("--newlines",))

"""The studies run from beginning to end, at sizes that are too small for results."""

from __future__ import annotations

import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import longrnn
from longrnn.mitigations import mitigation
from longrnn.programs import run_script
from longrnn.results import read_results
from tests.training.runs import ENVIRONMENT, metrics

SCRIPTS = Path(longrnn.__file__).parents[1] / "scripts"
SCRIPT = SCRIPTS / "study_state_collapse.py"
PASSKEY = ["passkey", "passkey-tiny-short", "--train-length", "160", "--target", "200", "--n", "1"]
VARIANTS = [
    "none", "state_norm-0.7x", "state_norm-1x", "state_norm-1.5x", "forget_more-1x",
    "forget_more-4x", "forget_more-published-1.0", "forget_more-published-0.75",
    "sliding_window-1x", "sliding_window-4x", "sliding_window-16x", "token_filter",
    "token_filter-half", "token_filter-nine-tenths", "scale_delta-search", "scale_delta-selective",
    "scale_delta-quarter", "scale_decay-search", "scale_decay-4", "scale_decay-16",
    "power_decay-search", "power_decay-half", "power_decay-quarter",
]  # fmt: skip
CALIBRATED = {
    name for name in VARIANTS if (name.endswith(("x", "search", "selective"))
    and name.startswith(("state_norm", "scale", "power"))) or name.startswith("token_filter")
}  # fmt: skip


def study(
    folder: Path, *arguments: str, script: str = SCRIPT.stem
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT.with_stem(script)), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**ENVIRONMENT, "PYTHONPATH": str(SCRIPT.parents[1])},
        check=False,
    )


@pytest.mark.slow
def test_the_passkey_part_of_the_study(tmp_path: Path) -> None:
    """Every mitigation is calibrated and evaluated, and a second run repeats nothing."""
    done = study(tmp_path, *PASSKEY, "--lengths", "160,180")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "| mitigation | 160 | 180 |"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[0] for row in cells] == [*VARIANTS, "state_norm-keyed", "chunk_select-4x"]
    assert cells[0][1:] == ["1.00 [0.57, 1.00] (5)"] * 2
    folder = tmp_path / "results/state_collapse/passkey-passkey-tiny-short"
    assert (folder / "table.md").read_text() == done.stdout
    for name, *shares in cells:
        _, rows = read_results(folder / f"{name}.jsonl")
        assert {row["model"] for row in rows} == {name}
        assert len(rows) == 5 * sum(share != "–" for share in shares)
    files = {path.stem: mitigation(path) for path in (folder / "calibrated").glob("*.yaml")}
    assert files.keys() == CALIBRATED
    assert [path.name for path in (folder / "calibrated-keyed").glob("*.yaml")] == [
        "state_norm-keyed.yaml"
    ]
    # What is there is neither calibrated nor asked again.
    before = {path: path.stat().st_mtime_ns for path in folder.glob("calibrated/*.yaml")}
    again = study(tmp_path, *PASSKEY, "--lengths", "160,180")
    assert again.stdout == done.stdout
    assert {path: path.stat().st_mtime_ns for path in before} == before
    other = study(tmp_path, *PASSKEY, "--lengths", "160", "--target", "256")
    assert (other.returncode, other.stdout) == (2, "")
    assert "--output" in other.stderr
    assert "Traceback" not in other.stderr


@pytest.mark.slow
def test_the_books_part_of_the_study(tmp_path: Path) -> None:
    """Every setting has a row, the best of each mitigation is marked, and streams follow."""
    for name, sentence in (
        ("a", "It was a dark and stormy night; the rain fell. "),
        ("b", "Call me Ishmael. Some years ago, never mind. "),
        ("c", "The quick brown fox jumps over it all day. "),
    ):
        (tmp_path / f"{name}.txt").write_text(sentence * 60)
    shared = ["passkey-tiny-short", "--calibration", "a.txt", "--train-length", "64"]
    shared += ["--target", "128", "--quiet"]
    books = ["books", *shared, "--choice", "b.txt", "--text", "c.txt"]
    done = study(tmp_path, *books, "--length", "1k", "--every-setting", "state_norm")
    assert done.returncode == 0, done.stderr
    head, _, *lines = done.stdout.splitlines()
    assert head.startswith("| mitigation | text for choosing | windows of 64, against none |")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0].strip("*") for row in cells] == VARIANTS
    chosen = [row[0].strip("*") for row in cells if row[0].startswith("*")]
    assert len(chosen) == 8
    assert {name.split("-")[0] for name in chosen} == {name.split("-")[0] for name in VARIANTS}
    for name, *figures in cells:
        measured = name.startswith(("*", "state_norm"))
        assert (figures[-1] in ("yes", "no")) == measured
    again = study(tmp_path, *books, "--length", "1k", "--every-setting", "state_norm")
    assert again.stdout == done.stdout
    short = study(tmp_path, *books, "--length", "64")
    assert (short.returncode, short.stdout) == (2, "")
    assert "--length" in short.stderr
    same = study(tmp_path, "books", *shared, "--choice", "a.txt", "--text", "c.txt")
    assert (same.returncode, same.stdout) == (2, "")
    assert "share" in same.stderr
    stream = ["stream", *shared, "--text", "b.txt", "--text", "c.txt", "--length", "4k"]
    done = study(tmp_path, *stream, "--block", "1k", "--variant", "sliding_window-1x")
    assert done.returncode == 0, done.stderr
    head, _, row = done.stdout.splitlines()
    assert head.startswith("| mitigation | 512 to 1k | 1k to 2k | 2k to 4k |")
    assert row.startswith("| sliding_window-1x |")
    keys = ["--lengths", "160", "--variant", "none", "--variant", "sliding_window-4x", "--quiet"]
    assert study(tmp_path, *PASSKEY, *keys).returncode == 0
    done = study(tmp_path, "axes", "--passkey", "passkey-tiny-short", "--length", "1k")
    assert done.returncode == 0, done.stderr
    head, _, *lines = done.stdout.splitlines()
    assert head == "| mitigation | loss, 512 to 1k | keys of passkey-tiny-short |"
    names = {line.split("|")[1].strip() for line in lines}
    assert names == {*chosen, "state_norm-0.7x", "state_norm-1x", "state_norm-1.5x"} | {
        "sliding_window-4x"
    }
    missing = study(tmp_path, "axes", "--passkey", "passkey-tiny")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "passkey" in missing.stderr


@pytest.mark.slow
def test_the_comparison_with_a_transformer(tmp_path: Path) -> None:
    """All models are trained and compared, and a second run trains nothing."""
    for name in ("train", "held_out"):
        text = "".join(f"{i * 7919 % 1000} is {name} {i}. " for i in range(900))
        (tmp_path / f"{name}.txt").write_text(text)
    command = ["--train", "train.txt", "--text", "held_out.txt", "--size", "120k", "--quiet"]
    command += ["--recall-steps", "4", "--passkey-steps", "2", "--books-steps", "2", "--pairs", "4"]
    command += ["--check-every", "2", "--rates", "1e-3", "--rates", "lstm=1e-3,1e-2", "--seeds"]
    command += ["2", "--reach", "4", "--n", "1", "--windows", "2", "--step-tokens", "512"]
    command += ["--output", "o"]
    done = study(tmp_path, *command, "--record", "r.md", script="compare_with_transformer")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (tmp_path / "r.md").read_text() == (tmp_path / "o/table.md").read_text()
    runs = [line.split("|")[1:4] for line in lines if line.startswith("| lstm |")]
    assert [[cell.strip(" *") for cell in row][:2] for row in runs] == 3 * [
        ["lstm", "0.001"], ["lstm", "0.01"]
    ]  # fmt: skip
    rows = [line.split("|")[1:3] for line in lines if line.startswith(("| 256", "| 1k"))]
    compared = [[cell.strip() for cell in row] for row in rows if "seed" not in row[1]]
    for length in ("256", "1k"):
        for name in ("transformer+beyond", "transformer", "mamba2", "lstm"):
            assert [length, name] in compared
    assert sum("288" in line for line in lines) >= 2
    again = study(tmp_path, *command, script="compare_with_transformer")
    assert again.stdout.splitlines()[4:] == lines[4:]
    wrong = study(tmp_path, "--rates", "gru=1e-3", script="compare_with_transformer")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "gru" in wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize("part", ["forget", "recall"])
def test_the_study_of_capacity(tmp_path: Path, part: str) -> None:
    """Every family has equal tokens, is fitted, and a second run trains nothing."""
    (tmp_path / "train.txt").write_text("It was a dark and stormy night; the rain fell. " * 60)
    (tmp_path / "book.txt").write_text("Call me Ishmael. Some years ago, never mind. " * 60)
    options = {
        "forget": ["--train-lengths", "64,96", "--steps", "2", "--length", "512"]
        + ["--windows", "2", "--files", "train.txt", "--text", "book.txt", "--all-lengths"],
        "recall": ["--train-lengths", "192,256", "--steps", "2", "--more-steps", "1"]
        + ["--lengths", "160", "--n", "1"],
    }
    command = [part, "--d-states", "4,8,12", "--quiet", "--output", "out", *options[part]]
    outputs = []
    for _ in range(2):
        done = study(tmp_path, *command, script="study_capacity")
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
        # The final model of a finished run is written again; what was trained is not.
        weights = sorted(tmp_path.rglob("checkpoint-*/model.safetensors"))
        times = [path.stat().st_mtime_ns for path in weights]
        outputs.append(str(times))
    assert outputs[:2] == outputs[2:]
    runs = list((tmp_path / "out/runs").iterdir())
    assert len(runs) == 2 * 3 * 2
    tokens = {metrics(run)[-1]["tokens"] for run in runs}
    # A row of passkeys has its answer beyond the training length.
    assert max(tokens) <= {"forget": 1, "recall": 1.03}[part] * min(tokens)
    assert "out/capacity/capacity.jsonl" in outputs[0]


@pytest.mark.slow
def test_the_study_of_reverse_ordering(tmp_path: Path) -> None:
    """Every part has a table and a verdict, and a second run trains nothing."""
    command = ["--seeds", "2", "--steps", "4", "--triplets", "2", "--vocab-size", "16", "--quiet"]
    command += ["--large", "24", "--output", "runs", "--document", "found.md", "--cell", "lstm"]
    command += [f"--encoding={kind}" for kind in ("none", "duplicate", "sinusoidal")]
    done = study(tmp_path, *command, script="study_reverse")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "found.md").read_text() == done.stdout
    parts = done.stdout.split("\n## ")
    assert [part.split("\n")[0] for part in parts[1:]] == [
        "All cells, V = 16",
        "LSTM, V = 24",
        "LSTM, V = 16, half of it rare",
        "Gradient stability of the LSTM (2 triplets per condition and checkpoint)",
        "Attribution of the gradient (1,024 sequences per checkpoint)",
    ]
    assert [part.count("\n| ") - 4 for part in parts[1:4]] == [3 + 2, 3 + 2, 3 + 2 * 4]
    assert all(part.count("**Verdict.**") == 1 for part in parts[1:4])
    assert parts[4].count("\n| ") - 2 == 3 * 4 * 4
    assert "Of 16 comparisons" in parts[4]
    _, rows = read_results(tmp_path / "runs/cells/results.jsonl")
    assert len(rows) == 3 * 2
    again = study(tmp_path, *command, script="study_reverse")
    assert again.stdout == done.stdout
    bad = study(tmp_path, "--seeds", "1", script="study_reverse")
    assert (bad.returncode, bad.stdout) == (2, "")


@pytest.mark.slow
def test_the_study_of_vocabularies(tmp_path: Path) -> None:
    """Every combination has a score and a slope, and a second run trains nothing."""
    command = ["--seeds", "2", "--steps", "2", "--rows", "4", "--width", "16", "--quiet"]
    command += ["--encoding", "none", "--encoding", "duplicate", "--encoding", "learned"]
    large = [*command, "--vocab-sizes", "8,16,64", "--output", "a", "--document", "a.md"]
    done = study(tmp_path, *large, script="study_vocabulary")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.md").read_text() == done.stdout
    _, rows = read_results(tmp_path / "a/results.jsonl")
    assert len(rows) == 3 * 3 * 2
    # Two steps teach nothing: the loss is that of chance, and grows as its logarithm.
    assert all(row["loss"] == pytest.approx(math.log(row["vocab_size"]), rel=0.2) for row in rows)
    lines = done.stdout.splitlines()
    grown = [line for line in lines if re.match(r"\| \w+ \| 0\.[67]\d\d \[", line)]
    assert [line.split("|")[1].strip() for line in grown] == ["none", "duplicate", "learned"]
    assert not list((tmp_path / "a/runs").iterdir())
    assert study(tmp_path, *large, script="study_vocabulary").stdout == done.stdout
    cells = ["--cell", "lstm", "--cell", "gru", "--vocab-sizes", "8", "--lengths", "4,5"]
    done = study(tmp_path, *command, *cells, "--output", "b", script="study_vocabulary")
    assert done.returncode == 0, done.stderr
    assert "\n## lstm, V 8\n" in done.stdout
    assert "\n## gru, V 8\n" in done.stdout


@pytest.mark.parametrize(
    "name", sorted(p.stem for p in SCRIPTS.glob("*.py") if "run_script(" in p.read_text())
)
def test_help_has_an_example(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help of every script shows its examples on lines of their own."""
    script = runpy.run_path(str(SCRIPTS / f"{name}.py"))
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    main = next(script[key] for key in ("main", "demo", "app") if key in script)
    with pytest.raises(SystemExit) as left:
        run_script(main, script["__doc__"])
    assert not left.value.code
    lines = capsys.readouterr().out.splitlines()
    assert any(re.match(rf"      python (-m )?scripts[/.]{name}\b", line) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("study_initial_states --policy zerro", "zero"),
        ("study_initial_states --seeds 0", ""),
        ("study_initial_states --train no.txt", "no.txt"),
        ("study_initial_states --length 256", "--length"),
        ("study_capacity forget --text no.txt", "no.txt"),
        ("study_capacity forget --steps 0", ""),
        ("study_capacity forget --train-lengths 100", "step"),
        ("study_capacity forget --length 512", "--length"),
        ("study_capacity recall --d-states 4,8,4", ""),
        ("study_capacity recall --d-states 4,x", "'x'"),
        ("study_vocabulary --lengths 4,8", ""),
        ("study_vocabulary --cell lstmm", "lstm"),
        ("study_vocabulary --encoding non", "none"),
        ("study_vocabulary --seeds 1", ""),
        ("compare_with_transformer --train no.txt", "no.txt"),
        ("demo --lengths x", "'x'"),
    ],
)
def test_bad_input_of_scripts(tmp_path: Path, command: str, says: str) -> None:
    """Bad input is refused in one sentence before anything is written."""
    script, *arguments = command.split()
    done = study(tmp_path, *arguments, script=script)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []

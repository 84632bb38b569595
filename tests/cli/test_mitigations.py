"""Calibration, and every command that takes a mitigation, on an embedded checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from longrnn import Mitigated, load, mitigation
from longrnn.data.prompts import FILLER, KEY_LINE, QUESTION
from longrnn.evaluation.calibrate import METHODS
from longrnn.files import sha256
from longrnn.results import read_rows
from tests.cli.conftest import CLI, refused

CHECKPOINT = "passkey-tiny-short"  # two layers of four heads, trained on 256 tokens
SMALL = ["--lengths", "160", "--depths", "1", "--n", "2", "--quiet"]
PASSKEY = ["eval", "passkey", CHECKPOINT, *SMALL]
PROSE = "Call me Ishmael. Some years ago, never mind how long precisely, I went to sea. " * 8


@pytest.fixture
def texts(tmp_path: Path) -> None:
    """`filler.txt` to calibrate on, `prose.txt` to evaluate on."""
    (tmp_path / "filler.txt").write_text(FILLER * 12)
    (tmp_path / "prose.txt").write_text(PROSE)


@pytest.fixture
def calibrated(cli: CLI, texts: None, tmp_path: Path) -> str:
    """`norm.yaml`: a state norm for CHECKPOINT, low enough to change its results."""
    options = ["--method", "state_norm", "--margin", "0.3", "--output", "norm.yaml", "--quiet"]
    result = cli("calibrate", CHECKPOINT, "--text", "filler.txt", *options)
    assert (result.code, result.err) == (0, "")
    return "norm.yaml"


def fingerprint(spec: str) -> str:
    return Mitigated(load(CHECKPOINT), mitigation(spec)).fingerprint()


OPTIONS: dict[str, list[str]] = {
    "state_norm": ["--margin", "2"],
    "token_filter": ["--target-length", "1k"],
    "scale_delta": ["--target-length", "512", "--steps", "1", "--windows", "1"],
    "scale_decay": ["--target-length", "300", "--steps", "1", "--windows", "1", "--seed", "3"],
    "power_decay": ["--target-length", "300", "--steps", "1", "--windows", "1"],
    "per_head": ["--target-length", "300", "--keys", "1", "--windows", "1"],
}


@pytest.mark.parametrize("method", list(METHODS))
def test_calibrate(method: str, cli: CLI, texts: None, tmp_path: Path) -> None:
    """`calibrate` writes a file that records its origin and that other commands accept."""
    command = ["calibrate", CHECKPOINT, "--text", "filler.txt", "--text", "prose.txt"]
    result = cli(*command, "--method", method, *OPTIONS[method], "--quiet")
    assert (result.code, result.err) == (0, "")
    path = f"results/calibrate/{CHECKPOINT}/{method}.yaml"
    said, where = result.out.splitlines()
    assert said == str(mitigation(path))
    assert where == path
    content = yaml.safe_load((tmp_path / path).read_text())
    assert content["format"] == "longrnn-mitigation-1"
    assert content["fingerprint"] == load(CHECKPOINT).fingerprint()
    assert content["length"] == 256
    assert content["text_sha256"] == [
        sha256(tmp_path / name) for name in ("filler.txt", "prose.txt")
    ]
    use = ["generate", CHECKPOINT, "--prompt", "a", "--max-new-tokens", "1", "--mitigation", path]
    assert cli(*use).code == 0


def test_eval_passkey(cli: CLI, calibrated: str, tmp_path: Path) -> None:
    """A mitigation changes the answers, and its rows carry its own fingerprint."""
    strong = "forget_more(decay_scale=0.5, input_scale=1.0)"
    variants = [CHECKPOINT, f"{CHECKPOINT}+{calibrated}", f"{CHECKPOINT}+{strong}"]
    both = f"{CHECKPOINT}+{calibrated}+{strong}"
    result = cli("eval", "passkey", *variants, both, *SMALL, "--output", "out")
    assert (result.code, result.err) == (0, "")
    found = json.loads((tmp_path / "out/cells.json").read_text())
    assert {name: about["fingerprint"] for name, about in found["models"].items()} == {
        CHECKPOINT: load(CHECKPOINT).fingerprint(),
        variants[1]: fingerprint(calibrated),
        variants[2]: fingerprint(strong),
        both: fingerprint(f"{calibrated}+{strong}"),
    }
    rows = read_rows(tmp_path / "out/rows.jsonl")[0]
    right: dict[str, list[bool]] = {}
    for row in rows:
        right.setdefault(row["model"], []).append(row["result"]["correct"])
    assert right.pop(load(CHECKPOINT).fingerprint()) == [True, True]
    assert right[fingerprint(strong)] == right[fingerprint(f"{calibrated}+{strong}")] == [False] * 2
    assert len(right) == 3
    for name in (*variants, both):
        assert name in result.out
    # What stands behind the checkpoint, and what --mitigation says, apply both, in this order.
    again = cli("eval", "passkey", variants[1], *SMALL, "--output", "two", "--mitigation", strong)
    assert again.code == 0
    models = {row["model"] for row in read_rows(tmp_path / "two/rows.jsonl")[0]}
    assert models == {fingerprint(f"{calibrated}+{strong}")}


def test_results_folders(cli: CLI, texts: None, tmp_path: Path) -> None:
    """Each mitigation has a results folder of its own, with a valid file name."""
    numbers = ", ".join(["1000.0"] * 4)
    long = f"state_norm(threshold=[[{numbers}], [{numbers}]])+forget_more(decay_scale=0.99)" + (
        "+scale_delta(scale=0.99)+scale_decay(scale=1.01)+power_decay(scale=1.01)" * 2
    )
    assert len(long) > 255
    for arguments in ([f"{CHECKPOINT}+{long}"], [CHECKPOINT, "--mitigation", long]):
        assert cli("eval", "passkey", *arguments, *SMALL).code == 0
    assert cli("eval", "passkey", f"{CHECKPOINT}+none", *SMALL).code == 0
    folders = sorted(path.name for path in (tmp_path / "results/passkey").iterdir())
    assert len(folders) == 2
    assert folders[0] == f"{CHECKPOINT}-none"
    assert len(folders[1]) < 90
    assert all(re.fullmatch(r"[a-z0-9._-]+", folder) for folder in folders)


def test_a_filler_that_was_calibrated_on(
    cli: CLI, calibrated: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`eval passkey` warns if the mitigation was calibrated on the filler."""
    result = cli(*PASSKEY, "--mitigation", calibrated, "--filler", "filler.txt")
    assert result.code == 0
    assert "filler.txt" in caplog.text
    caplog.clear()
    command = [*PASSKEY, "--output", "prose", "--filler", "prose.txt"]
    assert cli(*command, "--mitigation", calibrated).code == 0
    assert cli(*PASSKEY, "--filler", "filler.txt").code == 0
    assert caplog.text == ""


def test_generate(cli: CLI, calibrated: str) -> None:
    """A mitigation changes the generated text."""
    prompt = f"{KEY_LINE.format(key=40913)}{FILLER}{QUESTION}"
    command = ["generate", CHECKPOINT, "--max-new-tokens", "6", "--prompt", prompt]
    assert cli(*command, "--mitigation", "none") == (0, " 40913\n", "")
    spec = f"{calibrated}+forget_more(decay_scale=0.9)"
    result = cli(*command, "--mitigation", spec)
    assert (result.code, result.err) == (0, "")
    assert result.out != " 40913\n"


def test_diagnose_states(cli: CLI, calibrated: str, tmp_path: Path) -> None:
    """A mitigation changes the states, and accepts the diagnosis of the plain model."""
    command = ["diagnose", "states", CHECKPOINT, "--text", "prose.txt", "--length", "400"]
    command += ["--no-newlines", "--quiet"]
    ours = cli(*command, "--mitigation", calibrated, "--output", "ours")
    assert (ours.code, ours.err) == (0, "")
    limits: Any = mitigation(calibrated).threshold  # type: ignore[attr-defined]
    rows = [json.loads(line) for line in (tmp_path / "ours/states.jsonl").open()]
    shares = [row["norm"] / limits[row["layer"]][row["head"]] for row in rows]
    assert 0.9999 < max(shares) < 1.0001
    # The heads that a diagnosis names can be given to a mitigation; here, short of collapse, none.
    assert cli(*command, "--output", "plain").code == 0
    spec = "forget_more(heads=collapsing, diagnosis={}/diagnosis.yaml)"
    says = ("lists no collapsing head", "leave the mitigation out")
    refused(cli, *PASSKEY, "--mitigation", spec.format("plain"), says=says)
    diagnosis = tmp_path / "plain/diagnosis.yaml"
    diagnosis.write_text(diagnosis.read_text().replace("collapsing: []", "collapsing: [[0, 1]]"))
    assert cli(*PASSKEY, "--mitigation", spec.format("plain")).code == 0
    says = ("the diagnosis of another model",)
    refused(cli, *PASSKEY, "--mitigation", spec.format("ours"), says=says)


KNOWN = "format: longrnn-mitigation-1\nfingerprint: aa\nlength: 256\ntext_sha256: [aa]\n"
FILES = {
    "empty.yaml": "",
    "words.yaml": "just words\n",
    "list.yaml": "[1, 2]\n",
    "open.yaml": "a: [\n",
    "bare.yaml": "fingerprint: a\nlength: 256\ntext_sha256: []\nmitigation: [{kind: none}]\n",
    "none.yaml": KNOWN + "mitigation: []\n",
    "itself.yaml": KNOWN + "mitigation: [itself.yaml]\n",
    "half.yaml": "format: longrnn-mitigation-1\nmitigation: [{kind: none}]\n",
    "length.yaml": KNOWN.replace("256", "soon") + "mitigation: [{kind: none}]\n",
    "kind.yaml": KNOWN + "mitigation: [{kind: stat_norm, threshold: 1}]\n",
    "value.yaml": KNOWN + "mitigation: [{kind: state_norm, threshold: -1}]\n",
    "other.yaml": KNOWN + "mitigation: [{kind: forget_more}]\n",
    "diagnosis.yaml": "collapsing: [[0, 4]]\n",
    "nodiagnosis.yaml": "collapsing: 3\n",
    "triples.yaml": "collapsing: [[0, 1, 2]]\n",
    "healthy.yaml": "collapsing: []\n",
    "foreign.yaml": "collapsing: [[0, 1]]\nfingerprint: 0123456789abcdef\n",
}
COLLAPSING = "forget_more(heads=collapsing, diagnosis={})"
SPECS: list[tuple[str, tuple[str, ...]]] = [
    # Names.
    ("statenorm(threshold=1)", ("statenorm", "state_norm")),
    ("xyz", ("xyz", "forget_more")),
    ("sliding_window(windw=3)", ("windw", "window")),
    ("forget_more(threshold=3)", ("threshold", "decay_scale")),
    ("none(window=3)", ("window",)),
    ("state_norm", ("state_norm",)),
    ("sliding_window()", ("sliding_window",)),
    # Values.
    ("state_norm(threshold=0)", ("threshold",)),
    ("state_norm(threshold=[[1, -2, 1, 1], 3])", ("threshold",)),
    ("state_norm(threshold=nan)", ("threshold",)),
    ("state_norm(threshold=true)", ("threshold",)),
    ("state_norm(threshold=much)", ("threshold", "much")),
    ("token_filter(threshold=-0.1)", ("threshold",)),
    ("sliding_window(window=0)", ("window",)),
    ("sliding_window(window=-8)", ("window",)),
    ("sliding_window(window=8, chunk=9)", ("window",)),
    ("sliding_window(window=8, chunk=0)", ()),
    ("sliding_window(window=2.5)", ("window",)),
    ("sliding_window(window=8x)", ("window",)),
    ("forget_more(decay_scale=0)", ("decay_scale",)),
    ("forget_more(decay_scale=1.1)", ("decay_scale",)),
    ("forget_more(input_scale=-1)", ("input_scale",)),
    ("scale_delta(scale=0)", ("scale",)),
    ("scale_decay(scale=inf)", ("scale",)),
    ("power_decay(scale=-2)", ("scale",)),
    # Layers and heads.
    ("forget_more(layers=[2])", ("model",)),
    ("forget_more(layers=[-1])", ("layers",)),
    ("forget_more(layers=1)", ("layers",)),
    ("forget_more(heads=[4])", ("layer",)),
    ("forget_more(heads=[[1, 4]])", ("layer",)),
    ("forget_more(heads=[[2, 0]])", ("model",)),
    ("forget_more(heads=[[0, 0, 0]])", ("heads", "layer")),
    ("state_norm(threshold=[1, 2, 3])", ("threshold",)),
    ("state_norm(threshold=[[1, 2], 3])", ("threshold",)),
    ("forget_more(heads=collapsing)", ("diagnosis=FILE", "longrnn diagnose states")),
    (COLLAPSING.format("no.yaml"), ("no.yaml", "longrnn diagnose states")),
    (COLLAPSING.format("diagnosis.yaml"), ("layer",)),
    (COLLAPSING.format("nodiagnosis.yaml"), ("nodiagnosis.yaml",)),
    (COLLAPSING.format("triples.yaml"), ("triples.yaml",)),
    (COLLAPSING.format("healthy.yaml"), ("healthy.yaml",)),
    (COLLAPSING.format("foreign.yaml"), ("diagnosis",)),
    (COLLAPSING.format("open.yaml"), ("open.yaml",)),
    # What has no meaning.
    (
        "state_norm(threshold=1)+sliding_window(window=9)",
        (),
    ),
    ("chunk_select", ("chunk_select", "--chunk-select")),
    # What is no spec at all.
    ("", ("'' is not a valid mitigation", "write name(option=value)")),
    ("+", ("'' is not a valid mitigation",)),
    ("forget_more+", ("'' is not a valid mitigation",)),
    ("forget_more(decay_scale=0.9", ("is not a valid mitigation", "write name(option=value)")),
    ("forget_more)", ("is not a valid mitigation",)),
    ("forget_more()()", ("')(' is not a valid option", "option=value")),
    ("forget_more(0.9)", ("'0.9' is not a valid option", "option=value")),
    ("forget_more(decay_scale=[)", ("'[' is not a valid value of decay_scale",)),
    ("forget_more(decay_scale=0.9, decay_scale=0.8)", ("decay_scale twice",)),
    # Files.
    ("nowhere.yaml", ("nowhere.yaml", "longrnn calibrate")),
    ("forget_more+nowhere.yml", ("nowhere.yml",)),
    ("binary.yaml", ("binary.yaml",)),
    ("open.yaml", ("open.yaml",)),
    ("empty.yaml", ("empty.yaml", "longrnn calibrate")),
    ("words.yaml", ("words.yaml", "longrnn calibrate")),
    ("list.yaml", ("list.yaml", "longrnn calibrate")),
    ("bare.yaml", ("bare.yaml",)),
    ("none.yaml", ("none.yaml",)),
    ("itself.yaml", ("itself.yaml",)),
    ("half.yaml", ("half.yaml", "fingerprint")),
    ("length.yaml", ("length.yaml", "soon")),
    ("kind.yaml", ("state_norm",)),
    ("value.yaml", ("threshold",)),
    ("other.yaml", ("other.yaml",)),
]


@pytest.mark.parametrize(("spec", "says"), SPECS, ids=[spec or "nothing" for spec, _ in SPECS])
def test_bad_specs(spec: str, says: tuple[str, ...], cli: CLI, tmp_path: Path) -> None:
    """A bad mitigation is refused in one sentence, and nothing is written."""
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\x00\x01")
    refused(cli, *PASSKEY, "--mitigation", spec, says=says)
    refused(cli, "eval", "passkey", f"{CHECKPOINT}+{spec}", *SMALL, says=says)


@pytest.mark.parametrize("command", ["eval perplexity", "generate", "diagnose states"])
def test_every_command_refuses(command: str, cli: CLI, texts: None, models: Path) -> None:
    """Every command refuses a bad mitigation in the same way."""
    options: dict[str, list[Any]] = {
        "eval perplexity": ["--text", "prose.txt", "--lengths", "100", "--quiet"],
        "generate": ["--prompt", "a"],
        "diagnose states": ["--text", "prose.txt", "--length", "600", "--quiet"],
    }
    spec = ["--mitigation", "sliding_window(window=0)"]
    refused(cli, *command.split(), CHECKPOINT, *options[command], *spec)
    spec = ["--mitigation", ""]
    refused(
        cli,
        *command.split(),
        CHECKPOINT,
        *options[command],
        *spec,
        says=("mitigation",),
    )
    spec = ["--mitigation", "token_filter(threshold=0.1)"]
    trained = ["--train-length", "64"] if command == "diagnose states" else []
    arguments = [*command.split(), models / "text", *options[command], *trained, *spec]
    refused(cli, *arguments, says=("token_filter", "forget_more"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--method", "statenorm"], ("statenorm", "'state_norm'")),
        (["--method", "sliding_window"], ("power_decay",)),
        (["--method", "token_filter"], ("--target-length",)),
        (["--target-length", "soon"], ("soon",)),
        (["--target-length", "256"], ("256",)),
        (["--train-length", "0"], ("length",)),
        (["--train-length", "1"], ("length",)),
        (["--train-length", "2k"], ("1,080",)),
        (["--method", "scale_decay", "--target-length", "2k"], ("2,049",)),
        (["--windows", "0"], ("windows",)),
        (["--margin", "0"], ("margin",)),
        (["--quantile", "1.5"], ("quantile",)),
        (["--share", "0"], ("share",)),
        (["--output", "norm.json"], ("norm.json",)),
        (["--text", "nowhere.txt"], ("nowhere.txt",)),
        (["--text", "empty.txt"], ("empty.txt",)),
        (["--text", "binary.txt"], ("binary.txt",)),
        (["--text", "filler.txt"], ()),
        (["--device", "abacus"], ()),
    ],
)
def test_calibrate_refuses(
    options: list[str], says: tuple[str, ...], cli: CLI, texts: None, tmp_path: Path
) -> None:
    """Bad options and texts are refused, and no file is written."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\x89PNG\x00\x01")
    method = [] if "--method" in options else ["--method", "state_norm"]
    command = ["calibrate", CHECKPOINT, "--text", "filler.txt", *method, "--quiet"]
    refused(cli, *command, *options, says=says)


def test_calibrate_refuses_models(cli: CLI, texts: None, models: Path) -> None:
    """A model without a training length or without step sizes is refused."""
    command = ["calibrate", models / "text", "--text", "filler.txt", "--quiet"]
    refused(cli, *command, "--method", "state_norm", says=("--train-length",))
    lengths = ["--train-length", "64", "--target-length", "128"]
    says = ("scale_delta is not defined for lstm",)
    refused(cli, *command, "--method", "scale_delta", *lengths, says=says)


def test_misspelt_options(cli: CLI) -> None:
    """A misspelt option is refused with the nearest one."""
    result = cli("calibrate", CHECKPOINT, "--text", "a.txt", "--method", "x", "--margni", "1")
    assert result.code == 2
    assert "--margin" in result.err
    assert "Traceback" not in result.err

"""Bad input: exit code 2, one sentence with its remedy, nothing written."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from longrnn.hf import loading
from longrnn.results import read_results
from tests.cli.conftest import CLI, Outcome
from tests.training.runs import metrics, tiny, write_config

SHORT = ["--lengths", "160", "--depths", "1", "--n", "1", "--quiet"]


def assert_refused(result: Outcome, *pieces: str, code: int = 2) -> None:
    assert result.code == code
    assert result.out == ""
    lines = result.err.splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("error: ")
    for piece in pieces:
        assert piece in lines[0]


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def refused(cli: CLI, *arguments: str | Path, says: tuple[str, ...]) -> None:
    """Runs a command that must be refused and must leave its folder as it was."""
    before = contents(Path.cwd())
    assert_refused(cli(*arguments), *says)
    assert contents(Path.cwd()) == before


@pytest.mark.parametrize("command", [["info"], ["eval", "passkey"], ["eval", "reverse"]])
def test_unknown_checkpoints(
    command: list[str], cli: CLI, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback, or a message without the nearest name."""
    monkeypatch.setattr(loading, "embedded", lambda: {"passkey-tiny": models / "text"})
    refused(cli, *command, "passkey-tyni", says=("did you mean 'passkey-tiny'",))
    refused(cli, *command, "no/such/folder", says=("known: passkey-tiny",))
    refused(cli, *command, models / "text/config.json", says=("give the folder",))
    sizes = ["--vocab-size", "8", "--length", "4"] if "reverse" in command else []
    refused(cli, *command, models, *sizes, says=("no config.json",))


def test_a_truncated_checkpoint(cli: CLI, models: Path, tmp_path: Path) -> None:
    """Half a download."""
    shutil.copytree(models / "text", tmp_path / "half")
    with open(tmp_path / "half/model.safetensors", "rb+") as file:
        file.truncate(2000)
    for command in (["info", "half"], ["eval", "passkey", "half", *SHORT]):
        refused(cli, *command, says=("half/model.safetensors", "truncated", "copy it again"))
    (tmp_path / "half/model.safetensors").unlink()
    refused(cli, "generate", "half", "--prompt", "a", says=("no model.safetensors",))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--lengths", "4x"], ("'4x' is not a valid length", "256, 4k or 1M")),
        (["--lengths", ""], ("'' is not a valid length", "256, 4k or 1M")),
        (["--lengths", "-1"], ("'-1' is not a valid length",)),
        (["--lengths", "256,"], ("'' is not a valid length",)),
        (["--lengths", "9" * 400], ("is not a valid length",)),
        (["--lengths", "100"], ("length 100 is too short", "the least is 156 tokens")),
        (["--depths", "many"], ("'many' is not a valid list of depths", "0,0.5,1")),
        (["--depths", ""], ("'' is not a valid list of depths",)),
        (["--depths", "0.5,"], ("'0.5,' is not a valid list of depths",)),
        (["--depths", "0"], ("the number of depths must be at least 1",)),
        (["--depths", "-1"], ("the number of depths must be at least 1",)),
        (["--depths", "0.5,1.5"], ("depths lie between 0",)),
        (["--depths", "nan,"], ("not a valid list of depths",)),
        (["--n", "0"], ("n and the batch size must be at least 1",)),
        (["--batch-size", "0"], ("n and the batch size must be at least 1",)),
        (["--device", "abacus"], ("device 'abacus' cannot be used", "take cpu or auto")),
        (["--device", "cuda:99"], ("device 'cuda:99' cannot be used",)),
    ],
)
def test_eval_passkey_options(
    options: list[str], says: tuple[str, ...], cli: CLI, models: Path
) -> None:
    """An option that fails after an hour, or as something else."""
    refused(cli, "eval", "passkey", models / "text", *SHORT, *options, says=says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--insert-at", "x"], ("'x' is not a valid length",)),
        (["--insert-at", "-1"], ("'-1' is not a valid length",)),
        (["--insert-every", "0"], ("'0' is not a valid length",)),
        (["--insert-at", "0,1M"], ("behind 1M tokens of filler", "give a greater length")),
        (["--insert-at", "0", "--depths", "5"], ("give one of --depths",)),
        (["--insert-at", "0", "--insert-every", "8k"], ("give one of --depths",)),
        (["--insert-at", "0", "--n-keys", "2"], ("one key per prompt",)),
    ],
)
def test_eval_passkey_insertion_points(
    options: list[str], says: tuple[str, ...], cli: CLI, models: Path
) -> None:
    """A grid without cells, or two grids at once."""
    command = ["eval", "passkey", models / "text", "--lengths", "256", "--quiet"]
    refused(cli, *command, *options, says=says)


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("backwards", ["--n", "0"], ("n must be between 1 and the 16",)),
        ("backwards", ["--n", "17"], ("n must be between 1 and the 16",)),
        ("backwards", ["--n", "2", "--length", "0"], ("length must be at least 1",)),
        ("backwards", ["--n", "2", "--length", "1"], ("hold out at most half",)),
        ("backwards", ["--vocab-size", "0"], ("vocab_size >= 2",)),
        ("backwards", ["--vocab-size", "9"], ("needs a model with 10 ids",)),
        ("text", [], ("was not trained on reverse", "--vocab-size and --length")),
        ("text", ["--length", "4"], ("was not trained on reverse",)),
    ],
)
def test_eval_reverse_options(
    model: str, options: list[str], says: tuple[str, ...], cli: CLI, models: Path
) -> None:
    """Sizes that do not fit the model."""
    refused(cli, "eval", "reverse", models / model, "--quiet", *options, says=says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], ("the grid is empty",)),
        (["--grid", "seed="], ("lacks a value",)),
        (["--grid", "sede=1"], ("unknown key sede", "did you mean 'seed'?")),
        (["--grid", "learning_rate=1e-3,0.001"], ("are the same run",)),
        (["--grid", "position.kind=learned", "length.max=65"], ("130", "max_length=130")),
        (["--grid", "task.kind=delayed_sum", "length.max=5"], ("even, not 5",)),
        (["--grid", "task.kind=predecessor_query", "length.max=9"], ("vocab_size=9 or more",)),
        (["--grid", "seed=1,2", "--baseline", "sed=1"], ("names no value of the grid",)),
        (["--grid", "seed=1,2", "--jobs", "0"], ("jobs must be at least 1",)),
        (["--grid", "seed=1,2", "--devices", "cuda:99"], ("cuda:99", "take cpu")),
    ],
)
def test_sweep_options(arguments: list[str], says: tuple[str, ...], cli: CLI) -> None:
    """A grid that is found to be wrong after some of it was trained."""
    write_config(tiny("reverse", Path("run")), Path("c.yaml"))
    refused(cli, "sweep", "c.yaml", *arguments, says=says)


def test_diagnose_stability_options(cli: CLI, models: Path) -> None:
    """A run that has no Jacobian of the kind, or none at all."""
    base = ["diagnose", "stability"]
    refused(cli, *base, models / "text", says=("is not a run on a task such as reverse",))
    refused(cli, *base, "no/such", says=("is not a run on a task such as reverse",))
    refused(cli, *base, models / "backwards", "--n", "0", says=("at least 1",))


def test_eval_task_options(cli: CLI, models: Path) -> None:
    """A task that is no task of sequences, or a default that nobody can guess."""
    base = ["eval", "task", models / "text", "--quiet"]
    refused(cli, *base, says=("was not trained on a task of sequences", "--task, one of copy"))
    refused(cli, *base, "--task", "sorrt", says=("'sorrt'", "did you mean 'sort'"))
    refused(cli, *base, "--task", "passkey", says=("no task of sequences 'passkey'",))
    refused(cli, *base, "--task", "sort", "--length", "4", says=("was not trained on sort",))
    odd = ["--task", "delayed_sum", "--vocab-size", "8", "--length", "5"]
    refused(cli, *base, *odd, says=("even, not 5",))
    few = ["--task", "predecessor_query", "--vocab-size", "8", "--length", "9"]
    refused(cli, *base, *few, says=("vocab_size=9 or more",))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], ("give either --prompt or --prompt-file",)),
        (["--prompt", "a", "--prompt-file", "p.txt"], ("give either --prompt or --prompt-file",)),
        (["--prompt", ""], ("the prompt is empty",)),
        (["--prompt-file", "empty.txt"], ("empty.txt is empty",)),
        (["--prompt-file", "none.txt"], ("no text file none.txt",)),
        (["--prompt-file", "bytes.txt"], ("bytes.txt is not UTF-8",)),
        (["--prompt-file", "."], ("cannot be read", "give a file of UTF-8 text")),
        (["--prompt", "a", "--max-new-tokens", "-1"], ("max_new_tokens",)),
        (["--prompt", "a", "--temperature", "-1"], ("temperature",)),
        (["--prompt", "a", "--top-p", "0"], ("top_p in (0, 1]",)),
        (["--prompt", "a", "--device", "tpu0"], ("cannot be used",)),
    ],
)
def test_generate_options(
    options: list[str], says: tuple[str, ...], cli: CLI, models: Path, tmp_path: Path
) -> None:
    """A prompt that is not there, or there twice."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bytes.txt").write_bytes(b"a\xff")
    refused(cli, "generate", models / "text", *options, says=says)


@pytest.mark.parametrize(
    ("text", "overrides", "says"),
    [
        ("max_stps: 3", [], ("unknown key max_stps", "did you mean 'max_steps'")),
        ("model: {d_modl: 3}", [], ("unknown key model.d_modl", "did you mean 'd_model'")),
        ("model: {mixer: {kind: lstn}}", [], ("unknown mixer 'lstn'", "did you mean 'lstm'")),
        (
            "model: {mixer: {kind: mamba2, d_stat: 4}}",
            [],
            ("mixer 'mamba2' has no option 'd_stat'", "did you mean 'd_state'"),
        ),
        ("model: {mixer: {kind: mamba2, d_state: x}}", [], ("option 'd_state'",)),
        ("model: {mixer: {kind: mamba2, A_init: {a: 1}}}", [], ("A_init",)),
        ("model: {mixer: lstm}", [], ("key 'model.mixer'", "mapping")),
        ("model: {block: plan}", [], ("did you mean 'plain'",)),
        ("model: {position: {kind: sinus}}", [], ("did you mean 'sinusoidal'",)),
        ("task: {kind: revers}", [], ("unknown task 'revers'", "did you mean 'reverse'")),
        ("task: {kind: 3}", [], ("one of: copy, delayed_sum, passkey",)),
        ("task: {}", [], ("'kind'", "one of: copy, delayed_sum, passkey")),
        ("seed: 0", ["task={}"], ("'kind'", "one of: copy, delayed_sum, passkey")),
        ("task: passkey", [], ("key 'task'", "mapping")),
        ("max_steps: soon", [], ("key 'max_steps'",)),
        ("max_steps: 0", [], ("max_steps must be at least 1",)),
        ("just words", [], ("unknown key just words",)),
        ("a: [", [], ("is not YAML",)),
        ("seed: 0", ["max_steps"], ("'max_steps' is not of the form key=value",)),
        ("seed: 0", ["max_steps=ten"], ("key 'max_steps'",)),
        ("seed: 0", ["model.mixer={kind: lstm"], ("is not YAML",)),
        ("seed: 0", ["model.mixr.kind=lstm"], ("unknown key model.mixr", "did you mean 'mixer'")),
        ("seed: 0", ["length.max=100"], ("at least 156 tokens",)),
        ("seed: 0", ["tokenizer=gpt3"], ("no tokenizer at gpt3",)),
    ],
)
def test_train_configurations(
    text: str, overrides: list[str], says: tuple[str, ...], cli: CLI, tmp_path: Path
) -> None:
    """A key that is ignored, or a folder made for a run that never starts."""
    (tmp_path / "c.yaml").write_text(text or "seed: 0")
    refused(cli, "train", "c.yaml", *overrides, "--quiet", says=says)


def test_train_without_a_configuration(cli: CLI, tmp_path: Path) -> None:
    """A wrong path."""
    refused(cli, "train", "none.yaml", says=("no configuration file none.yaml", "configs/train"))
    refused(cli, "train", tmp_path, says=("cannot be read (it is a folder)", "configs/train"))


def test_train_into_another_run(cli: CLI, tmp_path: Path) -> None:
    """A run overwritten by its neighbour."""
    write_config(tiny("reverse", Path("run"), max_steps=2), tmp_path / "c.yaml")
    assert cli("train", "c.yaml", "--quiet").code == 0
    refused(cli, "train", "c.yaml", "--quiet", says=("add --resume",))
    for resume in ([], ["--resume"]):
        arguments = ["train", "c.yaml", "seed=3", "--quiet", *resume]
        refused(cli, *arguments, says=("seed: 0 there, 3 here", "choose another output_dir"))


def test_results_of_another_run(cli: CLI, models: Path) -> None:
    """Rows of two evaluations in one file."""
    arguments = ["eval", "passkey", models / "text", *SHORT, "--output", "out"]
    assert cli(*arguments).code == 0
    refused(cli, *arguments, "--seed", "1", says=("different seed", "choose another"))
    other = ["eval", "reverse", models / "backwards", "--n", "2", "--quiet", "--output", "out"]
    refused(cli, *other, says=("another run", "choose another"))


def test_folders_that_cannot_be_written(cli: CLI, models: Path, tmp_path: Path) -> None:
    """A traceback below a path that is a file."""
    (tmp_path / "file").write_text("x")
    says = ("file", "choose another folder")
    passkey = ["eval", "passkey", models / "text", *SHORT]
    refused(cli, *passkey, "--output", "file/below", says=says)
    refused(cli, *passkey, "--output", "file", says=says)
    reverse = ["eval", "reverse", models / "backwards", "--n", "2", "--quiet"]
    refused(cli, *reverse, "--output", "file/below", says=says)
    write_config(tiny("reverse", Path("file/run")), tmp_path / "c.yaml")
    refused(cli, "train", "c.yaml", "--quiet", says=says)


@pytest.fixture
def small_files() -> Callable[[int], None]:
    """Lets files grow to so many bytes only, as on a disk that fills up; 0 for no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size or soft, hard))

    return limit


def test_a_full_disk_while_evaluating(
    cli: CLI, models: Path, tmp_path: Path, small_files: Callable[[int], None]
) -> None:
    """A torn row that spoils the file for the run that goes on."""
    arguments = ["eval", "passkey", models / "text", "--lengths", "160", "--n", "8", "--quiet"]
    arguments += ["--batch-size", "4", "--output", "out"]
    small_files(1500)
    try:
        result = cli(*arguments)
    finally:
        small_files(0)
    assert_refused(result, "File too large", "free space", "longrnn eval passkey")
    torn = (tmp_path / "out/results.jsonl").read_bytes()
    assert len(torn) == 1500
    assert cli(*arguments).code == 0
    whole = (tmp_path / "out/results.jsonl").read_bytes()
    assert whole.startswith(torn[: torn.rindex(b"\n") + 1])
    _, rows = read_results(tmp_path / "out/results.jsonl")
    assert sorted((row["depth"], row["index"]) for row in rows) == [
        (depth, index) for depth in (0, 0.25, 0.5, 0.75, 1) for index in range(8)
    ]


def test_a_full_disk_while_training(
    cli: CLI, tmp_path: Path, small_files: Callable[[int], None]
) -> None:
    """Half a checkpoint that is taken for a whole one."""
    write_config(tiny("reverse", Path("run")), tmp_path / "c.yaml")
    small_files(2000)
    try:
        result = cli("train", "c.yaml", "--quiet")
    finally:
        small_files(0)
    assert_refused(result, "free space", "longrnn train c.yaml --quiet --resume")
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    assert not list((tmp_path / "run").glob("*.safetensors"))
    assert cli("train", "c.yaml", "--quiet", "--resume").code == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == [3, 6, 9, 10]


def test_what_click_refuses(cli: CLI, models: Path) -> None:
    """A traceback for a misspelt command or option."""
    for arguments, says in [
        (["evl"], "No such command 'evl'"),
        (["eval", "passky"], "No such command 'passky'"),
        (["info"], "Missing argument"),
        (["info", models, "--nonsense"], "No such option"),
        (["eval", "passkey", models / "text", "--n", "x"], "Invalid value"),
        (["eval", "passkey"], "Missing argument"),
    ]:
        result = cli(*arguments)
        assert result.code == 2
        assert result.out == ""
        assert says in result.err
        assert "Traceback" not in result.err


def test_an_interrupted_evaluation_says_how_to_go_on(
    cli: CLI, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C that ends in silence or in a traceback."""
    from longrnn.evaluation import passkey

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(passkey, "answers", interrupted)
    result = cli("eval", "passkey", models / "text", *SHORT, "--output", "with space")
    again = f"longrnn eval passkey {models}/text {' '.join(SHORT)} --output 'with space'"
    assert_refused(result, "what was finished is kept", f"go on with: {again}", code=130)


def test_a_prompt_that_is_no_text(cli: CLI, models: Path) -> None:
    """Bytes on the command line that are no UTF-8 come as surrogates."""
    prompt = os.fsdecode(b"a\xff")
    assert sys.getfilesystemencoding() == "utf-8"
    refused(cli, "generate", models / "text", "--prompt", prompt, says=("UTF-8",))

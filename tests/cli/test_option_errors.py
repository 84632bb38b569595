"""Bad options of every command: exit code 2, one sentence with its remedy, nothing written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import CLI, refused

SHORT = ["--lengths", "160", "--depths", "1", "--n", "1", "--quiet"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--lengths", "4x"], ("'4x' is not a valid length", "256, 4k or 1M")),
        (["--lengths", ""], ("'' is not a valid length", "256, 4k or 1M")),
        (["--lengths", "-1"], ("'-1' is not a valid length",)),
        (["--lengths", "256,"], ("'' is not a valid length",)),
        (["--lengths", "9" * 400], ("is not a valid length",)),
        (["--lengths", "100"], ("length 100 is too short", "the least is 156 tokens")),
        (["--depths", "many"], ("--depths", "many")),
        (["--depths", ""], ("--depths",)),
        (["--depths", "0.5,"], ("--depths",)),
        (["--depths", "0"], ("the number of depths must be at least 1",)),
        (["--depths", "-1"], ("--depths", "-1")),
        (["--depths", "0.5,1.5"], ("--depths", "1.5")),
        (["--depths", "nan,0"], ("--depths",)),
        (["--n", "0"], ("--n",)),
        (["--batch-size", "0"], ("--batch-size",)),
        (["--device", "abacus"], ("device 'abacus' cannot be used", "give cpu or auto")),
        (["--device", "cuda:99"], ("device 'cuda:99' cannot be used",)),
    ],
)
def test_eval_passkey_options(
    options: list[str], says: tuple[str, ...], cli: CLI, models: Path
) -> None:
    """Bad values of the options are refused before anything is evaluated."""
    refused(cli, "eval", "passkey", models / "text", *SHORT, *options, says=says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--insert-at", "x"], ("'x'",)),
        (["--insert-at", "-1"], ("'-1'",)),
        (["--insert-at", "0,1M"], ("tokens", "length")),
        (["--insert-at", "0", "--depths", "5"], ("--depths",)),
        (["--insert-at", "0", "--depths", "3"], ("--insert-at",)),
        (["--insert-at", "0", "--n-keys", "2"], ("prompt",)),
    ],
)
def test_eval_passkey_insertion_points(
    options: list[str], says: tuple[str, ...], cli: CLI, models: Path
) -> None:
    """Insertion points are refused if they fit no prompt or are given together with depths."""
    command = ["eval", "passkey", models / "text", "--lengths", "256", "--quiet"]
    refused(cli, *command, *options, says=says)


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("backwards", ["--n", "0"], ("--n",)),
        ("backwards", ["--n", "17"], ("16", "17")),
        ("backwards", ["--n", "2", "--lengths", "0"], ("'0' is not a valid length",)),
        ("backwards", ["--n", "2", "--lengths", "1"], ("hold out at most half",)),
        ("backwards", ["--vocab-size", "0"], ("--vocab-size",)),
        ("backwards", ["--vocab-size", "9"], ("10 ids",)),
        ("text", [], ("was not trained on reverse", "--vocab-size and --lengths")),
        ("text", ["--lengths", "4"], ("was not trained on reverse",)),
    ],
)
def test_eval_reverse_options(
    model: str, options: list[str], says: tuple[str, ...], cli: CLI, models: Path
) -> None:
    """Sizes that do not fit the model or the task are refused."""
    refused(cli, "eval", "reverse", models / model, "--quiet", *options, says=says)


def test_eval_task_options(cli: CLI, models: Path) -> None:
    """A task that is not a sequence task, or whose sizes are not known, is refused."""
    base = ["eval", "task", models / "text", "--quiet"]
    refused(cli, *base, says=("task", "--task"))
    refused(cli, *base, "--task", "sorrt", says=("'sorrt'", "sort"))
    refused(cli, *base, "--task", "passkey", says=("passkey",))
    refused(cli, *base, "--task", "sort", "--lengths", "4", says=("sort",))
    odd = ["--task", "delayed_sum", "--vocab-size", "8", "--lengths", "5"]
    refused(cli, *base, *odd, says=("even, not 5",))
    few = ["--task", "predecessor_query", "--vocab-size", "8", "--lengths", "9"]
    refused(cli, *base, *few, says=("vocab_size=9",))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], ("give either --prompt or --prompt-file",)),
        (["The sky"], ("'The sky' has no option before it: give a text with --prompt",)),
        (["--prompt", "a", "--prompt-file", "p.txt"], ("give either --prompt or --prompt-file",)),
        (["--prompt", ""], ("the prompt is empty",)),
        (["--prompt-file", "empty.txt"], ("empty.txt is empty",)),
        (["--prompt-file", "none.txt"], ("no text file none.txt",)),
        (["--prompt-file", "bytes.txt"], ("bytes.txt is not UTF-8",)),
        (["--prompt-file", "."], ("cannot be read", "give a file of UTF-8 text")),
        (["--prompt", "a", "--max-new-tokens", "-1"], ("'-1' is not a valid length",)),
        (["--prompt", "a", "--temperature", "-1"], ("temperature",)),
        (["--prompt", "a", "--top-p", "0"], ("top_p",)),
        (["--prompt", "a", "--device", "tpu0"], ()),
    ],
)
def test_generate_options(
    options: list[str], says: tuple[str, ...], cli: CLI, models: Path, tmp_path: Path
) -> None:
    """Exactly one prompt of valid text is required, and sampling options must be in range."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bytes.txt").write_bytes(b"a\xff")
    refused(cli, "generate", models / "text", *options, says=says)


def test_what_click_refuses(cli: CLI, models: Path) -> None:
    """A misspelt command or option is refused with usage and exit code 2."""
    for arguments, says in [
        (["evl"], "No such command 'evl'"),
        (["eval", "passky"], "No such command 'passky'"),
        (["info"], "Missing argument"),
        (["info", models, "--nonsense"], "No such option"),
        (["eval", "passkey", models / "text", "--n", "x"], "--n"),
        (["eval", "passkey"], "Missing argument"),
    ]:
        result = cli(*arguments)
        assert result.code == 2
        assert result.out == ""
        assert says in result.err
        assert "Traceback" not in result.err


def test_a_prompt_that_is_no_text(cli: CLI, models: Path) -> None:
    """A prompt that is not UTF-8, which arrives as surrogates, is refused."""
    prompt = os.fsdecode(b"a\xff")
    assert sys.getfilesystemencoding() == "utf-8"
    refused(cli, "generate", models / "text", "--prompt", prompt, says=("UTF-8",))

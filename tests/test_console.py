"""Tables and progress on the command line."""

import re

import pytest

from longrnn.console import print_rows
from longrnn.progress import Progress

COLUMNS = ["model", *(f"depth {share}%" for share in range(0, 100, 10)), "keys recalled"]
NAME = "passkey-tiny-short+forget_more(decay_scale=0.9999,input_scale=0.75)"
ROW = [NAME, *["1.00"] * 10, "1.00 [0.93, 1.00]"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_table_fits_the_terminal_and_is_whole_in_a_pipe(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(is_terminal)))
    print_rows("passkey", COLUMNS, [ROW])
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert (max(map(len, out.splitlines())) <= 150) == is_terminal
    assert (NAME in out) == (not is_terminal)


def test_names_in_a_table_do_not_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    print_rows("\x1b[2J", ["\x1b[3J"], [["\x1b[4J\u202e"]])
    out = capsys.readouterr().out
    assert all(rf"\x1b[{number}J" in out for number in "234")
    assert not re.search(r"\x1b\[\dJ|\u202e", out)


def test_progress_says_how_far(capsys: pytest.CaptureFixture[str]) -> None:
    """Title, count, total, rate and note go to standard error, also when an error ends the work."""
    with pytest.raises(RuntimeError), Progress("reading", 4, unit="tokens") as progress:
        progress.advance(1, 100)
        progress.advance(2, 300, "loss 2.5")
        raise RuntimeError
    out, err = capsys.readouterr()
    assert not out
    for piece in ("reading", "3/4", "tokens/s loss 2.5"):
        assert piece in err.split("\r")[-1]
    assert (progress.done, progress.units) == (3, 400)

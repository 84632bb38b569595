"""Tables of the command line."""

from __future__ import annotations

import re

import pytest

from longrnn.console import print_rows

COLUMNS = ["model", *(f"depth {share}%" for share in range(0, 100, 10)), "keys recalled"]
ROW = ["passkey-tiny-short+sliding_window(window=256)", *["1.00"] * 10, "1.00 [0.93, 1.00]"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_table_fits_the_terminal_and_is_whole_in_a_pipe(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(is_terminal)))
    print_rows("passkey", COLUMNS, [ROW])
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert (max(map(len, out.splitlines())) <= 120) == is_terminal
    assert (ROW[0] in out) == (not is_terminal)

"""Progress of long work, on and off a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from longrnn.progress import Progress


def test_plain_lines_say_how_far(capsys: pytest.CaptureFixture[str]) -> None:
    """Off a terminal, plain lines without escape codes go to standard error."""
    with Progress("reading", 4, unit="tokens", every=0.0) as progress:
        progress.advance(1, 100, "loss 2.5")
        progress.advance(3, 300)
    out, err = capsys.readouterr()
    first, last = err.splitlines()
    assert not out
    assert first.startswith("reading: 1/4, ")
    assert "tokens/s loss 2.5, " in first
    assert last.startswith("reading: 4/4, ")
    assert last.endswith(" 0 s left")
    assert "\x1b" not in err


def test_lines_are_rare_and_the_last_is_always_there(capsys: pytest.CaptureFixture[str]) -> None:
    """At most one line per interval is written, and always one at the end."""
    with Progress("reading", 100, unit="tokens", every=3600.0) as progress:
        for _ in range(100):
            progress.advance(1, 10)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "100/100" in lines[0]


def test_quiet_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    """A quiet progress writes nothing."""
    with Progress("reading", 2, unit="tokens", quiet=True, every=0.0) as progress:
        progress.advance(2, 10)
    assert capsys.readouterr() == ("", "")
    assert (progress.done, progress.units) == (2, 10)


def test_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """A total of 0 is reported without an error."""
    with Progress("reading", 0, unit="tokens", every=0.0) as progress:
        progress.advance(0, 0)
    assert "0/0" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal a bar is drawn, and stopped after an exception."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(RuntimeError), Progress("reading", 2, unit="tokens") as progress:
        progress.advance(1, 10, "at 4k")
        raise RuntimeError
    assert progress._bar is not None
    assert progress._bar.finished is False
    assert not progress._bar.live.is_started
    shown = terminal.getvalue()
    assert "reading" in shown
    assert "1/2" in shown
    assert "at 4k" in shown

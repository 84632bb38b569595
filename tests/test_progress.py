"""Progress of long work."""

from __future__ import annotations

import pytest

from longrnn.progress import Progress


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

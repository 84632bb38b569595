"""Bad input of every command: exit code 2, one sentence with the names in it, nothing written.

The names in capitals are those of `tests.cli.conftest.Shelf`.
"""

from __future__ import annotations

import pytest

from tests.cli.conftest import CLI, Shelf, refused, table
from tests.texts import DATA

PASSKEY = "eval passkey TEXT --lengths 160 --depths 1 --n 1"
TRAIN = "train c.yaml"
STATES = "diagnose states TEXT --text book.txt --length 600 --train-length 64"
GRADIENTS = "diagnose gradients RUN --length 8"
CALIBRATE = "calibrate SHORT --text filler.txt --method"
HARNESS = "eval harness passkey-tiny --tasks longrnn_passkey"
# A command, and what its error must contain.
CASES = (DATA / "refusals.txt").read_text().replace(r"\udcff", "\udcff")  # a byte that is not UTF-8
SHORTHANDS = ("PASSKEY", "STATES", "GRADIENTS", "CALIBRATE", "HARNESS", "TRAIN")


def cases() -> list[tuple[str, list[str]]]:
    return table(CASES, {name: globals()[name] for name in SHORTHANDS})


@pytest.mark.parametrize(("command", "names"), cases(), ids=[command for command, _ in cases()])
def test_bad_input_is_refused(command: str, names: list[str], cli: CLI, shelf: Shelf) -> None:
    if command.startswith("eval harness"):
        pytest.importorskip("lm_eval")
    refused(cli, *shelf(command), says=tuple(names))

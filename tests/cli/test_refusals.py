"""Bad input of every command: exit code 2, one sentence with the names in it, nothing written.

The names in capitals are those of `tests.cli.conftest.shelf`.
"""

import shlex

import pytest

from tests.cli.conftest import CLI, Shelf, refused, table
from tests.texts import DATA

PASSKEY = "eval passkey TEXT --lengths 160 --depths 1 --n 1"
TRAIN = "train c.yaml"
MIXER = f"{TRAIN} model.d_model=8 'model.mixer={{"
TASK = f"{TRAIN} 'task={{kind: "
TEXTS = f"{TRAIN} eval_steps=1 'task={{kind: text, data: [book.txt, filler.txt]}}'"
STATES = "diagnose states TEXT --text book.txt --length 600 --train-length 64"
GRADIENTS = "diagnose gradients RUN --length 8"
CALIBRATE = "calibrate SHORT --text filler.txt --method"
REPAIR = "repair collapse-tiny --length 1k --train-length 64 --output out"
HARNESS = "eval harness passkey-tiny --tasks longrnn_passkey"
SHORTHANDS = {
    name: value for name, value in [*globals().items()] if name.isupper() and isinstance(value, str)
}
# A command, and what its error must contain.
FILE = (DATA / "refusals.txt").read_text()
CASES = table(FILE.replace(r"\udcff", "\udcff"), SHORTHANDS)  # a byte that is not UTF-8
CASES += [
    (f"{PASSKEY.replace('TEXT', 'SHORT')} --mitigation {shlex.quote(spec)}", names)
    for spec, names in table((DATA / "mitigations.txt").read_text(), {})
]


@pytest.mark.parametrize(
    ("command", "names"),
    [
        pytest.param(*case, id=case[0], marks=[pytest.mark.slow] * case[0].endswith("(slow)"))
        for case in CASES
    ],
)
def test_bad_input_is_refused(command: str, names: list[str], cli: CLI, shelf: Shelf) -> None:
    """The rows for which lm-eval lists its tasks run with the slow tests."""
    command = command.removesuffix(" (slow)")
    if command.startswith("eval harness"):
        pytest.importorskip("lm_eval")
    refused(cli, *shelf(command), says=tuple(names))

"""Every message of a `UserError` says what to do; `tests/conftest.py` checks raised ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import longrnn
from longrnn.errors import UserError
from tests.messages import complaints, complaints_of_literal, literals

PACKAGE = Path(longrnn.__file__).parent


def test_every_message_that_is_written_says_what_to_do() -> None:
    """This includes messages that no test raises."""
    found = list(literals(PACKAGE))
    assert len(found) > 300
    wrong = []
    for literal in found:
        where = literal.path.relative_to(PACKAGE.parent).as_posix()
        for complaint in complaints_of_literal(literal):
            wrong.append(f"{where}:{literal.line}: {literal.text}: {complaint}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("message", "right"),
    [
        ("no file a.txt: give a file of UTF-8 text", True),
        ("unknown mixer 'lstn': did you mean 'lstm'?", True),
        ("lm-eval is not installed: pip install lm-eval", True),
        ("give either --prompt or --prompt-file", True),
        ("segments_per_step must be at least 1, not 0", False),
        ("'4x' is no length: write 4k", False),
        ("a model of transformers: use another", False),
        ("one: give it\ntwo", False),
        ("It is bad. It is worse. Give another.", False),
    ],
)
def test_the_form_tells_remedies_from_complaints(message: str, right: bool) -> None:
    assert (not complaints(message)) is right


def test_what_is_raised_in_a_test_is_looked_at(tmp_path: Path) -> None:
    """The hook fails a test that raises a message of the wrong form, and no other test."""
    conftest = (Path(__file__).parent / "conftest.py").read_text()
    module = tmp_path / "tests"
    module.mkdir()
    (module / "__init__.py").touch()
    for name in ("messages.py", "interpreter.py"):
        (module / name).write_text((Path(__file__).parent / name).read_text())
    (module / "conftest.py").write_text(conftest)
    (module / "test_them.py").write_text(
        "import pytest\nfrom longrnn import units\nfrom longrnn.errors import UserError\n"
        "from longrnn.units import parse_length\n"
        "def test_right():\n    with pytest.raises(UserError):\n        parse_length('x')\n"
        "def test_wrong(monkeypatch):\n"
        "    code = compile(\"raise UserError('n must be 1')\", units.__file__, 'exec')\n"
        "    with pytest.raises(UserError):\n        exec(code, {'UserError': UserError})\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "tests"]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "'n must be 1': it does not say what to do" in done.stdout
    assert "1 failed, 1 passed" in done.stdout


def test_a_user_error_is_a_value_error() -> None:
    assert issubclass(UserError, ValueError)

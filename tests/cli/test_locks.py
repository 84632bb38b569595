"""Every command that writes refuses to do so while another process writes there."""

import signal
from pathlib import Path

import pytest
import typer

from longrnn.cli.app import app
from tests.cli.conftest import CLI, commands, contents, table
from tests.hf.foreign import architecture, with_bytes
from tests.holders import held
from tests.texts import DATA
from tests.training.forks import group
from tests.training.runs import saved, tiny, write_config

pytestmark = pytest.mark.core

# By its name, the arguments of every command that writes a folder `out`, or a file of that name.
PLACES = dict(table((DATA / "locks.txt").read_text(), {}))
# lm-eval writes new files, whose names hold the time; a conversion appears whole
# under its name, which must be new.
OTHERS = {"eval harness", "convert"}
WRITES = {"output", "out", "destination"}


def test_no_command_that_writes_is_left_out() -> None:
    found = {
        " ".join(name)
        for name, command in commands(typer.main.get_command(app))
        if WRITES & {parameter.name for parameter in command.params}
    }
    assert found | {"train"} | OTHERS == {*PLACES, *OTHERS}


@pytest.fixture
def places(models: Path, tmp_path: Path) -> dict[str, Path]:
    """Models and files that the commands above name."""
    (tmp_path / "a.txt").write_text("It was a dark and stormy night. " * 20)
    suite = "evaluations: [{kind: passkey, lengths: [160], depths: [1.0], n: 1}]"
    (tmp_path / "suite.yaml").write_text(suite)
    config = tiny("reverse", tmp_path / "run", max_steps=2, length={"max": 4})
    return {
        "model": saved(tmp_path / "mamba"),
        "llama": with_bytes(architecture("llama", vocab_size=256), tmp_path / "llama"),
        "run": models / "backwards",
        "config": write_config(config, tmp_path / "config.yaml"),
    }


@pytest.mark.parametrize("name", list(PLACES))
def test_a_command_is_refused_while_another_process_writes_there(
    name: str, cli: CLI, places: dict[str, Path], tmp_path: Path
) -> None:
    target = tmp_path / ("out.yaml" if name == "calibrate" else "out")
    command = [*name.split(), *PLACES[name][0].format(**places).split()]
    with held(target) as pid:
        kept = contents(tmp_path)
        refused = cli(*command)
        assert refused.code == 2, refused.err
        last = refused.err.splitlines()[-1]
        assert str(pid) in last
        assert contents(tmp_path) == kept
    done = cli(*command)
    assert done.code == 0, done.err
    assert not list(tmp_path.rglob("*.lock"))


def test_of_two_processes_of_a_run_only_the_main_one_locks(tmp_path: Path) -> None:
    output = tmp_path / "run"
    config = write_config(tiny("carry", output, max_steps=40, save_steps=4), tmp_path / "c.yaml")
    both = group("train", config, folder=tmp_path / "first")
    assert both[0].when(lambda: any(output.glob("checkpoint-*")))
    for process in both:  # so that the run does not end first
        process.send(signal.SIGSTOP)
    others = group("train", "--resume", output, folder=tmp_path / "second")
    assert [process.end() for process in others] == [2, 2]
    for process in both:
        process.send(signal.SIGCONT)
    assert str(both[0].process.pid) in others[0].err
    assert [process.end() for process in both] == [0, 0], both[0].err + both[1].err
    assert not list(output.glob(".*"))

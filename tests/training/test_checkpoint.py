"""Damaged checkpoints are named and skipped, by all processes alike."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from longrnn.errors import UserError
from longrnn.training import checkpoint
from longrnn.training.trainer import Trainer
from tests.training.forks import pair
from tests.training.runs import assert_same_run, tiny, train, write_config

pytestmark = pytest.mark.core

FILES = ("training.pt", "model.safetensors", "config.json", "carry-0.pt", "checksums.json")


def truncate(file: Path, to: float = 0.5) -> None:
    file.write_bytes(file.read_bytes()[: int(to * file.stat().st_size)])


def flip(file: Path) -> None:
    """Flips one bit, whose place is a function of the content."""
    content = bytearray(file.read_bytes())
    content[random.Random(bytes(content)).randrange(len(content))] ^= 4
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "empty": lambda file: truncate(file, to=0),
    "flipped": flip,
    "missing": Path.unlink,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints of 8 and 10 steps."""
    output = tmp_path_factory.mktemp("whole") / "run"
    train(tiny("carry", output))
    return output


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_passed_over(
    name: str, damage: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run resumes from the newest complete checkpoint."""
    newest = copy / "checkpoint-00000010"
    DAMAGES[damage](newest / name)
    trainer = Trainer(tiny("carry", copy), resume=True, quiet=True)
    assert trainer.step == 8
    (line,) = capsys.readouterr().err.splitlines()
    assert str(newest) in line
    assert repr(name) in line or name == "checksums.json"
    assert f"{copy}/checkpoint-00000008" in line
    assert [path.name for path in checkpoint.checkpoints(copy)] == ["checkpoint-00000008"]
    assert (copy / "checkpoint-00000010.damaged").is_dir()


def test_a_damaged_checkpoint_is_made_again(copy: Path, whole: Path) -> None:
    """The damaged checkpoint is written again, and the run ends where an undisturbed one does."""
    flip(copy / "checkpoint-00000010/training.pt")
    train(tiny("carry", copy), resume=True)
    assert_same_run(copy, whole)
    for folder in checkpoint.checkpoints(copy):
        assert checkpoint.damage(folder) is None
    # The same file again, while the first damaged folder still lies there.
    truncate(copy / "checkpoint-00000010/carry-0.pt")
    train(tiny("carry", copy, save_total_limit=1), resume=True)
    assert [path.name for path in checkpoint.checkpoints(copy)] == ["checkpoint-00000010"]
    assert_same_run(copy, whole)


def test_where_none_is_whole_nothing_is_touched(copy: Path) -> None:
    """If every checkpoint is damaged, the run is refused and no file changes."""
    for number, name in ((8, "model.safetensors"), (10, "training.pt")):
        truncate(copy / f"checkpoint-{number:08d}" / name)
    before = content(copy)
    with pytest.raises(UserError) as error:
        Trainer(tiny("carry", copy), resume=True, quiet=True)
    message = str(error.value)
    assert "\n" not in message
    for piece in (
        f"no checkpoint in {copy} is whole",
        "checkpoint-00000010: 'training.pt' is not what was written",
        "checkpoint-00000008: 'model.safetensors' is not what was written",
        "put one back from a copy, or begin again in another output_dir",
    ):
        assert piece in message
    assert content(copy) == before


@pytest.mark.parametrize("text", ["{}", "[]", '{"../train.yaml": "00"}', '{"a\\u0000": "00"}', "3"])
def test_checksums_that_check_nothing(text: str, copy: Path) -> None:
    """A checksum file without entries counts as damage."""
    newest = copy / "checkpoint-00000010"
    (newest / "checksums.json").write_text(text)
    assert checkpoint.damage(newest) is not None
    assert checkpoint.newest_whole(copy)[0] == copy / "checkpoint-00000008"


def test_a_file_added_by_hand_is_no_damage(copy: Path) -> None:
    """A file that the checksums do not list is ignored."""
    (copy / "checkpoint-00000010/notes.txt").write_text("good one")
    assert Trainer(tiny("carry", copy), resume=True, quiet=True).step == 10


def test_another_number_of_processes_is_refused(copy: Path) -> None:
    """A resume with another number of processes is refused and changes nothing."""
    before = content(copy)
    path = write_config(tiny("carry", copy), copy.parent / "config.yaml")
    for process in pair("train", path, "save_steps=3", "--resume", folder=copy.parent / "log"):
        assert process.end() == 2
        assert process.err.startswith(f"error: {copy}/checkpoint-00000010 ")
    assert content(copy) == before


def test_two_processes_take_the_same_checkpoint(tmp_path: Path) -> None:
    """If one process finds its part damaged, all resume from an earlier checkpoint."""
    paths = {}
    for name in ("undisturbed", "damaged"):
        config = tiny("carry", tmp_path / name, num_processes=2, save_steps=2, max_steps=6)
        paths[name] = write_config(config, tmp_path / f"{name}.yaml")
        ends = pair("train", paths[name], "--quiet", folder=tmp_path / "log" / name)
        assert [process.end() for process in ends] == [0, 0], ends[0].err
    flip(tmp_path / "damaged/checkpoint-00000006/carry-1.pt")
    ends = pair("train", paths["damaged"], "--quiet", "--resume", folder=tmp_path / "log/again")
    assert [process.end() for process in ends] == [0, 0], ends[0].err
    assert "carry-1.pt" in ends[0].err
    assert ends[1].err == ""
    assert_same_run(tmp_path / "undisturbed", tmp_path / "damaged")
    parts = [
        checkpoint.read_tensors(tmp_path / name / "checkpoint-00000006/carry-1.pt")
        for name in ("undisturbed", "damaged")
    ]
    assert str(parts[0]) == str(parts[1])

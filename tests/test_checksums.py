"""Every flipped bit in a file that longrnn writes is noticed."""

import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from longrnn.checkpoints.convert import convert
from longrnn.checkpoints.layouts import save_model
from longrnn.checkpoints.load import load
from longrnn.checkpoints.names import embedded
from longrnn.checksums import CHECKSUMS, refuse_damage, write_checksums
from longrnn.data.build import build
from longrnn.data.stream import Corpus
from longrnn.errors import UserError
from longrnn.files import read_json
from longrnn.hf.tokenizer import TOKENIZER_FILES
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.text import ByteTokenizer, Reading
from tests.training.forks import SERVER
from tests.training.runs import MAMBA2, last_checkpoint, tiny, train

pytestmark = pytest.mark.core


def model() -> RecurrentLM:
    torch.manual_seed(0)
    return RecurrentLM(RecurrentConfig(**MAMBA2))


def flips(path: Path, n: int) -> Iterator[tuple[int, int]]:
    """Flips `n` bits of a file, one at a time, spread over all of it; then it is whole again."""
    whole = path.read_bytes()
    rng = random.Random(path.name)
    for part in range(n):
        low = part * len(whole) // n
        place = rng.randrange(low, max(low + 1, (part + 1) * len(whole) // n))
        bit = rng.randrange(8)
        content = bytearray(whole)
        content[place] ^= 1 << bit
        path.write_bytes(content)
        yield place, bit
    path.write_bytes(whole)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of every kind with a model that longrnn writes."""
    root = tmp_path_factory.mktemp("folders")
    save_model(model(), root / "ours")
    for layout in ("native", "hf"):
        convert(root / "ours", root / layout, to=layout)
    train(tiny("reverse", root / "run", max_steps=4))
    (root / "a.txt").write_text("Once upon a time. " * 9)
    build([str(root / "a.txt")], ByteTokenizer(), root / "corpus", reading=Reading(), quiet=True)
    return {
        **{name: root / name for name in ("ours", "native", "hf", "run", "corpus")},
        "checkpoint": last_checkpoint(root / "run"),
    }


KINDS = ("ours", "native", "hf", "run", "checkpoint")
FLIPS = {".safetensors": 16, ".bin": 16, ".json": 6}


@pytest.mark.parametrize("kind", KINDS)
def test_loading_notices_every_flipped_bit(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Damaged weights, configuration or tokenizer are refused in one line that names the folder."""
    folder = tmp_path / kind
    shutil.copytree(folders[kind], folder)
    names = [name for name in read_json(folder / CHECKSUMS) if Path(name).suffix in FLIPS]
    assert "config.json" in names
    assert {"model.safetensors", "pytorch_model.bin"} & {*names}
    for name in names:
        for place, bit in flips(folder / name, FLIPS[Path(name).suffix]):
            with pytest.raises(UserError) as error:
                load(folder)
            assert "\n" not in str(error.value), (name, place, bit)
            assert str(folder) in str(error.value)
    load(folder)


@pytest.mark.parametrize("kind", ["checkpoint", "run", "corpus"])
def test_every_file_of_a_run_is_covered(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Optimizer and carried states too; they do not keep the model of a checkpoint from loading."""
    folder = tmp_path / kind
    shutil.copytree(folders[kind], folder)
    listed = read_json(folder / CHECKSUMS)
    if kind != "run":
        extra = {"training.pt", "carry-0.pt"} if kind == "checkpoint" else {"tokens.bin"}
        assert extra | listed.keys() == {p.name for p in folder.iterdir() if p.name != CHECKSUMS}
    for name in listed:
        for place, bit in flips(folder / name, 6):
            with pytest.raises(UserError, match=re.escape(f"({name!r} is not")):
                refuse_damage(folder, f"undo {place}, {bit}")
            if kind == "corpus":
                with pytest.raises(UserError, match=name):
                    Corpus(folder)
    refuse_damage(folder, "write it again")
    if kind == "checkpoint":
        (folder / "training.pt").write_bytes(b"")
        load(folder)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"1")
    write_checksums(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="config.json: No such file or directory"):
        refuse_damage(tmp_path, "copy it again")
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match="config.json: not a regular file"):
        refuse_damage(tmp_path, "copy it again")


def test_every_file_of_a_tokenizer_is_listed(tmp_path: Path) -> None:
    for name in TOKENIZER_FILES:
        (tmp_path / name).write_text("{}")
    write_checksums(tmp_path)
    assert {*TOKENIZER_FILES} == read_json(tmp_path / CHECKSUMS).keys()


def test_a_file_changed_on_purpose_is_refused_with_the_remedy(tmp_path: Path) -> None:
    save_model(model(), tmp_path / "m")
    weights = tmp_path / "m/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError) as error:
        load(tmp_path / "m")
    assert str(tmp_path / "m" / CHECKSUMS) in str(error.value)
    (tmp_path / "m" / CHECKSUMS).unlink()
    load(tmp_path / "m")


def save_forever(folder: Path) -> None:
    one, two = model(), model()
    torch.nn.init.zeros_(two.embedding.weight)
    while True:
        for each in (one, two):
            save_model(each, folder)


def test_a_kill_while_a_model_is_replaced_leaves_one_that_loads(tmp_path: Path) -> None:
    """Old checksums never refuse complete new files."""
    save_model(model(), tmp_path / "m")
    weights = tmp_path / "m/model.safetensors"
    first = weights.read_bytes()
    process = SERVER.Process(target=save_forever, args=(tmp_path / "m",))
    process.start()
    while weights.read_bytes() == first:
        assert process.is_alive()
    time.sleep(random.uniform(0.01, 0.1))
    process.kill()
    process.join()
    load(tmp_path / "m")


@pytest.mark.parametrize("name", sorted(embedded()))
def test_embedded_checkpoints_are_what_was_published(name: str) -> None:
    """Every file is listed in the checksums and unchanged."""
    folder = embedded()[name]
    listed = {path.name for path in folder.iterdir()} - {CHECKSUMS}
    assert read_json(folder / CHECKSUMS).keys() == listed
    refuse_damage(folder, "write it again")

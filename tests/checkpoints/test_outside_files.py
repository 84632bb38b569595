"""Malformed checkpoint files are refused with one sentence and a remedy.

Loading never ends in a traceback, and never allocates what a file merely claims to hold.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longrnn import load, load_tokenizer
from longrnn.cells import MIXERS
from longrnn.checkpoints.layouts import save_model
from longrnn.checkpoints.names import resolve
from longrnn.errors import UserError
from tests.contracts.builders import build_model, random_tokens
from tests.hf.foreign import architecture, native
from tests.test_fuzz import valid  # noqa: F401

pytestmark = pytest.mark.core


@pytest.fixture(params=["ours", "native", "mamba2", "llama"])
def layout(request: pytest.FixtureRequest, valid: Path, tmp_path: Path) -> Path:  # noqa: F811
    """Return a small valid checkpoint of each layout."""
    return shutil.copytree(valid / request.param, tmp_path / request.param)


def assert_refused(folder: Path) -> None:
    with pytest.raises(UserError) as error:
        load(folder)
    text = str(error.value)
    assert "\n" not in text
    assert ": " in text, "no remedy"
    assert str(folder) in text


@pytest.mark.parametrize(
    "content",
    [b"", b"{'a': 1}", b'{"model_type": "\xff\xfe"}', b"[1, 2]", b"null", b'{"a":' * 100_000],
)
def test_a_config_that_is_not_one_is_refused(content: bytes, layout: Path) -> None:
    (layout / "config.json").write_bytes(content)
    assert_refused(layout)


@pytest.mark.parametrize("size", [2**20, 2**80, 0, -1, "eight"])
@pytest.mark.parametrize(
    "names", [("d_model", "hidden_size"), ("n_layers", "n_layer", "num_hidden_layers")]
)
def test_sizes_that_the_weights_do_not_have_are_refused(
    names: tuple[str, ...], size: Any, layout: Path
) -> None:
    path = layout / "config.json"
    known = json.loads(path.read_text())
    path.write_text(json.dumps(known | {name: size for name in names if name in known}))
    assert_refused(layout)


@pytest.mark.parametrize("tokenizer", ["", None, ["bytes"], 3, "..", "a" * 300, "a\0b"])
def test_a_tokenizer_that_is_not_there_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    save_model(build_model("lstm"), tmp_path / "ours")
    path = tmp_path / "ours" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer": tokenizer}))
    with pytest.raises(UserError, match="tokenizer"):
        load_tokenizer(tmp_path / "ours")


NORM = "backbone.norm_f.weight"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "change",
    [
        lambda w: {**w, NORM: w[NORM].to_sparse()},
        lambda w: {**w, NORM: torch.ones(1).expand(2**40)},
        lambda w: {**w, NORM: 3},
        lambda w: {0: w[NORM]},
        lambda w: w[NORM],
        lambda w: {},
    ],
    ids=["sparse", "expanded", "a number", "no names", "a tensor", "nothing"],
)
def test_a_pickle_of_other_things_is_refused(change: Callable[[Any], Any], tmp_path: Path) -> None:
    native(tmp_path / "native")
    path = tmp_path / "native/pytorch_model.bin"
    torch.save(change(torch.load(path)), path)
    assert_refused(tmp_path / "native")


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
@pytest.mark.parametrize("kind", ["llama", "falcon_h1", "mamba2"])
def test_weights_that_are_all_integers_are_refused(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    architecture(kind).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    integers = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(integers, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=str(tmp_path)):
        load(tmp_path)


@pytest.mark.parametrize("kind", MIXERS)
def test_weights_of_several_dtypes_are_refused_or_run(kind: str, tmp_path: Path) -> None:
    """Only the rates and norms may be of another dtype, until all are cast to one."""
    save_model(build_model(kind, "random", dtype=torch.bfloat16), tmp_path)
    path, refused = tmp_path / "model.safetensors", set[str]()
    tensors = load_file(path)
    others = [(torch.float8_e4m3fn, "embedding.weight"), (torch.int8, "norm.weight")]
    for dtype, name in [*((torch.float32, name) for name in tensors), *others]:
        save_file({**tensors, name: tensors[name].to(dtype)}, path)
        (tmp_path / "checksums.json").unlink(missing_ok=True)
        try:
            model = load(tmp_path)
        except UserError:
            refused.add(name if dtype == torch.float32 else "")
            continue
        assert model.state_dict()[name].dtype == dtype == torch.float32
        state = model(random_tokens(2, 70)).state
        assert model(random_tokens(2, 1), state).logits.isfinite().all()
    assert {"", "embedding.weight"} <= refused <= tensors.keys() - {"norm.weight"} | {""}
    save_file({**tensors, "embedding.weight": tensors["embedding.weight"].float()}, path)
    for name in (f"{tmp_path}+float32", f"{tmp_path}+none+float32"):
        assert load(name)(random_tokens(1, 3)).logits.dtype == torch.float32


@pytest.mark.parametrize(
    "name",
    ["org/a--b", "org/model.git", "a" * 300, f"{'a' * 300}/b/c", "a\0b/c", "\udcff", "a/b/c"],
)
def test_a_name_that_nothing_can_have_is_refused(name: str) -> None:
    for find in (resolve, load_tokenizer):
        with pytest.raises(UserError) as error:
            find(name)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "{}", '{"model": {}}', "\udcff", "[" * 100_000])
def test_a_tokenizer_file_that_is_not_one_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    for source in (path, tmp_path):
        with pytest.raises(UserError) as error:
            load_tokenizer(source)
        assert "\n" not in str(error.value)

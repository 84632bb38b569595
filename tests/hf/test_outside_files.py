"""Malformed checkpoint files are refused with one sentence and a remedy.

Loading never ends in a traceback or an endless recursion, and never allocates what a file merely
claims to hold.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longrnn import load, load_tokenizer
from longrnn.cells import MIXERS
from longrnn.errors import UserError
from longrnn.hf.loading import load_recurrent, resolve
from longrnn.hf.tokenizer import byte_level
from longrnn.models.checkpoint import save_model
from tests.contracts.builders import build_model, random_tokens
from tests.hf.foreign import causal, native, with_bytes

pytestmark = pytest.mark.core

Damage = Callable[[Path], Any]


@pytest.fixture(params=["ours", "native", "mamba2", "llama"])
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a small valid checkpoint of each layout."""
    folder = tmp_path / request.param
    if request.param == "ours":
        save_model(build_model("mamba2", dtype=torch.float32), folder)
    elif request.param == "native":
        native(folder)
    else:
        with_bytes(causal(request.param, vocab_size=256), folder)
    load(folder)
    return folder


def assert_refused(folder: Path, message: str = "[a-z]") -> None:
    with pytest.raises(UserError, match=message) as error:
        load(folder)
    text = str(error.value)
    assert "\n" not in text
    assert ": " in text, "no remedy"
    assert str(folder) in text


def write(text: str | bytes) -> Damage:
    content = text if isinstance(text, bytes) else text.encode()
    return lambda folder: (folder / "config.json").write_bytes(content)


CONFIGS: dict[str, Damage] = {
    "empty": write(""),
    "not JSON": write("{'a': 1}"),
    "not UTF-8": write(b'{"model_type": "\xff\xfe"}'),
    "a list": write("[1, 2]"),
    "null": write("null"),
    "a number": write("3"),
    "nested deeply": write('{"a":' * 100_000 + "1" + "}" * 100_000),
    "a list nested deeply": write("[" * 100_000),
    "a number of 5,000 digits": write('{"n_layers": ' + "9" * 5000 + "}"),
    "a folder": lambda folder: (
        (folder / "config.json").unlink(),
        (folder / "config.json").mkdir(),
    ),
}


@pytest.mark.parametrize("damage", CONFIGS)
def test_a_config_that_is_not_one_is_refused(damage: str, layout: Path) -> None:
    CONFIGS[damage](layout)
    assert_refused(layout)


def set_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content.get("config", content).update(values)
    path.write_text(json.dumps(content))


NAMES = {
    "width": ("d_model", "hidden_size"),
    "layers": ("n_layers", "n_layer", "num_hidden_layers"),
    "vocabulary": ("vocab_size",),
}


@pytest.mark.parametrize("size", [2**20, 2**31, 2**80])
@pytest.mark.parametrize("what", NAMES)
def test_sizes_that_the_weights_do_not_have_are_refused(what: str, size: int, layout: Path) -> None:
    """Sizes in a configuration are checked before anything of that size is allocated."""
    known = json.loads((layout / "config.json").read_text())
    names = [n for n in NAMES[what] if n in known.get("config", known)]
    set_config(layout, **dict.fromkeys(names, size))
    assert_refused(layout)


@pytest.mark.parametrize("value", [0, -1, "eight", None, [8], 1.5])
@pytest.mark.parametrize("what", ["width", "layers"])
def test_sizes_that_are_not_positive_whole_numbers_are_refused(
    what: str, value: Any, layout: Path
) -> None:
    known = json.loads((layout / "config.json").read_text())
    names = [n for n in NAMES[what] if n in known.get("config", known)]
    set_config(layout, **dict.fromkeys(names, value))
    assert_refused(layout)


@pytest.mark.parametrize(
    "tokenizer", ["", None, [], ["bytes"], {}, 3, ".", "..", "../ours", "a" * 300, "a\0b"]
)
def test_a_tokenizer_that_is_not_there_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    """A tokenizer entry that names no tokenizer, or the folder itself, raises a UserError."""
    save_model(build_model("lstm"), tmp_path / "ours")
    path = tmp_path / "ours" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer": tokenizer}))
    with pytest.raises(UserError, match="tokenizer"):
        load_tokenizer(tmp_path / "ours")


@pytest.mark.parametrize("multiple", ["x", 0, -8, True, 1.5, [8], None])
def test_an_invalid_padding_multiple_is_ignored(multiple: Any, tmp_path: Path) -> None:
    with_bytes(causal("llama", vocab_size=256), tmp_path / "llama")
    set_config(tmp_path / "llama", pad_vocab_size_multiple=multiple)
    assert load_tokenizer(tmp_path / "llama").vocab_size == 256


def index(content: Any, name: str = "pytorch_model.bin") -> Damage:
    def apply(folder: Path) -> None:
        for path in (*folder.glob("*.bin"), *folder.glob("*.safetensors")):
            path.rename(folder / f"part-1{path.suffix}")
        (folder / f"{name}.index.json").write_text(json.dumps(content))

    return apply


SELF = "pytorch_model.bin.index.json"
INDICES: dict[str, Damage] = {
    "no map": index({"weight_map": None}),
    "a list of files": index({"weight_map": ["part-1.bin"]}),
    "a map to itself": index({"weight_map": {"a": SELF}}),
    "a map to numbers": index({"weight_map": {"a": 3}}),
    "a map to lists": index({"weight_map": {"a": ["part-1.bin"]}}),
    "a map outside": index({"weight_map": {"a": "../part-1.bin"}}),
    "a map to a folder": index({"weight_map": {"a": ".."}}),
    "a map to an absolute path": index({"weight_map": {"a": "/etc/passwd"}}),
    "a map to config.json": index({"weight_map": {"a": "config.json"}}),
    "a map to a missing file": index({"weight_map": {"a": "part-2.bin"}}),
    "safetensors to themselves": index(
        {"weight_map": {"a": "model.safetensors.index.json"}}, "model.safetensors"
    ),
}


@pytest.mark.parametrize("damage", INDICES)
def test_an_index_that_is_not_one_is_refused(damage: str, tmp_path: Path) -> None:
    native(tmp_path / "native")
    INDICES[damage](tmp_path / "native")
    assert_refused(tmp_path / "native")


def test_an_index_of_files_beside_it_is_read(tmp_path: Path) -> None:
    native(tmp_path / "native")
    index({"weight_map": {"a": "part-1.bin", "b": "part-1.bin"}})(tmp_path / "native")
    load(tmp_path / "native")


def pickled(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def apply(folder: Path) -> None:
        path = folder / "pytorch_model.bin"
        torch.save(change(torch.load(path)), path)

    return apply


NORM = "backbone.norm_f.weight"
PICKLES: dict[str, tuple[Damage, str]] = {
    "empty": (lambda f: (f / "pytorch_model.bin").write_bytes(b""), "truncated or damaged"),
    "one byte": (lambda f: (f / "pytorch_model.bin").write_bytes(b"\x80"), "[a-z]"),
    "text": (lambda f: (f / "pytorch_model.bin").write_text("weights"), "[a-z]"),
    "sparse": (pickled(lambda w: {**w, NORM: w[NORM].to_sparse()}), "sparse"),
    "compressed rows": (
        pickled(lambda w: {**w, "backbone.embedding.weight": torch.eye(24, 8).to_sparse_csr()}),
        "sparse",
    ),
    "quantized": (
        pickled(lambda w: {**w, NORM: torch.quantize_per_tensor(w[NORM], 0.1, 0, torch.qint8)}),
        "[a-z]",
    ),
    "expanded": (pickled(lambda w: {**w, NORM: torch.ones(1).expand(2**40)}), "expanded"),
    "numbers": (pickled(lambda w: {**w, NORM: 3}), "something other than named tensors"),
    "lists": (pickled(lambda w: {**w, NORM: w[NORM].tolist()}), "something other"),
    "no names": (pickled(lambda w: {0: w[NORM]}), "something other"),
    "a tensor": (pickled(lambda w: w[NORM]), "something other"),
    "nothing": (pickled(lambda w: {}), "[a-z]"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("damage", PICKLES)
def test_a_pickle_of_other_things_is_refused(damage: str, tmp_path: Path) -> None:
    native(tmp_path / "native")
    apply, message = PICKLES[damage]
    apply(tmp_path / "native")
    assert_refused(tmp_path / "native", message)


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64],
)
@pytest.mark.parametrize("which", ["one", "all"])
def test_weights_of_a_dtype_that_is_not_real_are_refused(
    dtype: torch.dtype, which: str, tmp_path: Path
) -> None:
    save_model(build_model("mamba2", dtype=torch.float32), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in ["norm.weight"] if which == "one" else list(tensors):
        tensors[name] = tensors[name].to(dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    assert_refused(tmp_path, "bfloat16")


@pytest.mark.parametrize("kind", sorted(MIXERS))
@pytest.mark.parametrize("position", ["none", "random"])
def test_weights_of_several_dtypes_are_refused_or_run(
    kind: str, position: str, tmp_path: Path
) -> None:
    """A model with one weight of another dtype is refused when it is loaded, or computes."""
    saved = build_model(kind, position, dtype=torch.bfloat16)
    save_model(saved, tmp_path)
    path, refused = tmp_path / "model.safetensors", set()
    tensors = load_file(path)
    for narrow, wide in itertools.permutations((torch.float32, torch.bfloat16)):
        for name in tensors:
            mixed = {n: t.to(wide if n == name else narrow) for n, t in tensors.items()}
            save_file(mixed, path, metadata={"format": "pt"})
            (tmp_path / "checksums.json").unlink(missing_ok=True)
            try:
                model = load(tmp_path)
            except UserError:
                refused.add(name)
                continue
            state = model(random_tokens(2, 70)).state
            assert model(random_tokens(2, 1), state).logits.isfinite().all()
    assert "embedding.weight" in refused
    assert "norm.weight" not in refused


def test_time_scales_in_float32_load_beside_float16_matrices(tmp_path: Path) -> None:
    saved = native(tmp_path / "native", torch.float16)
    path = tmp_path / "native" / "pytorch_model.bin"
    rates = ("A_log", "dt_bias", ".D")
    weights = torch.load(path)
    torch.save({n: t.float() if n.endswith(rates) else t for n, t in weights.items()}, path)
    model = load_recurrent(tmp_path / "native")
    assert model.get_parameter("blocks.0.mixer.A_log").dtype == torch.float32
    assert model.get_parameter("blocks.0.mixer.in_proj.weight").dtype == torch.float16
    logits, state = model(random_tokens(2, 70))
    expected = saved(random_tokens(2, 70)).logits
    torch.testing.assert_close(logits, expected, rtol=1e-2, atol=1e-2)
    assert model(random_tokens(2, 1), state).logits.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_a_model_is_not_computed_in_a_dtype_that_is_not_real(
    dtype: torch.dtype, layout: Path
) -> None:
    with pytest.raises(UserError):
        load(layout, dtype=dtype)


def test_a_model_is_built_on_the_meta_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading allocates the weights once: the model is built without memory."""
    save_model(build_model("lstm", dtype=torch.float32), tmp_path)
    devices = []
    from longrnn.models import checkpoint

    build = checkpoint.RecurrentLM

    def watch(config: Any) -> Any:
        model = build(config)
        devices.append({weight.device.type for weight in model.parameters()})
        return model

    monkeypatch.setattr(checkpoint, "RecurrentLM", watch)
    model = load(tmp_path)
    assert devices == [{"meta"}]
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}
    assert all(weight.requires_grad for weight in model.parameters())


@pytest.mark.parametrize(
    "name",
    ["org/a--b", "org/model.git", "org/" + "a" * 100, "org/a..b", "org/model.", "org/-a"],
)
def test_a_name_that_the_hub_refuses_is_refused(name: str) -> None:
    """A name that is not valid on the Hub raises a UserError without network access."""
    with pytest.raises(UserError) as error:
        resolve(name)
    assert "\n" not in str(error.value)
    assert name in str(error.value)


@pytest.mark.parametrize("name", ["a" * 5000, "a/" + "b" * 5000, "a\0b", "\udcff"])
def test_a_name_that_no_file_can_have_is_refused(name: str) -> None:
    for find in (load, load_tokenizer):
        with pytest.raises(UserError):
            find(name)


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", "null", '{"model": {}}', "\udcff", '{"version": "1.0"}', "[" * 100_000],
)
def test_a_tokenizer_file_that_is_not_one_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    for source in (path, tmp_path):
        with pytest.raises(UserError) as error:
            load_tokenizer(source)
        assert "\n" not in str(error.value)
    byte_level().save(tmp_path)
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError):
        load_tokenizer(tmp_path)

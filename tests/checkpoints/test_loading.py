"""Loading by name or folder: saved models come back bit for bit, damaged ones are refused."""

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longrnn import load, load_tokenizer
from longrnn import state as states
from longrnn.cells import MIXERS
from longrnn.checkpoints.layouts import save_model
from longrnn.checkpoints.load import load_editable
from longrnn.checkpoints.names import DTYPE_NAMES, embedded, split_spec
from longrnn.checkpoints.opened import open_checkpoint
from longrnn.checksums import remove_checksums
from longrnn.errors import UserError
from longrnn.mitigations import mitigation
from longrnn.mitigations.base import Calibration
from longrnn.mitigations.spec import write_calibration
from longrnn.models import LanguageModel, RecurrentLM
from tests.contracts.builders import build_model, random_tokens
from tests.hf.foreign import architecture, causal, with_bytes


def logits(model: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        return model(random_tokens(2, 9)).logits


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save_model(build_model("mamba2", dtype=torch.float32), folder)
    return folder


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", sorted(MIXERS))
def test_a_model_comes_back_bit_for_bit(kind: str, tie: bool, tmp_path: Path) -> None:
    for block, position in itertools.product(("residual", "plain"), ("learned", "random")):
        parts = {"block": block, "dtype": torch.float32, "tie_embeddings": tie}
        model = build_model(kind, position, **parts).eval()
        save_model(model, tmp_path / block)
        torch.manual_seed(99)  # tables are not drawn again
        again = load(tmp_path / block)
        assert isinstance(again, RecurrentLM)
        assert torch.equal(logits(again), logits(model))
        assert again.config == model.config
        assert again.fingerprint() == model.fingerprint()
        assert not again.training
        assert (again.head.weight is again.embedding.weight) == tie
        stored = load_file(tmp_path / block / "model.safetensors")
        assert ("head.weight" in stored) != tie


def test_a_loaded_model_does_not_change_with_its_file(saved: Path) -> None:
    """Which may be mapped into memory while it is read."""
    model, path = load(saved), saved / "model.safetensors"
    before = logits(model)
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(logits(model), before)


def test_the_backend_is_chosen_and_is_not_part_of_the_model(saved: Path, tmp_path: Path) -> None:
    fast, slow = load(saved), load(saved, backend="torch")
    assert "backend=torch" in repr(slow)
    assert "backend=auto" in repr(fast)
    torch.testing.assert_close(logits(slow), logits(fast), atol=1e-5, rtol=1e-5)
    assert slow.fingerprint() == fast.fingerprint()
    state = fast(random_tokens(2, 5)).state
    states.save(state, tmp_path / "state.safetensors", model=fast)
    assert states.load(tmp_path / "state.safetensors", slow).position.tolist() == [5, 5]
    with pytest.raises(UserError, match="torch"):
        load(saved, backend="troch")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "clip"}, "clip"),
        ({"model_type": None}, "model type"),
        ({"format": 1}, "format 1"),
        ({"d_model": "x"}, "d_model"),
        ({"mixer": {"kind": "lstn"}}, "did you mean 'lstm'"),
        ({"mitigation": 5}, "unknown mitigation '5'"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    change: dict[str, Any], message: str, saved: Path
) -> None:
    path = saved / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    remove_checksums(saved)
    with pytest.raises(UserError, match=message) as error:
        load(saved)
    assert "\n" not in str(error.value)
    assert str(saved) in str(error.value)


def test_unused_weights_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with_bytes(causal("llama", vocab_size=256), tmp_path / "llama")
    load(tmp_path / "llama")
    assert caplog.text == ""
    path = tmp_path / "llama/model.safetensors"
    tensors = {**load_file(path), "model.extra.weight": torch.zeros(1)}
    save_file(tensors, path, metadata={"format": "pt"})
    load(tmp_path / "llama")
    assert "model.extra.weight" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "before",
    ["", "from transformers import Qwen3NextForCausalLM", "sys.modules['fla'] = None"],
    ids=["first", "imported before", "hidden"],
)
def test_a_gated_deltanet_runs_on_a_cpu_beside_flash_linear_attention(
    before: str, tmp_path: Path
) -> None:
    """In a new process, whatever it imported; transformers would call the package's kernels."""
    pytest.importorskip("fla")
    with_bytes(architecture("qwen3_next", vocab_size=256), tmp_path / "model")
    code = f"""
import sys, longrnn
{before}
known = sys.modules.get("fla", 0)
print(type(longrnn.load(sys.argv[1])).__name__, sys.modules.get("fla", 0) is known)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "HybridLM True\n", done.stderr


SPEC = "sliding_window(window=50)"


def test_load_understands_a_mitigation() -> None:
    model = load(f"passkey-tiny+{SPEC}")
    assert model.mitigation is not None
    expected = load_editable("passkey-tiny").under(mitigation(SPEC))
    assert model.fingerprint() == expected.fingerprint()
    assert load_tokenizer(f"passkey-tiny+{SPEC}").fingerprint() == "bytes"
    with pytest.raises(UserError, match=r"give passkey-tiny\+none"):
        load_editable(f"passkey-tiny+{SPEC}")
    with pytest.raises(UserError, match="sliding_window"):
        load("passkey-tiny+sliding_windw")


def test_the_folder_of_a_file_is_named() -> None:
    folder = embedded()["passkey-tiny"]
    with pytest.raises(UserError, match=f"is a file.*: give {folder}"):
        load(folder / "model.safetensors")


def test_a_path_with_a_plus_that_exists_wins(tmp_path: Path) -> None:
    both = tmp_path / "a+forget_more"
    shutil.copytree(embedded()["passkey-tiny"], both)
    shutil.copytree(embedded()["passkey-tiny"], tmp_path / "a")
    assert load(both).mitigation is None
    assert load_tokenizer(both).fingerprint() == "bytes"
    assert split_spec(f"{both}+{SPEC}") == (str(both), SPEC)
    assert load(f"{both}+{SPEC}").mitigation is not None
    assert load(f"{tmp_path / 'a'}+{SPEC}").mitigation is not None
    calibrated = tmp_path / "b+c.yaml"
    known = Calibration("", load("passkey-tiny").fingerprint(), 256, ())
    write_calibration(calibrated, [{"kind": "forget_more", "decay_scale": 0.5}], known)
    opened = open_checkpoint(f"passkey-tiny+{calibrated}", SPEC)
    assert opened.model.mitigation is not None
    assert len(opened.model.mitigation.parts) == 2
    assert opened.mitigation == f"{calibrated}+{SPEC}"


@pytest.mark.parametrize("name", sorted(DTYPE_NAMES))
def test_a_dtype_may_follow_a_checkpoint(name: str) -> None:
    source, dtype = f"passkey-tiny+{name}", DTYPE_NAMES[name]
    models: list[Any] = [load(source), load(f"{source}+{SPEC}"), load(source, dtype=dtype)]
    models += [load("passkey-tiny", dtype=name)]
    models.append(open_checkpoint(source, SPEC).model)
    for model in models:
        assert next(model.parameters()).dtype == dtype
    opened = open_checkpoint(f"{source}+{SPEC}")
    assert (opened.checkpoint, opened.mitigation) == ("passkey-tiny", SPEC)
    other = "float64" if name == "float32" else "float32"
    with pytest.raises(UserError, match="dtype"):
        load(source, dtype=DTYPE_NAMES[other])
    for other_dtype in (torch.int8, torch.complex64, "int8", "half"):
        with pytest.raises(UserError, match="one of float16"):
            load("passkey-tiny", dtype=other_dtype)
    for rest in ("float16", ""):
        with pytest.raises(UserError, match=f"'{rest}'"):
            load(f"{source}+{rest}")

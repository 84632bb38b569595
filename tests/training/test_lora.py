"""Adapters: trained, resumed, read by PEFT, and merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn import load
from longrnn.cells.mamba2 import Mamba2
from longrnn.errors import UserError
from longrnn.hf.load import load_recurrent
from longrnn.hf.tokenizer import load_tokenizer
from longrnn.training.trainer import Trainer
from tests.cli.conftest import CLI, cli  # noqa: F401
from tests.refusals import naming
from tests.training.forks import pair
from tests.training.runs import assert_equal, crash, metrics, tiny, train, write_config

pytest.importorskip("peft", reason="peft is not installed")
PEFT = {"r": 2, "alpha": 4, "full": ["A_log", "dt_bias", "conv1d"], "merge": True}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "run"
    train(tiny("streams", folder, max_steps=1, save_steps=1))
    return folder


def adapted(folder: Path, base: Path, **changes: Any) -> Any:
    return tiny("streams", folder, init_from=str(base), peft=PEFT, **changes)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(90)[None]).logits


def test_peft_and_load_read_the_adapter(base: Path, tmp_path: Path) -> None:
    """PEFT, `load` and the merged checkpoint compute what the trained model does."""
    from peft import PeftModel
    from safetensors.torch import load_file

    trainer = train(adapted(tmp_path / "run", base))
    wanted = logits(trainer.model.eval())
    assert not torch.allclose(wanted, logits(load(base)), atol=1e-4), "it has learned something"
    read: Any = PeftModel.from_pretrained(load_recurrent(base), tmp_path / "run")  # type: ignore[arg-type]
    torch.testing.assert_close(logits(read), wanted, rtol=0, atol=1e-5)
    for name in ("run", "run/merged", "run/checkpoint-00000010"):
        torch.testing.assert_close(logits(load(tmp_path / name)), wanted, rtol=0, atol=1e-5)
    assert load_tokenizer(tmp_path / "run").fingerprint() == "bytes"
    names = load_file(tmp_path / "run/adapter_model.safetensors")
    kinds = {name.split(".mixer.")[1] for name in names}
    assert kinds == {
        *(f"{m}.lora_{f}.weight" for m in ("in_proj", "out_proj") for f in "AB"),
        *("A_log", "dt_bias", "conv1d.weight", "conv1d.bias"),
    }
    saved = torch.load(tmp_path / "run/checkpoint-00000010/training.pt", weights_only=True)
    assert len(saved["optimizer"]["state"]) == len(names)
    assert not (tmp_path / "run/checkpoint-00000010/model.safetensors").exists()
    config = json.loads((tmp_path / "run/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base.resolve())


def test_an_auto_class_applies_the_mitigation_of_an_adapter(base: Path, tmp_path: Path) -> None:
    """The merged model can be saved; the adapter cannot, because parts of it would be lost."""
    from transformers import AutoModelForCausalLM

    from longrnn.hf.auto import LongRNNForCausalLM

    spec = "sliding_window(window=8)"
    train(adapted(tmp_path / "run", base, mitigation=spec))
    wanted = logits(load(tmp_path / "run"))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert model.config.mitigation == spec
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=1e-5)
    same = type(model).from_pretrained(tmp_path / "run")
    torch.testing.assert_close(logits(same), wanted, rtol=0, atol=1e-5)
    with pytest.raises(UserError):
        model.save_pretrained(tmp_path / "again")
    merged = LongRNNForCausalLM.of(load(tmp_path / "run"))  # type: ignore[arg-type]
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(again), wanted, rtol=0, atol=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert plain.config.mitigation is None


def test_a_resumed_adapter_is_the_undisturbed_one(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run ends with the adapter of an undisturbed one, bit for bit."""
    straight, broken = (adapted(tmp_path / name, base) for name in ("a", "b"))
    train(straight)
    crash(broken, 6, monkeypatch)
    train(broken, resume=True)
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("a", "b")]
    assert files[0].read_bytes() == files[1].read_bytes()
    states = [tmp_path / name / "checkpoint-00000010/training.pt" for name in ("a", "b")]
    assert_equal(*(torch.load(path, weights_only=True) for path in states))
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


@pytest.mark.parametrize("environment", [{}, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}])
def test_two_processes_train_the_adapter_of_one(
    environment: dict[str, str], base: Path, tmp_path: Path
) -> None:
    """Two processes, with copies or shards, train the adapter that one process does."""
    changes = {"max_steps": 3, "logging_steps": 1}
    train(adapted(tmp_path / "one", base, per_device_train_batch_size=4, **changes))
    two = adapted(tmp_path / "two", base, num_processes=2, **changes)
    path = write_config(two, tmp_path / "config.yaml")
    both = pair("train", path, "--quiet", folder=tmp_path / "log", **environment)
    assert [process.end() for process in both] == [0, 0], both[0].err + both[1].err
    for one, other in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
    torch.testing.assert_close(
        logits(load(tmp_path / "one")), logits(load(tmp_path / "two")), atol=1e-3, rtol=1e-3
    )


def test_an_adapter_that_is_bypassed_is_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell that multiplies with a weight, and does not call the module, is noticed."""
    run = Mamba2.run

    def bypass(self: Mamba2, *arguments: Any) -> Any:
        modules = self._modules
        adapted = modules["out_proj"]
        modules["out_proj"] = adapted.base_layer  # type: ignore[union-attr, assignment]
        try:
            return run(self, *arguments)
        finally:
            modules["out_proj"] = adapted

    monkeypatch.setattr(Mamba2, "run", bypass)
    with pytest.raises(UserError, match=naming("2 of 12", "out_proj")):
        train(adapted(tmp_path / "run", base))


def test_an_adapter_is_merged_on_request(cli: CLI, base: Path, tmp_path: Path) -> None:  # noqa: F811
    """`longrnn convert --merge` writes the whole model; without --merge it says so."""
    train(adapted(tmp_path / "run", base, max_steps=2))
    refused = cli("convert", "run", "hf", "--to", "hf")
    assert (refused.code, "--merge" in refused.err) == (2, True)
    done = cli("convert", "run", "hf", "--to", "hf", "--merge")
    assert done.code == 0, done.err
    torch.testing.assert_close(logits(load(tmp_path / "hf")), logits(load(tmp_path / "run")))
    assert cli("convert", str(base), "other", "--to", "hf", "--merge").code == 2


def test_an_adapter_of_other_weights_is_refused(base: Path, tmp_path: Path) -> None:
    """An adapter is loaded onto the weights it was trained on only."""
    train(adapted(tmp_path / "run", base, max_steps=1))
    train(tiny("streams", tmp_path / "other", max_steps=1, seed=5))
    path = tmp_path / "run/adapter_config.json"
    (tmp_path / "run/checksums.json").unlink()
    path.write_text(path.read_text().replace(str(base.resolve()), str(tmp_path / "other")))
    with pytest.raises(UserError):
        load(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft": {"targets": ["in_porj"]}}, "in_porj"),
        ({"peft": {"full": ["A_lag"]}}, "A_lag"),
        ({"peft": {"r": 0}}, "peft.r"),
        ({"peft": {"rank": 2}}, "peft.rank"),
        ({"freeze": ["*.D"]}, "freeze"),
    ],
)
def test_what_cannot_be_adapted_is_refused(
    changes: dict[str, Any], message: str, base: Path, tmp_path: Path
) -> None:
    """Names that match nothing, and keys that contradict peft, are refused."""
    with pytest.raises(UserError, match=message):
        values = {"init_from": str(base), "peft": PEFT, **changes}
        Trainer(tiny("streams", tmp_path / "run", **values), quiet=True)
    assert not (tmp_path / "run").exists()

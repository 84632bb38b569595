"""LoRA adapters through PEFT: added to a model, saved as PEFT saves them, and merged.

Notable choices:
- Adapters replace the projections as modules, which the cells call as modules: no kernel can
  bypass them.
- Parameters that are trained as a whole stand in the adapter's file under their own names, where
  PEFT loads them into the base model.
- An adapter belongs to the weights it was trained on: `adapter.json` has their fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor, nn

from longrnn.checksums import remove_checksums, write_checksums
from longrnn.errors import UserError, nearest
from longrnn.files import read_json, write_atomic
from longrnn.hf.names import ADAPTER, ADAPTER_RECORD, ADAPTER_WEIGHTS, base_of
from longrnn.models.recurrent import RecurrentLM

# What PEFT puts in front of the names of parameters, and into those of adapters.
PREFIX, NAME = "base_model.model.", ".default."


def add_adapters(
    model: nn.Module, *, r: int, alpha: float, targets: Sequence[str], full: Sequence[str]
) -> None:
    """Adds adapters to a model, whose other parameters are frozen.

    Args:
        model: changed in place.
        r: rank of the adapters.
        alpha: they are scaled by alpha / r.
        targets: last names of linear modules, such as `in_proj`.
        full: last names of parameters, or of modules, that are trained as a whole.

    Raises:
        UserError: PEFT is not installed, or a name matches nothing.
    """
    _require_peft()
    from peft import LoraConfig, inject_adapter_in_model

    linear = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    known = {part for n, _ in model.named_parameters() for part in n.split(".")}
    for option, names, found in (("targets", targets, linear), ("full", full, known)):
        for name in names:
            if name not in found:
                raise UserError(f"peft.{option}: unknown name {name!r}: {nearest(name, found)}")
    options = LoraConfig(r=r, lora_alpha=alpha, target_modules=list(targets))  # type: ignore[arg-type]
    inject_adapter_in_model(options, model)
    for name, parameter in model.named_parameters():
        if set(name.split(".")) & set(full):
            parameter.requires_grad_(True)


def has_adapters(model: nn.Module) -> bool:
    """Whether `add_adapters` has changed the model."""
    return hasattr(model, "peft_config")


def read_weights(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """What `save_adapter` wrote, under the names of the model's state dict.

    Raises:
        UserError: it is the adapter of another base than the model's.
    """
    _check_base(folder, str(model.base_fingerprint))
    ours = {_saved_name(name): name for name, _ in model.named_parameters()}
    return {ours[name]: tensor for name, tensor in load_file(folder / ADAPTER_WEIGHTS).items()}


def save_adapter(
    model: nn.Module,
    folder: Path,
    weights: Mapping[str, Tensor],
    *,
    base: str,
    base_fingerprint: str,
    mitigation: str | None,
) -> None:
    """Writes an adapter as PEFT writes it.

    Args:
        model: with adapters.
        folder: created if it does not exist.
        weights: the whole state dict of the model.
        base: name or path of the base model.
        base_fingerprint: of its weights in float32.
        mitigation: under which the adapter was trained.
    """
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    tensors = {_saved_name(name): weights[name].contiguous() for name in weights if name in trained}
    local = Path(base)
    config = getattr(model, "peft_config")["default"].to_dict() | {  # noqa: B009
        "base_model_name_or_path": str(local.resolve()) if local.is_dir() else base,
        "inference_mode": True,
    }
    record = {"fingerprint": base_fingerprint, "mitigation": mitigation}
    remove_checksums(folder)
    write_atomic(folder / ADAPTER_WEIGHTS, save(tensors, metadata={"format": "pt"}))
    write_atomic(folder / ADAPTER, json.dumps(config, indent=2, default=sorted) + "\n")  # of sets
    write_atomic(folder / ADAPTER_RECORD, json.dumps(record, indent=2) + "\n")
    write_checksums(folder)


def _saved_name(name: str) -> str:
    """The name in an adapter's file of a parameter of a model with adapters."""
    return PREFIX + name.replace(NAME, ".")


def merged(folder: Path, base: RecurrentLM) -> RecurrentLM:
    """The base model with an adapter merged into its weights.

    Args:
        folder: of the adapter, which may have been trained on the `RecurrentLM` itself, or on the
            `LongRNNForCausalLM` that holds it.
        base: in float32; changed in place.

    Raises:
        UserError: PEFT is not installed, or the adapter is of other weights.
        Exception: of PEFT, torch and safetensors, for a damaged one.
    """
    _require_peft()
    known = _check_base(folder, base.fingerprint())
    _merge(folder, base)
    base.trained_under = known.get("mitigation", base.trained_under)
    return base.eval().requires_grad_()


def _check_base(folder: Path, fingerprint: str) -> dict[str, Any]:
    """What is recorded about an adapter, which must be one of the weights of a fingerprint."""
    record = folder / ADAPTER_RECORD
    known = read_json(record) if record.is_file() else {}
    if known.get("fingerprint") not in (None, fingerprint):
        raise UserError(
            f"{folder} is an adapter of other weights than those of {base_of(folder)}: put back "
            "the checkpoint that it was trained on"
        )
    return known


def _merge(folder: Path, base: RecurrentLM) -> None:
    """Merges an adapter.

    Raises:
        KeyError: a weight is missing or unexpected, of which PEFT itself would only warn.
    """
    from peft import PeftConfig, PeftModel, set_peft_model_state_dict

    config: Any = PeftConfig.from_pretrained(str(folder))
    if config.is_prompt_learning:
        raise ValueError("a learned prompt changes no weights")
    weights = load_file(folder / ADAPTER_WEIGHTS)
    holder: Any = base
    if all(name.startswith(f"{PREFIX}model.") for name in weights):
        from longrnn.hf.auto import LongRNNForCausalLM

        holder = LongRNNForCausalLM.of(base)
    config.task_type = None  # the classes of tasks need a model that generates
    model: Any = PeftModel(holder, config)
    found = set_peft_model_state_dict(model, weights)
    wrong = [*found.unexpected_keys, *(name for name in found.missing_keys if NAME in name)]
    if wrong:
        raise KeyError(wrong[0])
    for layer in model.modules():
        if "base_layer" in layer._modules:
            # A merge changes a weight in place, and a tied one is that of another module too.
            own = layer.base_layer
            own.weight = nn.Parameter(own.weight.detach().clone())
    model.merge_and_unload()
    # If one of the two was adapted, or each trained as a whole, they differ from now on.
    base.config.tie_embeddings = base.head.weight is base.embedding.weight


def _require_peft() -> None:
    if find_spec("peft") is None:
        raise UserError("adapters need PEFT, which is not installed: pip install peft")

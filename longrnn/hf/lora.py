"""LoRA adapters through PEFT: added to a model, saved as PEFT saves them, and merged.

Notable choices:
- Adapters replace the projections as modules, which the cells call as modules: no kernel can
  bypass them. `without_gradient` finds targets that took no part in a step all the same.
- Parameters that are trained as a whole stand in the adapter's file under their own names, where
  PEFT loads them into the base model.
- An adapter belongs to the weights it was trained on: `adapter.json` has their fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from longrnn.checksums import remove_checksums, write_checksums
from longrnn.errors import UserError, nearest
from longrnn.files import read_json, write_atomic
from longrnn.hf.names import ADAPTER as CONFIG
from longrnn.hf.names import ADAPTER_RECORD as BASE
from longrnn.hf.names import ADAPTER_WEIGHTS as WEIGHTS
from longrnn.hf.names import base_of
from longrnn.models.recurrent import RecurrentLM

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
    if both := set(targets) & set(full):
        raise UserError(f"peft.full and peft.targets both name {min(both)}: leave one of them out")
    options = LoraConfig(r=r, lora_alpha=alpha, target_modules=list(targets))  # type: ignore[arg-type]
    inject_adapter_in_model(options, model)
    for name, parameter in model.named_parameters():
        if set(name.split(".")) & set(full):
            parameter.requires_grad_(True)


def describe(model: nn.Module) -> dict[str, Any] | None:
    """The arguments of `add_adapters` for a model that has adapters; None for another one."""
    found = getattr(model, "peft_config", None)
    if found is None:
        return None
    config = found["default"]
    whole = [n for n, p in model.named_parameters() if p.requires_grad and NAME not in n]
    return {
        "r": config.r,
        "alpha": config.lora_alpha,
        "targets": sorted(config.target_modules),
        "full": sorted({_last(name) for name in whole}),
    }


def _last(name: str) -> str:
    """The last name of a parameter, or of the module whose weight or bias it is."""
    *path, last = name.split(".")
    return path[-1] if last in ("weight", "bias") else last


def without_gradient(model: nn.Module) -> dict[str, Tensor]:
    """For each trained parameter that a first step must reach, 1 if its gradient is not zero.

    The factor A of an adapter has a zero gradient in the first step, because B is zero there.
    """
    flags = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or ".lora_A." in name:
            continue
        gradient = parameter.grad
        local = gradient if gradient is None else getattr(gradient, "_local_tensor", gradient)
        flags[name] = torch.tensor(0.0 if local is None else float(bool((local != 0).any())))
    return flags


def check_reached(names: Sequence[str], reached: Sequence[float]) -> None:
    """Raises UserError for parameters whose gradient was zero in every process.

    Args:
        names: of the trained parameters.
        reached: the sum of `without_gradient` over processes, for each name.
    """
    missed = [name for name, count in zip(names, reached, strict=True) if count == 0]
    if missed:
        raise UserError(
            f"peft: {len(missed)} of {len(names)} trained parameters got no gradient in the first "
            f"step (the first is {missed[0]}), so the model computes without them: name other "
            "modules in peft.targets and peft.full"
        )


def trained_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a state dict that are trained, under the names that PEFT gives them."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return {PREFIX + n.replace(NAME, "."): weights[n].contiguous() for n in weights if n in trained}


def read_weights(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """What `save_adapter` wrote, under the names of the model's state dict."""
    from safetensors.torch import load_file

    ours = {PREFIX + name.replace(NAME, "."): name for name, p in model.named_parameters()}
    return {ours[name]: tensor for name, tensor in load_file(folder / WEIGHTS).items()}


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
    from safetensors.torch import save

    config = getattr(model, "peft_config")["default"]  # noqa: B009
    local = Path(base)
    options = config.to_dict() | {
        "base_model_name_or_path": str(local.resolve()) if local.is_dir() else base,
        "inference_mode": True,
    }
    known = {"fingerprint": base_fingerprint, "mitigation": mitigation}
    remove_checksums(folder)
    write_atomic(folder / WEIGHTS, save(trained_weights(model, weights), metadata={"format": "pt"}))
    write_atomic(folder / CONFIG, json.dumps(options, indent=2, default=_plain) + "\n")
    write_atomic(folder / BASE, json.dumps(known, indent=2) + "\n")
    write_checksums(folder)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


def merged(folder: Path, base: RecurrentLM) -> RecurrentLM:
    """The base model with an adapter merged into its weights.

    Args:
        folder: of the adapter, which may have been trained on the `RecurrentLM` itself, or on the
            `LongRNNForCausalLM` that holds it.
        base: in float32; changed in place.

    Raises:
        UserError: PEFT is not installed, or the adapter is damaged or of another model.
    """
    _require_peft()
    known = read_json(folder / BASE) if (folder / BASE).is_file() else {}
    if known.get("fingerprint") not in (None, base.fingerprint()):
        raise UserError(
            f"{folder} is an adapter of other weights than those of {base_of(folder)}: put back "
            "the checkpoint that it was trained on"
        )
    if not (folder / WEIGHTS).is_file():
        raise UserError(
            f"{folder} is incomplete (it has no {WEIGHTS}): copy it again, or save the adapter "
            "with safe_serialization=True"
        )
    try:
        _merge(folder, base)
    except UserError:
        raise
    except Exception as error:  # PEFT, torch and safetensors raise many types
        raise UserError(
            f"the adapter in {folder} does not fit its base model ({shorten(str(error), 240)}): "
            "give the checkpoint that it was trained on, or merge it with PEFT and save the model"
        ) from error
    base.trained_under = known.get("mitigation", base.trained_under)
    return base.eval().requires_grad_()


def _merge(folder: Path, base: RecurrentLM) -> None:
    """Merges an adapter.

    Raises:
        KeyError: a weight is missing or unexpected, of which PEFT itself would only warn.
    """
    from peft import PeftConfig, PeftModel, set_peft_model_state_dict
    from safetensors.torch import load_file

    weights = load_file(folder / WEIGHTS)
    tied = base.config.tie_embeddings
    if tied and any(".lora_" in n and {"head", "embedding"} & set(n.split(".")) for n in weights):
        # One of the two is adapted, so after the merge they differ.
        base.head.weight = nn.Parameter(base.head.weight.detach().clone())
        base.config.tie_embeddings = False
    holder: Any = base
    if all(name.startswith(f"{PREFIX}model.") for name in weights):
        from longrnn.hf.auto import LongRNNForCausalLM

        holder = LongRNNForCausalLM.of(base)
    config: Any = PeftConfig.from_pretrained(str(folder))
    if config.is_prompt_learning:
        raise UserError(
            f"{folder} is a {config.peft_type.value} adapter, which changes no weights: load it "
            "with PeftModel.from_pretrained, onto the base model of AutoModelForCausalLM"
        )
    config.task_type = None  # the classes of tasks need a model that generates
    model: Any = PeftModel(holder, config)
    found = set_peft_model_state_dict(model, weights)
    wrong = [*found.unexpected_keys, *(name for name in found.missing_keys if NAME in name)]
    if wrong:
        raise KeyError(wrong[0])
    model.merge_and_unload()


def _require_peft() -> None:
    if find_spec("peft") is None:
        raise UserError("adapters need PEFT, which is not installed: pip install peft")

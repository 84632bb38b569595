"""LoRA adapters through PEFT: added to a model, saved as PEFT saves them, and merged.

Notable choices:
- Adapters replace the projections as modules, which the cells call as modules: no kernel can
  bypass them.
- Parameters that are trained as a whole are in the adapter's file under their own names, where
  PEFT loads them into the base model.
- An adapter belongs to the weights it was trained on: `adapter.json` has their fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save
from torch import Tensor, nn

from longrnn.checkpoints.folder import build_model
from longrnn.checkpoints.layouts import LAYOUTS, as_hugging_face
from longrnn.checkpoints.names import (
    ADAPTER,
    ADAPTER_RECORD,
    ADAPTER_WEIGHTS,
    INITIAL_STATE,
    base_of,
)
from longrnn.checksums import remove_checksums, write_checksums
from longrnn.errors import UserError, nearest, require
from longrnn.files import read_json, regular, write_atomic
from longrnn.models.recurrent import RecurrentLM
from longrnn.models.trainable import TrainableLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from longrnn.hf.foreign import ForeignLM

# What PEFT puts in front of the names of parameters, and into those of adapters.
PREFIX, ADAPTER_INFIX = "base_model.model.", ".default."
# How the names of an adapter of a `Mamba2ForCausalLM` begin.
OF_TRANSFORMERS = (f"{PREFIX}backbone.", f"{PREFIX}lm_head.")


class ModulesAlone(nn.Module):
    """Has the modules of a model, under the same names, and no configuration.

    By their configuration, PEFT refuses adapters of `out_proj` in models whose kernels in
    transformers read that weight without calling it; longrnn calls it.

    Args:
        model: a model; a Hugging Face model stands for the `ForeignLM` that holds it.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        is_held = not isinstance(model, RecurrentLM) and hasattr(model, "cells")
        self._source: Any = (model.model if is_held else model,)  # not as a submodule
        self._modules = self._source[0]._modules

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, of which PEFT may train some rows."""
        source = self._source[0]
        ours = getattr(source, "model", source)
        return ours.embedding if isinstance(ours, RecurrentLM) else source.get_input_embeddings()

    def tell_ties(self) -> None:
        """Makes PEFT merge what was trained of the embedding into a tied head too."""
        source = self._source[0]
        ours = getattr(source, "model", source)
        if isinstance(ours, RecurrentLM):
            prefix = "" if ours is source else "model."
            head, tied = ours.head, {f"{prefix}head.weight": f"{prefix}embedding.weight"}
        else:
            head, tied = source.get_output_embeddings(), source._tied_weights_keys
        if head.weight is self.get_input_embeddings().weight:
            self._tied_weights_keys: Any = tied
            self.config: Any = {"tie_word_embeddings": True}


def add_adapters(
    model: TrainableLM, *, r: int, targets: Sequence[str], full: Sequence[str]
) -> None:
    """Adds adapters to a model, whose other parameters are frozen.

    Args:
        model: changed in place.
        r: rank of the adapters, which are scaled by 2.
        targets: last names of linear modules, such as `in_proj`; or whole names, also those of the
            checkpoint's layout.
        full: last names of parameters, or of modules, that are trained as a whole.

    Raises:
        UserError: PEFT is not installed, or a name matches nothing.
    """
    require("peft", "an adapter")
    from peft import LoraConfig, inject_adapter_in_model

    model.base_fingerprint = model.weights_fingerprint()
    unused = {weight for weight in model.parameters() if not weight.requires_grad}
    inside: Any = ModulesAlone(model)
    layout = LAYOUTS.get(str(model.base_layout))
    if layout is not None:
        targets = [layout.renamed(name, to_ours=True) for name in targets]
    names = [name for name, part in inside.named_modules() if isinstance(part, nn.Linear)]
    linear = {*names, *(name.rpartition(".")[2] for name in names)}
    known = {part for n, _ in inside.named_parameters() for part in n.split(".")}
    for option, names, valid in (("targets", targets, linear), ("full", full, known)):
        for name in names:
            if name not in valid:
                whole = "is not linear: add it to peft.full, which trains it as a whole"
                remedy = whole if name in known else f"is unknown: {nearest(name, valid)}"
                raise UserError(f"peft.{option}: {name!r} {remedy}")
    options = LoraConfig(r=r, lora_alpha=2 * r, target_modules=list(targets))  # type: ignore[arg-type]
    inject_adapter_in_model(options, inside)
    model.peft_config = inside.peft_config
    for name, parameter in inside.named_parameters():
        if set(name.split(".")) & set(full) and parameter not in unused:
            parameter.requires_grad_(True)


def has_adapters(model: TrainableLM) -> bool:
    """Whether a base is trained by what is added to it: adapters, an initial state, or both."""
    return bool(model.base_fingerprint)


def read_weights(model: TrainableLM, folder: Path) -> dict[str, Tensor]:
    """What `save_adapter` wrote, under the names of the model's state dict.

    Raises:
        UserError: it is the adapter of another base than the model's.
    """
    _check_base(folder, model.base_fingerprint)
    ours = {_saved_name(model, name): name for name, _ in model.named_parameters()}
    return {ours.get(name, name): tensor for name, tensor in _stored(folder).items()}


def _stored(folder: Path) -> dict[str, Tensor]:
    """The weights of an adapter; none where only the initial state was trained."""
    path = folder / ADAPTER_WEIGHTS
    has_weights = path.exists() or not (folder / INITIAL_STATE).is_file()
    return load_file(regular(path)) if has_weights else {}


def save_adapter(model: TrainableLM, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Writes an adapter as PEFT writes it, with the mitigation under which it was trained.

    Args:
        model: with adapters.
        folder: created if it does not exist.
        weights: the whole state dict of the model.
    """
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    tensors = {
        _saved_name(model, name): weights[name].contiguous() for name in weights if name in trained
    }
    local, added = Path(model.base_name), getattr(model, "peft_config", None)
    config = ({} if added is None else added["default"].to_dict()) | {
        "base_model_name_or_path": str(local.resolve()) if local.is_dir() else model.base_name,
        "inference_mode": True,
    }
    layout = LAYOUTS.get(str(model.base_layout))
    if layout is not None and added is not None:
        config["target_modules"] = sorted(map(layout.renamed, config["target_modules"]))
    record = {"fingerprint": model.base_fingerprint, "mitigation": model.trained_under}
    remove_checksums(folder)
    if added is not None:
        write_atomic(folder / ADAPTER_WEIGHTS, save(tensors, metadata={"format": "pt"}))
    write_atomic(folder / ADAPTER_RECORD, json.dumps(record, indent=2) + "\n")
    write_atomic(folder / ADAPTER, json.dumps(config, indent=2, default=sorted) + "\n")  # of sets
    write_checksums(folder)


def _saved_name(model: Any, name: str) -> str:
    """The name in an adapter's file of a parameter: that of the architecture of the base model."""
    if model.base_layout is not None:
        name = LAYOUTS[model.base_layout].renamed(name)
    elif not isinstance(model, RecurrentLM):
        name = name.removeprefix("model.")
    return PREFIX + name.replace(ADAPTER_INFIX, ".")


def merge_adapter(folder: Path, base: RecurrentLM | ForeignLM) -> RecurrentLM | PreTrainedModel:
    """Returns the base model with an adapter merged into its weights, in float32.

    Args:
        folder: of the adapter, which may have been trained on a `RecurrentLM`, on the
            `LongRNNForCausalLM` that holds it, or on the Hugging Face model.
        base: in float32; changed in place.

    Raises:
        UserError: PEFT is not installed, or the adapter is of other weights.
        Exception: of PEFT, torch and safetensors, for damaged files.
    """
    known = _check_base(folder, base.weights_fingerprint())
    weights = _stored(folder)
    if weights:
        require("peft", "an adapter")
    if not isinstance(base, RecurrentLM):
        from longrnn.hf.foreign import MITIGATION_KEY

        if weights:
            _merge(folder, weights, base.model)
        if "mitigation" in known:
            setattr(base.model.config, MITIGATION_KEY, known["mitigation"])
        return base.model.requires_grad_()  # PEFT froze it
    if any(name.startswith(OF_TRANSFORMERS) for name in weights):
        theirs = as_hugging_face(base)
        _merge(folder, weights, theirs)
        base = build_model(base.config, LAYOUTS["hf"].rename(theirs.state_dict(), to_ours=True))
    elif weights:
        # `LongRNNForCausalLM` names the weights of the model that it holds so.
        is_held = any(name.startswith(f"{PREFIX}model.") for name in weights)
        _merge(folder, weights, nn.ModuleDict({"model": base}) if is_held else base)
        # If one of the two was adapted, or each trained as a whole, they differ from now on.
        base.config.tie_embeddings = base.head.weight is base.embedding.weight
    base.trained_under = known.get("mitigation", base.trained_under)
    return base.eval().requires_grad_()


def _check_base(folder: Path, fingerprint: str) -> dict[str, Any]:
    """What is recorded about an adapter, which must belong to weights of this fingerprint."""
    record = folder / ADAPTER_RECORD
    known = read_json(record) if record.is_file() else {}
    if known.get("fingerprint") not in (None, fingerprint):
        raise UserError(
            f"{folder} is an adapter of other weights than those of {base_of(folder)}: put back "
            "the checkpoint that it was trained on"
        )
    return known


def _merge(folder: Path, weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Merges an adapter into a model whose names of weights it has.

    Raises:
        UserError: the adapter changes no weights.
        ValueError: a weight is missing or unexpected, of which PEFT itself would only warn.
    """
    from peft import PeftConfig, PeftModel, set_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

    config: Any = PeftConfig.from_pretrained(str(folder))
    if config.is_prompt_learning:
        raise UserError(
            f"{folder} is a learned prompt, which changes no weights: open the base model, and "
            "give it the prompt with PEFT"
        )
    config.task_type = None  # the classes of tasks need a model that generates
    alone = ModulesAlone(model)
    alone.tell_ties()
    adapted: Any = PeftModel(alone, config)  # pyright: ignore
    result = set_peft_model_state_dict(adapted, dict(weights))
    for name in result.unexpected_keys:
        raise ValueError(f"it has {name}, which {base_of(folder)} does not have")
    for name in result.missing_keys:
        if ADAPTER_INFIX in name:
            raise ValueError(f"it has no {name}")
    for layer in adapted.modules():
        if isinstance(layer, BaseTunerLayer):
            # A merge changes a weight in place, and a tied weight is also that of another module.
            base: Any = layer.get_base_layer()
            if "weight" in base._parameters:  # and not those of experts, which are tied to no other
                base.weight = nn.Parameter(base.weight.detach().clone())
    adapted.merge_and_unload()

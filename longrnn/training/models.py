"""Models that a run can train: our recurrent models, and Hugging Face transformers.

Trained weights are float32, whatever the checkpoint holds: the small updates of an optimizer are
lost in a narrower dtype. accelerate handles mixed precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from longrnn.cells import MIXERS
from longrnn.config import build_config, flat
from longrnn.errors import UserError
from longrnn.hf import lora
from longrnn.hf.load import load_plain
from longrnn.hf.names import resolve, split_spec
from longrnn.hf.tokenizer import HFTokenizer, byte_level, load_tokenizer
from longrnn.hf.training import TransformerLM, build_transformer, read_transformer, save_transformer
from longrnn.models.checkpoint import load_model, save_model
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM
from longrnn.text import ByteTokenizer, Tokenizer
from longrnn.training.config import PeftConfig, TrainConfig

Trained: TypeAlias = RecurrentLM | TransformerLM


def _silent(line: str) -> None: ...


def build(
    config: TrainConfig, found: Path | None = None, *, say: Callable[[str], None] = _silent
) -> Trained:
    """Builds or loads the model that a run starts with, in float32.

    If the model comes from `init_from`, `config.model` becomes its configuration.

    Args:
        config: the run.
        found: the checkpoint to resume from, which then determines the model; `init_from` is not
            read again.
        say: receives one line if weights change their dtype.

    Raises:
        UserError: the configuration or checkpoint does not fit, or weights are not finite.
    """
    if config.init_from is not None:
        # A checkpoint of adapters has no base.
        source = str(config.init_from if found is None or config.peft is not None else found)
        loaded, spec = load_plain(source)
        if spec is not None:
            raise UserError(
                f"init_from={config.init_from} names a mitigation, which is not trained: leave out "
                "what follows the plus"
            )
        model = loaded if isinstance(loaded, RecurrentLM) else TransformerLM(loaded.model)
        _check_given(config, model)
        if dtypes := widen(model):
            say(f"{source} holds weights of {' and '.join(dtypes)}, which are trained in float32")
        if (name := first_not_finite(model)) is not None:
            raise UserError(
                f"{source} holds weights that are not finite (the first is {name}): give a "
                "checkpoint from before that"
            )
        config.model = model.config if isinstance(model, RecurrentLM) else None
        if config.peft is not None:
            _add_adapters(model, config.peft)
        return model
    if config.transformer:
        model = build_transformer(config.transformer)
        widen(model)
        return model
    assert config.model is not None  # by `TrainConfig.__post_init__`
    return RecurrentLM(config.model)


def _add_adapters(model: Trained, options: PeftConfig) -> None:
    """Adds the adapters of a run to its base model."""
    if not isinstance(model, RecurrentLM):
        raise UserError(
            "peft trains adapters of recurrent models: leave it out, or use PEFT and transformers "
            "for this model"
        )
    given = asdict(options)
    del given["merge"]
    model.base_fingerprint = model.fingerprint()  # type: ignore[assignment]
    lora.add_adapters(model, **given)


def check_adapters(model: Trained, total: Callable[[Tensor], Tensor]) -> None:
    """Refuses adapters that the model does not use, after a backward pass.

    Args:
        model: with adapters.
        total: sums a tensor over processes.

    Raises:
        UserError: an adapter without a gradient.
    """
    flags = lora.without_gradient(model)
    device = next(model.parameters()).device
    lora.check_reached([*flags], total(torch.stack([*flags.values()]).to(device)).tolist())


def widen(model: Trained) -> list[str]:
    """Makes all weights float32; returns the names of the other dtypes that they had."""
    dtypes = {parameter.dtype for parameter in model.parameters()} - {torch.float32}
    model.float()
    if isinstance(model, TransformerLM):
        # A reader of the saved configuration would narrow the weights again.
        configs = [model.model.config]
        configs += [getattr(configs[0], name, None) for name in configs[0].sub_configs]
        for one in filter(None, configs):
            one.dtype = torch.float32
    return sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)


def first_not_finite(model: nn.Module) -> str | None:
    """The name of the first weight with a NaN or an infinity; None where all are finite."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return name.removeprefix("model.")
    return None


def tokenizer_of(config: TrainConfig, found: Path | None = None) -> tuple[str, Tokenizer]:
    """The tokenizer of a run, and what `config.tokenizer` becomes.

    Args:
        config: the run; without a `tokenizer` it has that of `init_from`.
        found: the checkpoint that the run is resumed from, which has the tokenizer beside it.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    name = config.tokenizer
    if name == "bytes":
        return name, load_tokenizer(name)
    if name is None:
        assert config.init_from is not None  # by `TrainConfig.__post_init__`
        # `build` refuses a mitigation in `init_from`, and says why.
        own = found is None or config.peft is not None  # an adapter has no tokenizer beside it
        source = resolve(split_spec(config.init_from)[0]) if own or found is None else found
        try:
            tokenizer = load_tokenizer(source)
        except UserError as error:
            raise UserError(
                f"{error}; or give the run one, tokenizer=PATH or tokenizer=bytes"
            ) from error
        # A transformer trained on bytes holds them as a Hugging Face tokenizer.
        if tokenizer.fingerprint() in ("bytes", byte_level().fingerprint()):
            return "bytes", ByteTokenizer()
        return str(config.init_from), tokenizer
    return name, load_tokenizer(name if found is None or config.peft is not None else found)


def _check_given(config: TrainConfig, model: Trained) -> None:
    """Refuses a `model` beside `init_from` that is another one than the checkpoint's.

    Raises:
        UserError: the two differ.
    """
    if config.model is None:
        return
    given, usual = _spelled(config.model), _spelled(RecurrentConfig())
    if not isinstance(model, RecurrentLM):
        if given == usual:  # as `train.yaml` of earlier versions has it
            return
        raise UserError(
            f"init_from={config.init_from} brings a {model.model.config.model_type}, to which no "
            "key of model applies: leave out model"
        )
    there = _spelled(model.config)
    differing = [key for key in {**given, **there} if given.get(key) != there.get(key)]
    # Those that somebody wrote, where any of them was.
    written = [key for key in differing if given.get(key) != usual.get(key)] or differing
    if written:
        listed = ", ".join(
            f"model.{k}: {given.get(k)} given, {there.get(k)} there" for k in written
        )
        raise UserError(
            f"init_from={config.init_from} brings its own model, which is another one ({listed}): "
            "leave out model"
        )


def _spelled(config: RecurrentConfig) -> dict[str, Any]:
    """A configuration as dotted keys, with the options of the cell that have their default."""
    content = asdict(config)
    kind = content["mixer"].get("kind")
    defaults = MIXERS[kind].__init__.__kwdefaults__ if kind in MIXERS else None
    content["mixer"] = {**(defaults or {}), **content["mixer"]}
    return flat(content)


def description(model: Trained) -> dict[str, Any]:
    """What `rebuild` builds the model from, but for its weights."""
    if isinstance(model, TransformerLM):
        options = model.model.config.to_diff_dict()
        return {"transformer": {k: v for k, v in options.items() if k != "transformers_version"}}
    adapters = lora.describe(model)
    return asdict(model.config) | ({} if adapters is None else {"adapters": adapters})


def rebuild(described: Mapping[str, Any], source: str) -> Trained:
    """A model of a `description`; `source` names it in errors."""
    if "transformer" in described:
        return build_transformer(described["transformer"])
    shape = {name: value for name, value in described.items() if name != "adapters"}
    model = RecurrentLM(build_config(RecurrentConfig, shape, source=source))
    if "adapters" in described:
        lora.add_adapters(model, **described["adapters"])
    return model


def save(
    model: Trained,
    folder: Path,
    tokenizer: Tokenizer,
    weights: Mapping[str, Tensor],
    mitigation: str | None = None,
    base: str | None = None,
) -> None:
    """Writes a model with its tokenizer, so that the folder can be moved.

    Args:
        model: the model.
        folder: created if it does not exist.
        tokenizer: of the model.
        weights: the whole state dict.
        mitigation: the one under which the model was trained.
        base: the checkpoint whose adapters are trained, if they are; only they are written.
    """
    if lora.describe(model) is not None:
        assert base is not None
        known = str(model.base_fingerprint)
        lora.save_adapter(
            model, folder, weights, base=base, base_fingerprint=known, mitigation=mitigation
        )
    elif isinstance(model, TransformerLM):
        save_transformer(model, folder, tokenizer, weights)
    elif isinstance(tokenizer, HFTokenizer):
        tokenizer.save(folder)
        save_model(
            model, folder, tokenizer="tokenizer.json", weights=weights, mitigation=mitigation
        )
    else:
        save_model(model, folder, weights=weights, mitigation=mitigation)


def read(model: Trained, folder: Path) -> Mapping[str, Tensor]:
    """The weights that `save` wrote of such a model."""
    if lora.describe(model) is not None:
        return lora.read_weights(model, folder)
    if isinstance(model, TransformerLM):
        return read_transformer(folder, model)
    return load_model(folder).state_dict()

"""Layouts of Mamba checkpoints: those of mamba-ssm and of transformers, to and from ours.

Each stores a `RecurrentLM` of `mamba` or `mamba2` cells under other names. A checkpoint that
`RecurrentLM` cannot compute exactly is refused, never approximated.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from longrnn.cells import MIXERS
from longrnn.checkpoints.cell_names import CELLS, MODEL_TYPES, NATIVE_LAYERS
from longrnn.checkpoints.folder import build_model, read_weights, rename_weights
from longrnn.errors import UserError
from longrnn.files import write_atomic
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM
from longrnn.options import Count, validated

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Options of the model: ours, and their names in mamba-ssm and in transformers.
MODEL = {
    "vocab_size": ("vocab_size", "vocab_size"),
    "d_model": ("d_model", "hidden_size"),
    "n_layers": ("n_layer", "num_hidden_layers"),
    "tie_embeddings": ("tie_embeddings", "tie_word_embeddings"),
    "residual_in_fp32": ("residual_in_fp32", "residual_in_fp32"),
}
# What a configuration of mamba-ssm has by default, and what it must have for ours to compute the
# same.
NATIVE_DEFAULTS = {"tie_embeddings": True, "residual_in_fp32": True, "pad_vocab_size_multiple": 8}
NATIVE_FIXED = {"d_intermediate": 0, "attn_layer_idx": [], "rms_norm": True}
NATIVE_EPS = 1e-5  # fixed in mamba-ssm's code


class Layout(NamedTuple):
    """A file format of Mamba checkpoints.

    Attributes:
        names: prefixes of weight names, from ours to those of the layout.
        is_described: whether the content of a `config.json` is of this layout.
        read: returns our configuration for that content and the path of the file.
        write: returns the text of `config.json`, or raises a UserError for a model with an option
            that the layout does not have.
        file: name of the file of weights.
    """

    names: Mapping[str, str]
    is_described: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any], str], RecurrentConfig]
    write: Callable[[RecurrentLM], str]
    file: str

    def rename(self, weights: Mapping[str, Tensor], *, to_ours: bool = False) -> dict[str, Tensor]:
        """Return weights under the names of the layout, or of `RecurrentLM`."""
        return rename_weights(weights, partial(self.renamed, to_ours=to_ours))

    def renamed(self, name: str, *, to_ours: bool = False) -> str:
        """Return the name of a weight in the layout, or in `RecurrentLM`."""
        prefixes = dict(self.names)
        if to_ours:
            # transformers still accepts the older name of the embedding, that of mamba-ssm.
            prefixes = {theirs: ours for ours, theirs in self.names.items()}
            prefixes["backbone.embedding."] = "embedding."
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        return prefixes.get(prefix, "") + name.removeprefix(prefix)

    def load(self, folder: Path, config: Mapping[str, Any], backend: str) -> RecurrentLM:
        """Read a model from a folder whose `config.json` has the given content.

        Raises:
            UserError: a configuration that longrnn cannot compute exactly.
            Exception: of the libraries that read files, for damaged files.
        """
        options = self.read(config, str(folder / "config.json"))
        is_tied = options.tie_embeddings
        weights = self.rename(read_weights(folder), to_ours=True)
        model = build_model(options, weights, backend=backend)
        if is_tied and not options.tie_embeddings and self is LAYOUTS["native"]:
            raise UserError(
                f"{folder} has tie_embeddings = True and a lm_head.weight that differs from "
                "backbone.embedding.weight, which mamba-ssm cannot compute: set tie_embeddings to "
                "false in its config.json"
            )
        return model

    def save(self, model: RecurrentLM, folder: Path) -> None:
        """Write the weights into the file that the readers of the layout expect."""
        renamed = self.rename(model.state_dict())
        weights = {name: tensor.contiguous() for name, tensor in renamed.items()}
        if self.file.endswith(".bin"):  # with the weights of a tied head under their own name
            content = io.BytesIO()  # torch.save into a file on a full disk raises a RuntimeError
            torch.save(weights, content)
            write_atomic(folder / self.file, content.getbuffer())
            return
        if model.config.tie_embeddings:
            del weights["lm_head.weight"]
        write_atomic(folder / self.file, save(weights, metadata={"format": "pt"}))


def _read_native(config: Mapping[str, Any], source: str) -> RecurrentConfig:
    given = {"layer": "Mamba1", **(config.get("ssm_cfg") or {})}
    if given["layer"] not in NATIVE_LAYERS:
        raise UserError(
            f"{source} has layer = {given['layer']!r}, and longrnn computes only "
            f"{' and '.join(NATIVE_LAYERS)}: load this checkpoint with mamba-ssm"
        )
    kind = NATIVE_LAYERS[given["layer"]]
    names = CELLS[kind]
    for content, fixed in ((config, NATIVE_FIXED), (given, names.native_fixed)):
        for key, value in fixed.items():
            if content.get(key, value) != value:
                raise UserError(
                    f"{source} has {key} = {content[key]!r}, and longrnn computes only {key} = "
                    f"{value!r}: load this checkpoint with mamba-ssm"
                )
    ours = {theirs: name for name, (theirs, _) in names.options.items()}
    without_effect = {*names.native_fixed, *names.native_ignored.split(), "device", "dtype"}
    options: Any = {ours.get(key, key): given[key] for key in given if key not in without_effect}
    whole = NATIVE_DEFAULTS | dict(config)
    model = {name: whole.get(theirs) for name, (theirs, _) in MODEL.items()}
    size, multiple = (
        validated(Count, whole.get(name), f"{source}, {name}")
        for name in ("vocab_size", "pad_vocab_size_multiple")
    )
    model["vocab_size"] = -(-size // multiple) * multiple
    return _configuration(model | {"norm_eps": NATIVE_EPS}, kind, options, source)


def _write_native(model: RecurrentLM) -> str:
    kind, options = _cell_options(model, "mamba-ssm", NATIVE_EPS)
    if options.get("select_norm_eps") is not None:
        raise UserError(
            "mamba-ssm has no norms of dt, B and C, and this model has select_norm_eps: convert it "
            "to ours or hf"
        )
    names = CELLS[kind]
    content = {theirs: getattr(model.config, name) for name, (theirs, _) in MODEL.items()}
    layer = {"layer": names.native_fixed["layer"]}
    content |= {
        "ssm_cfg": layer | {theirs: options[name] for name, (theirs, _) in names.options.items()},
        "pad_vocab_size_multiple": 1,
    }
    return json.dumps(content | NATIVE_FIXED, indent=2) + "\n"


def _read_hugging_face(config: Mapping[str, Any], source: str) -> RecurrentConfig:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = MODEL_TYPES[config["model_type"]]
    # transformers fills in missing values and refuses values that contradict each other.
    whole: Any = CONFIG_MAPPING[config["model_type"]].from_json_file(source)
    if whole.hidden_act not in ("silu", "swish"):
        raise UserError(
            f"{source} has hidden_act {whole.hidden_act!r}, and longrnn supports only silu: load "
            "this checkpoint with transformers"
        )
    options = {name: getattr(whole, theirs) for name, (_, theirs) in CELLS[kind].options.items()}
    eps = {"norm_eps": whole.layer_norm_epsilon}
    if kind == "mamba2":
        options |= eps
    else:  # its `expand` has no effect beside an `intermediate_size`
        quotient = whole.intermediate_size / whole.hidden_size
        options["expand"] = int(quotient) if quotient.is_integer() else quotient
        options["select_norm_eps"] = getattr(whole, "mixer_rms_eps", None)
    model = {name: getattr(whole, theirs) for name, (_, theirs) in MODEL.items()}
    return _configuration(model | eps, kind, options, source)


def _hugging_face_config(model: RecurrentLM) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = model.config
    kind, options = _cell_options(model, "transformers", config.norm_eps)
    model_type, more = kind, {}
    if kind == "mamba2":
        more["num_heads"] = options["expand"] * config.d_model // options["head_dim"]
    elif options["select_norm_eps"] is not None:
        model_type, more["mixer_rms_eps"] = "falcon_mamba", options["select_norm_eps"]
    options_class: Any = CONFIG_MAPPING[model_type]
    return options_class(
        layer_norm_epsilon=config.norm_eps,
        architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],
        dtype=str(model.embedding.weight.dtype).removeprefix("torch."),
        # The defaults belong to the vocabulary of another model.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **more,
        **{theirs: getattr(config, name) for name, (_, theirs) in MODEL.items()},
        **{theirs: options[name] for name, (_, theirs) in CELLS[kind].options.items()},
    )


def as_hugging_face(model: RecurrentLM) -> PreTrainedModel:
    """Returns a copy of a model as one of transformers, or raises the UserError of `write`."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_config(_hugging_face_config(model))
    theirs.load_state_dict(LAYOUTS["hf"].rename(model.state_dict()))
    return theirs


def _configuration(
    config: Mapping[str, Any], kind: str, options: Mapping[str, Any], source: str
) -> RecurrentConfig:
    """Return our configuration; options of the cell that have their default value are left out."""
    given = dict(options)
    if given.get("dt_limit") is not None:
        # dt is never below 0: limits of 0 and infinity do not limit it.
        limit = [float(bound) for bound in given["dt_limit"]]
        given["dt_limit"] = None if limit == [0, math.inf] else limit
    if given.get("dt_rank") in ("auto", _default_rank(config["d_model"])):
        given["dt_rank"] = None
    defaults = _defaults(kind)
    changed = {name: value for name, value in given.items() if value != defaults.get(name, name)}
    mixer = {"mixer": {"kind": kind, **changed}}
    return validated(RecurrentConfig, {**config, **mixer}, source)


def _defaults(kind: str) -> dict[str, Any]:
    """The options of a kind of cell."""
    return MIXERS[kind].__init__.__kwdefaults__ or {}


def _default_rank(d_model: int) -> int:
    """The length of δ in a Mamba cell where none is given."""
    return -(-d_model // 16)


def _cell_options(model: RecurrentLM, reader: str, eps: float) -> tuple[str, dict[str, Any]]:
    """Returns the kind and the options of the cells, which are the same in all layers.

    Args:
        model: the model to write.
        reader: what reads the checkpoint.
        eps: the norm_eps that the reader has for blocks and cells alike.

    Raises:
        UserError: the model is not one that a published checkpoint can describe.
    """
    config = model.config
    kind = config.mixer["kind"]
    if kind not in CELLS:
        raise UserError(f"{reader} has no {kind} cells: give a model of {' or '.join(CELLS)} cells")
    options = _defaults(kind) | config.mixer
    for name, value, supported in (
        ("block", config.block, "residual"),
        ("position.kind", config.position["kind"], "none"),
        ("head_bias", config.head_bias, False),
        ("d_embedding", config.d_embedding, None),
        ("norm_eps", config.norm_eps, eps),
        ("mixer.norm_eps", options.get("norm_eps", eps), eps),
    ):
        if value != supported:
            raise UserError(
                f"{reader} supports only {name} = {supported!r}, and this model has {value!r}: "
                "convert it to ours"
            )
    options["dt_limit"] = options.get("dt_limit") or (0.0, math.inf)
    options["dt_rank"] = options.get("dt_rank") or _default_rank(config.d_model)
    return kind, options


NAMES = {"blocks.": "backbone.layers.", "norm.": "backbone.norm_f.", "head.": "lm_head."}
LAYOUTS = {
    "native": Layout(
        NAMES | {"embedding.": "backbone.embedding."},
        lambda config: "model_type" not in config and {"d_model", "n_layer"} <= config.keys(),
        _read_native,
        _write_native,
        "pytorch_model.bin",
    ),
    "hf": Layout(
        NAMES | {"embedding.": "backbone.embeddings."},
        lambda config: config.get("model_type") in MODEL_TYPES,
        _read_hugging_face,
        lambda model: _hugging_face_config(model).to_json_string(),
        "model.safetensors",
    ),
}


def layout_of(config: Mapping[str, Any]) -> str | None:
    """Return the layout of a folder whose `config.json` has this content; None for no other."""
    return next((name for name, known in LAYOUTS.items() if known.is_described(config)), None)

"""Layouts of Mamba-2 checkpoints: those of mamba-ssm and of transformers, to and from ours.

Each stores a `RecurrentLM` of `mamba2` cells under other names. A checkpoint that `RecurrentLM`
cannot compute exactly is refused, never approximated.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from longrnn.cells.mamba2 import Mamba2
from longrnn.config import build_config
from longrnn.errors import UserError
from longrnn.files import write_atomic
from longrnn.models.checkpoint import build_model, read_weights, rename_weights
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM

if TYPE_CHECKING:
    from transformers import Mamba2Config, PreTrainedModel

# Options of the model and of its cells: ours, and their names in mamba-ssm and in transformers.
MODEL = {
    "vocab_size": ("vocab_size", "vocab_size"),
    "d_model": ("d_model", "hidden_size"),
    "n_layers": ("n_layer", "num_hidden_layers"),
    "tie_embeddings": ("tie_embeddings", "tie_word_embeddings"),
    "residual_in_fp32": ("residual_in_fp32", "residual_in_fp32"),
}
CELL = {
    "d_state": ("d_state", "state_size"),
    "head_dim": ("headdim", "head_dim"),
    "expand": ("expand", "expand"),
    "n_groups": ("ngroups", "n_groups"),
    "d_conv": ("d_conv", "conv_kernel"),
    "bias": ("bias", "use_bias"),
    "conv_bias": ("conv_bias", "use_conv_bias"),
    "dt_limit": ("dt_limit", "time_step_limit"),
}
# What a configuration of mamba-ssm has by default.
NATIVE_DEFAULTS = {"tie_embeddings": True, "residual_in_fp32": True, "pad_vocab_size_multiple": 8}
# What it and its `ssm_cfg` must have for ours to compute the same.
NATIVE_FIXED = {"d_intermediate": 0, "attn_layer_idx": [], "rms_norm": True}
NATIVE_CELL_FIXED = {
    "layer": "Mamba2",
    "rmsnorm": True,
    "norm_before_gate": False,
    "D_has_hdim": False,
    "d_ssm": None,
}
# Options of initialisation and implementation, which do not change the result.
NATIVE_IGNORED = ("A_init_range", "chunk_size", "conv_init", "dt_init_floor", "dt_max", "dt_min")
# And those of the place of the weights and of their distribution over processes.
NATIVE_IGNORED += ("device", "dtype", "process_group", "sequence_parallel", "use_mem_eff_path")
NATIVE_EPS = 1e-5  # fixed in mamba-ssm's code


class Layout(NamedTuple):
    """A file format of Mamba-2 checkpoints.

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
        prefixes = dict(self.names)
        if to_ours:
            # transformers still accepts the older name of the embedding, that of mamba-ssm.
            prefixes = {theirs: ours for ours, theirs in self.names.items()}
            prefixes["backbone.embedding."] = "embedding."

        def rename(name: str) -> str:
            prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
            return prefixes.get(prefix, "") + name.removeprefix(prefix)

        return rename_weights(weights, rename)

    def load(self, folder: Path, config: Mapping[str, Any], backend: str) -> RecurrentLM:
        """Read a model from a folder whose `config.json` has the given content.

        Raises:
            UserError: a configuration that longrnn cannot compute exactly.
            Exception: of the libraries that read files, for a damaged one.
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
    options = config.get("ssm_cfg") or {}
    cell = {"layer": "Mamba1", **options}
    for given, fixed in ((config, NATIVE_FIXED), (cell, NATIVE_CELL_FIXED)):
        for key, value in fixed.items():
            if given.get(key, value) != value:
                raise UserError(
                    f"{source} has {key} = {given[key]!r}, and longrnn computes only {key} = "
                    f"{value!r}: load this checkpoint with mamba-ssm"
                )
    names = {theirs: ours for ours, (theirs, _) in CELL.items()}
    without_effect = {*NATIVE_CELL_FIXED, *NATIVE_IGNORED}
    ours: Any = {names.get(key, key): options[key] for key in options if key not in without_effect}
    given = {**NATIVE_DEFAULTS, **config}
    model = {name: given.get(theirs) for name, (theirs, _) in MODEL.items()}
    size, multiple = given.get("vocab_size"), given["pad_vocab_size_multiple"]
    if not isinstance(size, int) or not isinstance(multiple, int) or multiple < 1:
        raise UserError(
            f"{source} has vocab_size = {size!r} and pad_vocab_size_multiple = {multiple!r}: give "
            "whole numbers of at least 1"
        )
    model["vocab_size"] = -(-size // multiple) * multiple
    return _configuration(model | {"norm_eps": NATIVE_EPS}, ours, source)


def _write_native(model: RecurrentLM) -> str:
    options = _cell_options(model, "mamba-ssm", NATIVE_EPS)
    content = {theirs: getattr(model.config, name) for name, (theirs, _) in MODEL.items()}
    content |= {
        "ssm_cfg": {"layer": "Mamba2"} | {CELL[name][0]: options[name] for name in CELL},
        "pad_vocab_size_multiple": 1,
    }
    return json.dumps(content | NATIVE_FIXED, indent=2) + "\n"


def _read_hugging_face(_: Mapping[str, Any], source: str) -> RecurrentConfig:
    from transformers import Mamba2Config

    # transformers fills in missing values and refuses values that contradict each other.
    whole = Mamba2Config.from_json_file(source)
    if whole.hidden_act not in ("silu", "swish"):
        raise UserError(
            f"{source} has hidden_act {whole.hidden_act!r}, and longrnn supports only silu: load "
            "this checkpoint with transformers"
        )
    options = {name: getattr(whole, theirs) for name, (_, theirs) in CELL.items()}
    eps = {"norm_eps": whole.layer_norm_epsilon}
    model = {name: getattr(whole, theirs) for name, (_, theirs) in MODEL.items()}
    return _configuration(model | eps, options | eps, source)


def _hugging_face_config(model: RecurrentLM) -> Mamba2Config:
    from transformers import Mamba2Config

    config = model.config
    options = _cell_options(model, "transformers", config.norm_eps)
    return Mamba2Config(
        num_heads=options["expand"] * config.d_model // options["head_dim"],
        layer_norm_epsilon=config.norm_eps,
        architectures=["Mamba2ForCausalLM"],
        dtype=str(model.embedding.weight.dtype).removeprefix("torch."),
        # The defaults belong to the vocabulary of another model.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **{theirs: getattr(config, name) for name, (_, theirs) in MODEL.items()},
        **{theirs: options[name] for name, (_, theirs) in CELL.items()},
    )


def as_hugging_face(model: RecurrentLM) -> PreTrainedModel:
    """Returns a copy of a model as a `Mamba2ForCausalLM`, or raises the UserError of `write`."""
    from transformers import Mamba2ForCausalLM

    theirs = Mamba2ForCausalLM(_hugging_face_config(model))
    theirs.load_state_dict(LAYOUTS["hf"].rename(model.state_dict()))
    return theirs


def _configuration(
    config: Mapping[str, Any], options: Mapping[str, Any], source: str
) -> RecurrentConfig:
    """Return our configuration; options of the cell that have their default value are left out."""
    given = dict(options)
    if given.get("dt_limit") is not None:
        # dt is never below 0: limits of 0 and infinity do not limit it.
        limit = [float(bound) for bound in given["dt_limit"]]
        given["dt_limit"] = None if limit == [0, math.inf] else limit
    defaults = Mamba2.__init__.__kwdefaults__ or {}
    spelled = {name: value for name, value in given.items() if value != defaults.get(name, name)}
    mixer = {"mixer": {"kind": "mamba2", **spelled}}
    return build_config(RecurrentConfig, {**config, **mixer}, source=source)


def _cell_options(model: RecurrentLM, reader: str, eps: float) -> dict[str, Any]:
    """Returns the options of the cells, which are the same in all layers.

    Args:
        model: the model to write.
        reader: what reads the checkpoint.
        eps: the norm_eps that the reader has for blocks and cells alike.

    Raises:
        UserError: the model is not one that a published Mamba-2 checkpoint can describe.
    """
    config = model.config
    options = (Mamba2.__init__.__kwdefaults__ or {}) | config.mixer
    kinds = config.mixer["kind"], config.block, config.position["kind"]
    if kinds != ("mamba2", "residual", "none"):
        raise UserError(
            f"{reader} does not support {kinds[0]} cells in {kinds[1]} blocks with {kinds[2]} "
            "positions: give a model of mamba2 cells in residual blocks without positions"
        )
    if {config.norm_eps, options["norm_eps"]} != {eps}:
        raise UserError(
            f"{reader} computes all norms with norm_eps = {eps}, and this model has "
            f"{config.norm_eps} in its blocks and {options['norm_eps']} in its cells: convert it "
            "to ours"
        )
    return options | {"dt_limit": options["dt_limit"] or (0.0, math.inf)}


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
        lambda config: config.get("model_type") == "mamba2",
        _read_hugging_face,
        lambda model: _hugging_face_config(model).to_json_string(),
        "model.safetensors",
    ),
}

"""Layouts of Mamba-2 checkpoints: that of mamba-ssm and that of transformers, to and from ours.

Both hold the model that `RecurrentLM` computes with `mamba2` cells, under other names. What one of
them can say and `RecurrentLM` cannot compute is refused, never approximated.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from longrnn.config import build_config
from longrnn.errors import UserError
from longrnn.files import replacing, write_atomic
from longrnn.mixers.mamba2 import Mamba2
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM
from longrnn.registry import Registry, keyword_options


class Layout(ABC):
    """How a family of checkpoints writes a Mamba-2 model down.

    Attributes:
        names: beginnings of the names of weights, ours and theirs.
    """

    names: ClassVar[Mapping[str, str]]

    @staticmethod
    @abstractmethod
    def is_described(config: Mapping[str, Any]) -> bool:
        """Whether a `config.json` is of this layout."""

    @staticmethod
    @abstractmethod
    def read(config: Mapping[str, Any], source: str) -> RecurrentConfig:
        """Our configuration.

        Args:
            config: the content of `config.json`.
            source: the path of that file.

        Raises:
            UserError: something that `RecurrentLM` does not compute.
        """

    @staticmethod
    @abstractmethod
    def write(model: RecurrentLM) -> str:
        """The text of `config.json`.

        Raises:
            UserError: something that the layout cannot hold.
        """

    @staticmethod
    @abstractmethod
    def save(model: RecurrentLM, folder: Path) -> None:
        """Writes the weights into the file that the layout's readers look for."""


LAYOUTS: Registry[Layout] = Registry("layout")


@LAYOUTS.register("native")
class Native(Layout):
    """`state-spaces/mamba2-*`, as mamba-ssm writes and reads it."""

    names: ClassVar[Mapping[str, str]] = {
        "embedding.": "backbone.embedding.",
        "blocks.": "backbone.layers.",
        "norm.": "backbone.norm_f.",
        "head.": "lm_head.",
    }
    # Options of mamba_ssm's Mamba2 with the one value under which it computes what ours does.
    FIXED: ClassVar[Mapping[str, Any]] = {
        "layer": "Mamba2",
        "rmsnorm": True,
        "norm_before_gate": False,
        "D_has_hdim": False,
    }
    OPTIONS: ClassVar[Mapping[str, str]] = {
        "d_state": "d_state",
        "headdim": "head_dim",
        "expand": "expand",
        "ngroups": "n_groups",
        "d_conv": "d_conv",
        "bias": "bias",
        "conv_bias": "conv_bias",
        "dt_limit": "dt_limit",
    }
    # What says how a model was initialised or is computed, and not what it computes.
    IGNORED = (
        "A_init_range",
        "chunk_size",
        "conv_init",
        "dt_init_floor",
        "dt_max",
        "dt_min",
        "use_mem_eff_path",
    )
    EPS = 1e-5  # fixed in mamba-ssm's code

    @staticmethod
    def is_described(config: Mapping[str, Any]) -> bool:
        return "model_type" not in config and {"d_model", "n_layer"} <= config.keys()

    @staticmethod
    def read(config: Mapping[str, Any], source: str) -> RecurrentConfig:
        for key, known in {"d_intermediate": 0, "attn_layer_idx": [], "rms_norm": True}.items():
            _only(config, key, known, source, default=known)
        options = config.get("ssm_cfg") or {}
        if not isinstance(options, Mapping):
            raise UserError(f"{source}, key ssm_cfg: it takes a mapping, not {options!r}")
        for key, known in Native.FIXED.items():
            _only(options, key, known, source, default="Mamba1" if key == "layer" else known)
        inner = int(options.get("expand", 2)) * _whole(config, "d_model", source)
        _only(options, "d_ssm", inner, source, default=inner)
        known = {*Native.FIXED, *Native.OPTIONS, *Native.IGNORED, "d_ssm"}
        for key in options:
            if key not in known:
                raise UserError(
                    f"{source} has the option ssm_cfg.{key}, which longrnn does not know: "
                    "load this checkpoint with mamba-ssm"
                )
        multiple = int(config.get("pad_vocab_size_multiple", 8))
        vocabulary = _whole(config, "vocab_size", source)
        return _build(
            {ours: options[name] for name, ours in Native.OPTIONS.items() if name in options},
            source,
            vocab_size=-(-vocabulary // multiple) * multiple,
            d_model=config["d_model"],
            n_layers=config["n_layer"],
            tie_embeddings=config.get("tie_embeddings", True),
            residual_in_fp32=config.get("residual_in_fp32", True),
            norm_eps=Native.EPS,
        )

    @staticmethod
    def write(model: RecurrentLM) -> str:
        cell, config = _cell(model, "mamba-ssm"), model.config
        if (config.norm_eps, cell.norm_eps) != (Native.EPS, Native.EPS):
            raise UserError(
                f"mamba-ssm always takes norm_eps = {Native.EPS}, and this model has "
                f"{config.norm_eps} and {cell.norm_eps}: convert it to hf"
            )
        options = {
            "layer": "Mamba2",
            "d_state": cell.d_state,
            "d_conv": cell.d_conv,
            "expand": cell.d_inner // config.d_model,
            "headdim": cell.head_dim,
            "ngroups": cell.n_groups,
            "bias": cell.in_proj.bias is not None,
            "conv_bias": cell.conv1d.bias is not None,
        }
        if cell.dt_limit is not None:
            options["dt_limit"] = cell.dt_limit
        content = {
            "d_model": config.d_model,
            "d_intermediate": 0,
            "n_layer": config.n_layers,
            "vocab_size": config.vocab_size,
            "ssm_cfg": options,
            "attn_layer_idx": [],
            "attn_cfg": {},
            "rms_norm": True,
            "residual_in_fp32": config.residual_in_fp32,
            "fused_add_norm": True,
            "pad_vocab_size_multiple": 1,
            "tie_embeddings": config.tie_embeddings,
        }
        return json.dumps(content, indent=2) + "\n"

    @staticmethod
    def save(model: RecurrentLM, folder: Path) -> None:
        # mamba-ssm wants the head by its own name, tied or not.
        with replacing(folder / "pytorch_model.bin") as file:
            torch.save(_renamed(model, Native.names), file)


@LAYOUTS.register("hf")
class Transformers(Layout):
    """`Mamba2ForCausalLM` of transformers.

    Older versions wrote `norm_before_gate`, which transformers has never read.
    """

    names: ClassVar[Mapping[str, str]] = {**Native.names, "embedding.": "backbone.embeddings."}

    OPTIONS: ClassVar[Mapping[str, str]] = {
        "state_size": "d_state",
        "head_dim": "head_dim",
        "expand": "expand",
        "n_groups": "n_groups",
        "conv_kernel": "d_conv",
        "use_bias": "bias",
        "use_conv_bias": "conv_bias",
        "time_step_limit": "dt_limit",
        "layer_norm_epsilon": "norm_eps",
    }

    @staticmethod
    def is_described(config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "mamba2"

    @staticmethod
    def read(config: Mapping[str, Any], source: str) -> RecurrentConfig:
        from transformers import Mamba2Config

        # transformers fills in what a file leaves out, and says what does not go together.
        try:
            whole = Mamba2Config.from_json_file(source)
        except Exception as error:  # its validation raises errors of several kinds
            raise UserError(f"{source} is no Mamba-2 ({_line(error)}): copy it again") from error
        if whole.hidden_act not in ("silu", "swish"):
            raise UserError(
                f"{source} has hidden_act {whole.hidden_act!r}, and Mamba-2 here has silu: "
                "load this checkpoint with transformers"
            )
        return _build(
            {ours: getattr(whole, name) for name, ours in Transformers.OPTIONS.items()},
            source,
            vocab_size=whole.vocab_size,
            d_model=whole.hidden_size,
            n_layers=whole.num_hidden_layers,
            tie_embeddings=whole.tie_word_embeddings,
            residual_in_fp32=whole.residual_in_fp32,
            norm_eps=whole.layer_norm_epsilon,
        )

    @staticmethod
    def write(model: RecurrentLM) -> str:
        from transformers import Mamba2Config

        cell, config = _cell(model, "transformers"), model.config
        if config.norm_eps != cell.norm_eps:
            raise UserError(
                f"transformers has one layer_norm_epsilon, and this model has norm_eps "
                f"{config.norm_eps} in its blocks and {cell.norm_eps} in its cells: keep it as ours"
            )
        written = Mamba2Config(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            num_hidden_layers=config.n_layers,
            state_size=cell.d_state,
            head_dim=cell.head_dim,
            num_heads=cell.n_heads,
            expand=cell.d_inner // config.d_model,
            n_groups=cell.n_groups,
            conv_kernel=cell.d_conv,
            use_bias=cell.in_proj.bias is not None,
            use_conv_bias=cell.conv1d.bias is not None,
            layer_norm_epsilon=cell.norm_eps,
            time_step_limit=(0.0, math.inf) if cell.dt_limit is None else tuple(cell.dt_limit),
            residual_in_fp32=config.residual_in_fp32,
            tie_word_embeddings=config.tie_embeddings,
            architectures=["Mamba2ForCausalLM"],
            dtype=str(model.embedding.weight.dtype).removeprefix("torch."),
            # Those of a vocabulary that is not this one.
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        return written.to_json_string()

    @staticmethod
    def save(model: RecurrentLM, folder: Path) -> None:
        from safetensors.torch import save

        tensors = _renamed(model, Transformers.names)
        if model.config.tie_embeddings:
            del tensors["lm_head.weight"]
        write_atomic(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))


def rename(name: str, beginnings: Mapping[str, str]) -> str:
    """A name with another beginning; one that begins with none of them is left as it is."""
    for start, other in beginnings.items():
        if name.startswith(start):
            return other + name.removeprefix(start)
    return name


def _renamed(model: RecurrentLM, names: Mapping[str, str]) -> dict[str, Tensor]:
    weights = model.state_dict()
    return {rename(name, names): tensor.contiguous() for name, tensor in weights.items()}


def _build(options: Mapping[str, Any], source: str, **config: Any) -> RecurrentConfig:
    """Our configuration, in which an option of the cell that has its default is not spelled out."""
    defaults = Mamba2.__init__.__kwdefaults__ or {}
    given = {name: options[name] for name in keyword_options(Mamba2) if name in options}
    limit = given.get("dt_limit")
    if limit is not None:
        # No dt is below 0, so that a lower limit of 0 and an infinite upper one are none.
        given["dt_limit"] = None if tuple(map(float, limit)) == (0.0, math.inf) else list(limit)
    spelled = {name: value for name, value in given.items() if value != defaults[name]}
    return build_config(
        RecurrentConfig, {**config, "mixer": {"kind": "mamba2", **spelled}}, source=source
    )


def _cell(model: RecurrentLM, reader: str) -> Mamba2:
    """The first of a model's cells, which are all alike.

    Raises:
        UserError: the model is another one than a published Mamba-2 can be.
    """
    config, cell = model.config, model.mixers[0]
    reasons = {
        f"{config.mixer['kind']} cells": isinstance(cell, Mamba2),
        f"{config.block} blocks": config.block == "residual",
        f"{config.position['kind']} positions": config.position["kind"] == "none",
    }
    for reason, fits in reasons.items():
        if not fits:
            raise UserError(
                f"{reader} has no place for {reason}: only a model of mamba2 cells in residual "
                "blocks without positions can be converted"
            )
    assert isinstance(cell, Mamba2)
    return cell


def _only(config: Mapping[str, Any], key: str, value: Any, source: str, *, default: Any) -> None:
    """Refuses a value of `key` with which the model is not one that `RecurrentLM` computes."""
    found = config.get(key, default)
    if found != value:
        raise UserError(
            f"{source} has {key} = {found!r}, and longrnn computes only {key} = {value!r}: "
            "load this checkpoint with mamba-ssm"
        )


def _whole(config: Mapping[str, Any], key: str, source: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{source}, key {key}: a whole number above 0 is wanted, not {value!r}")
    return value


def _line(error: Exception) -> str:
    return " ".join(str(error).split())

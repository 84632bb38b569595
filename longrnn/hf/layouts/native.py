"""The checkpoint layout of mamba-ssm."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from longrnn.errors import UserError
from longrnn.files import write_atomic
from longrnn.hf.layouts.base import LAYOUTS, NAMES, Layout, build, cell_of, renamed
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM


@LAYOUTS.register("native")
class Native(Layout):
    """Checkpoints such as `state-spaces/mamba2-*`, as mamba-ssm writes and reads them."""

    names: ClassVar[Mapping[str, str]] = NAMES
    # Options of mamba_ssm's Mamba2, with the only value for which ours computes the same.
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
    # Options of initialisation and implementation, which do not change the result.
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
            raise UserError(
                f"{source}, key ssm_cfg: it must be a mapping, not {options!r}; copy the "
                "checkpoint again"
            )
        for key, known in Native.FIXED.items():
            _only(options, key, known, source, default="Mamba1" if key == "layer" else known)
        if options.get("d_ssm") is not None:
            inner = options.get("expand", 2) * config["d_model"]
            _only(options, "d_ssm", inner, source, default=inner)
        known = {*Native.FIXED, *Native.OPTIONS, *Native.IGNORED, "d_ssm"}
        for key in options:
            if key not in known:
                raise UserError(
                    f"{source} has the option ssm_cfg.{key}, which longrnn does not know: "
                    "load this checkpoint with mamba-ssm"
                )
        multiple, vocabulary = config.get("pad_vocab_size_multiple", 8), config.get("vocab_size")
        if not (isinstance(multiple, int) and multiple > 0 and isinstance(vocabulary, int)):
            raise UserError(
                f"{source} has vocab_size {vocabulary!r} and pad_vocab_size_multiple {multiple!r}, "
                "which are not whole numbers above 0: copy the checkpoint again"
            )
        return build(
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
        cell, config = cell_of(model, "mamba-ssm"), model.config
        if (config.norm_eps, cell.norm_eps) != (Native.EPS, Native.EPS):
            raise UserError(
                f"mamba-ssm always uses norm_eps = {Native.EPS}, and this model has "
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
            options["dt_limit"] = list(cell.dt_limit)
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
        # mamba-ssm expects the weights of the head under their own name even when they are tied.
        content = io.BytesIO()  # torch.save into a file on a full disk raises a RuntimeError
        torch.save(renamed(model, Native.names), content)
        write_atomic(folder / "pytorch_model.bin", content.getbuffer())


def _only(config: Mapping[str, Any], key: str, value: Any, source: str, *, default: Any) -> None:
    """Refuse a configuration in which `key` has another value than the one that we support."""
    found = config.get(key, default)
    if found != value:
        raise UserError(
            f"{source} has {key} = {found!r}, and longrnn computes only {key} = {value!r}: "
            "load this checkpoint with mamba-ssm"
        )

"""The checkpoint layout of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from longrnn.errors import UserError
from longrnn.files import one_line, write_atomic
from longrnn.hf.layouts.base import LAYOUTS, NAMES, Layout, build, cell_of, renamed
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM


@LAYOUTS.register("hf")
class HuggingFace(Layout):
    """Checkpoints of `Mamba2ForCausalLM`.

    `norm_before_gate`, which older versions wrote, is ignored: transformers has never read it.
    """

    names: ClassVar[Mapping[str, str]] = {**NAMES, "embedding.": "backbone.embeddings."}

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

        # transformers fills in missing values and refuses values that contradict each other.
        try:
            whole = Mamba2Config.from_json_file(source)
        except Exception as error:  # its validation raises errors of several kinds
            raise UserError(
                f"{source} is not a Mamba-2 configuration ({one_line(error)}): copy it again"
            ) from error
        if whole.hidden_act not in ("silu", "swish"):
            raise UserError(
                f"{source} has hidden_act {whole.hidden_act!r}, and longrnn supports only silu: "
                "load this checkpoint with transformers"
            )
        return build(
            {ours: getattr(whole, name) for name, ours in HuggingFace.OPTIONS.items()},
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

        cell, config = cell_of(model, "transformers"), model.config
        if config.norm_eps != cell.norm_eps:
            raise UserError(
                f"transformers has one layer_norm_epsilon, and this model has norm_eps "
                f"{config.norm_eps} in its blocks and {cell.norm_eps} in its cells: convert it to "
                "ours"
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
            time_step_limit=(0.0, math.inf) if cell.dt_limit is None else cell.dt_limit,
            residual_in_fp32=config.residual_in_fp32,
            tie_word_embeddings=config.tie_embeddings,
            architectures=["Mamba2ForCausalLM"],
            dtype=str(model.embedding.weight.dtype).removeprefix("torch."),
            # The defaults belong to the vocabulary of another model.
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        return written.to_json_string()

    @staticmethod
    def save(model: RecurrentLM, folder: Path) -> None:
        from safetensors.torch import save

        tensors = renamed(model, HuggingFace.names)
        if model.config.tie_embeddings:
            del tensors["lm_head.weight"]
        write_atomic(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))

"""How mamba-ssm and transformers name the options of the cells that they have too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class CellNames(NamedTuple):
    """How the other layouts name the options of one kind of cell.

    Attributes:
        options: ours, and their names in mamba-ssm and in transformers.
        native_fixed: what `ssm_cfg` must have for ours to compute the same; its `layer` is named.
        native_ignored: options of initialisation and implementation, which do not change a result.
    """

    options: Mapping[str, tuple[str, str]]
    native_fixed: Mapping[str, Any]
    native_ignored: str


# Options of both cells.
COMMON = {
    "d_state": ("d_state", "state_size"),
    "expand": ("expand", "expand"),
    "d_conv": ("d_conv", "conv_kernel"),
    "bias": ("bias", "use_bias"),
    "conv_bias": ("conv_bias", "use_conv_bias"),
}
CELLS = {
    "mamba": CellNames(
        COMMON | {"dt_rank": ("dt_rank", "time_step_rank")},
        {"layer": "Mamba1"},
        "dt_init dt_init_floor dt_max dt_min dt_scale use_fast_path",
    ),
    "mamba2": CellNames(
        COMMON
        | {
            "head_dim": ("headdim", "head_dim"),
            "n_groups": ("ngroups", "n_groups"),
            "dt_limit": ("dt_limit", "time_step_limit"),
        },
        {
            "layer": "Mamba2",
            "rmsnorm": True,
            "norm_before_gate": False,
            "D_has_hdim": False,
            "d_ssm": None,
        },
        "A_init_range chunk_size conv_init dt_init_floor dt_max dt_min process_group "
        "sequence_parallel use_mem_eff_path",
    ),
}
NATIVE_LAYERS = {names.native_fixed["layer"]: kind for kind, names in CELLS.items()}
# The cells of each `model_type` of transformers.
MODEL_TYPES = {"mamba": "mamba", "falcon_mamba": "mamba", "mamba2": "mamba2"}

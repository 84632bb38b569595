"""Configurations of Mamba-1 and 2 as mamba-ssm and transformers write them, to and from ours.

A configuration that longrnn cannot compute exactly is refused, never approximated.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from longrnn.cells import MIXERS
from longrnn.errors import UserError
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM
from longrnn.options import Count, validated

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
# Options of our cells that do not change what a model with weights computes.
OF_NEW_MODELS = {"A_init", "backend", "dt_max", "dt_min", "init"}
# The cells of each `model_type` of transformers.
MODEL_TYPES = {"mamba": "mamba", "falcon_mamba": "mamba", "mamba2": "mamba2"}


def read_native(config: Mapping[str, Any], source: str) -> RecurrentConfig:
    """Return our configuration for a `config.json` of mamba-ssm, whose path is `source`."""
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


def write_native(model: RecurrentLM, _: str) -> dict[str, Any]:
    """Return the content of a `config.json` of mamba-ssm."""
    kind, options = _cell_options(model, "mamba-ssm")
    names = CELLS[kind]
    content = {theirs: getattr(model.config, name) for name, (theirs, _) in MODEL.items()}
    layer = {"layer": names.native_fixed["layer"]}
    content |= {
        "ssm_cfg": layer | {theirs: options[name] for name, (theirs, _) in names.options.items()},
        "pad_vocab_size_multiple": 1,
    }
    return content | NATIVE_FIXED


def read_hugging_face(config: Mapping[str, Any], source: str) -> RecurrentConfig:
    """Return our configuration for a `config.json` of transformers, whose path is `source`."""
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


def hugging_face_config(model: RecurrentLM) -> Any:
    """Return the configuration of transformers for a model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = model.config
    kind, options = _cell_options(model, "transformers")
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
    defaults = MIXERS.complete({"kind": kind})
    changed = {name: value for name, value in given.items() if value != defaults.get(name, name)}
    mixer = {"mixer": {"kind": kind, **changed}}
    return validated(RecurrentConfig, {**config, **mixer}, source)


def _default_rank(d_model: int) -> int:
    """The length of δ in a Mamba cell where none is given."""
    return -(-d_model // 16)


def _cell_options(model: RecurrentLM, reader: str) -> tuple[str, dict[str, Any]]:
    """Return the kind and the options of the cells, which are the same in all layers.

    Raises:
        UserError: `reader` has no such cells.
    """
    config = model.config
    kind = config.mixer["kind"]
    if kind not in CELLS:
        raise UserError(f"{reader} has no {kind} cells: give a model of {' or '.join(CELLS)} cells")
    options = MIXERS.complete(config.mixer)
    options["dt_limit"] = options.get("dt_limit") or (0.0, math.inf)
    options["dt_rank"] = options.get("dt_rank") or _default_rank(config.d_model)
    return kind, options


def refuse_losses(config: RecurrentConfig, read: RecurrentConfig) -> None:
    """Raise a UserError for an option that is lost when a model is written.

    Args:
        config: of the model.
        read: of what was written.
    """
    options = MIXERS.complete(config.mixer)
    kept = {name: value for name, value in options.items() if name not in OF_NEW_MODELS}
    whole = _configuration(asdict(config), config.mixer["kind"], kept, "the model")
    for name, value in asdict(whole).items():
        if (supported := getattr(read, name)) != value:
            raise UserError(
                f"this layout supports only {name} = {supported!r}, and this model has {value!r}: "
                "convert it to ours"
            )

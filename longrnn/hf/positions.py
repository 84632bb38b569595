"""The positions of a Hugging Face model: tables of them, and scalings of rotary encodings."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from longrnn.errors import UserError

# Rotary scalings under which the rotation of a token depends on the length of the text.
LENGTH_DEPENDENT = {"dynamic", "longrope"}
# What each scaling needs beside `type`, and what else it takes.
SCALING_NUMBERS: dict[str, tuple[set[str], set[str]]] = {
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, set()),
    "longrope": ({"long_factor"}, {"factor", "attention_factor"}),
    "yarn": ({"factor"}, {"attention_factor", "beta_fast", "beta_slow", "truncate"}),
}


def scale_rope(config: Any, options: Mapping[str, Any]) -> None:
    """Give a configuration a scaling of its rotary encoding, as transformers defines it.

    The maximum length becomes that of the configuration times the factor. `longrope` has its long
    factors at every length, so that no rotation depends on the length of a text. Where types of
    layers have encodings of their own, that of full attention is scaled.

    Args:
        config: of a model without a scaling, or for `longrope` with one of this type; changed.
        options: `type`, and the numbers of this type.

    Raises:
        UserError: an encoding or a scaling that is not valid for this.
    """
    config = config.get_text_config(decoder=True)
    kind, given = str(options.get("type")), {k: v for k, v in options.items() if k != "type"}
    rotary = getattr(config, "rope_parameters", None) or {}
    rotary = rotary.get("full_attention") or rotary
    own, length = rotary.get("rope_type"), getattr(config, "max_position_embeddings", None)
    if kind == own == "longrope":
        given = {k: v for k, v in rotary.items() if k in ("long_factor", "factor")} | given
    needed, further = SCALING_NUMBERS.get(kind, (set(), set()))
    written = ", ".join(f"{name}={value}" for name, value in options.items())
    reason = None
    if kind == "dynamic":
        reason = "its rotations depend on the length of a call, and pieces would differ from it"
    elif kind not in SCALING_NUMBERS:
        reason = f"the type is one of {', '.join(SCALING_NUMBERS)}"
    elif not needed <= {*given} <= needed | further:
        reason = f"{kind} needs {', '.join(sorted(needed))}"
    elif own not in ("default", kind) or (own == kind != "longrope") or not length:
        reason = f"this {config.model_type} has the rotary encoding {own}"
    elif not all(value > 0 for name, value in given.items() if name == "factor"):
        reason = "a factor is above 0"
    if reason is not None:
        raise UserError(f"rope({written}) is not valid ({reason}): give rope(type=yarn, factor=4)")
    original = rotary.get("original_max_position_embeddings", length)
    if kind == "longrope":
        given |= {"short_factor": given["long_factor"]}
    if kind in ("yarn", "llama3", "longrope"):
        given["original_max_position_embeddings"] = original
    rotary |= given | {"rope_type": kind}
    config.max_position_embeddings = (
        int(given["factor"] * original) if "factor" in given else length
    )


def scaling_by_length(config: Any) -> str | None:
    """Return why cached keys would change with the length of a text; None if they do not."""
    rotary = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rotary.values() if isinstance(value, dict)]
    for options in (rotary, *nested):
        kind = options.get("rope_type")
        is_fixed = kind == "longrope" and options["short_factor"] == options["long_factor"]
        if kind in LENGTH_DEPENDENT and not is_fixed:
            return f"its rotary positions are scaled by the length, {kind}"
    return None


def table_of_positions(model: Any) -> str | None:
    """Return the name of a table of position embeddings; None if positions are computed.

    In a causal language model, every embedding that is not of tokens is of positions.
    """
    tokens = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        is_of_tokens = module in tokens or "embed_tokens" in name
        if isinstance(module, nn.Embedding) and not is_of_tokens:
            return name
    names = (name for name, _ in model.named_buffers())
    return next((name for name in names if name.endswith("embed_positions")), None)


def rotates(model: Any) -> bool:
    """Whether a model has the frequencies of a rotary encoding, and no other positions."""
    is_alibi = getattr(model.config, "alibi", False)
    return not is_alibi and any(name.endswith("inv_freq") for name, _ in model.named_buffers())

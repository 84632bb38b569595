"""Whether the weights in a folder can be those of the model in its `config.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from longrnn.errors import UserError
from longrnn.models.checkpoint import WEIGHTS

# Sizes in any configuration: numbers of layers, and dimensions of weights.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
WIDTHS = ("hidden_size", "head_dim", "intermediate_size", "num_attention_heads", "vocab_size")


def check_sizes(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse sizes that the weights in a folder cannot have, before anything of them is allocated.

    At least one bit per weight is assumed, and 64 bytes per layer.
    """
    suffixes = {Path(name).suffix for name in WEIGHTS}
    stored = sum(one.stat().st_size for one in folder.iterdir() if one.suffix in suffixes)
    most = {**dict.fromkeys(LAYERS, max(stored // 64, 1000)), **dict.fromkeys(WIDTHS, 8 * stored)}
    for name, size in _sizes(config):
        if stored and not (name in LAYERS) <= size <= most[name]:
            raise UserError(
                f"{folder} cannot be loaded (its config.json has {name} {size}, which the "
                f"{stored:,} bytes of weights in the folder cannot have): copy it again"
            )


def _sizes(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield the numbers of layers and widths in a configuration, also those of its parts."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _sizes(item, key if key in LAYERS + WIDTHS else name)
    elif isinstance(value, list):
        for item in value:
            yield from _sizes(item, name)
    elif name and isinstance(value, int):
        yield name, value

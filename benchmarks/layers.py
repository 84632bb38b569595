"""Layers of longrnn and of transformers of the same sizes, and what bounds their speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from benchmarks.models import MIXER, products_of, read_weights
from longrnn.cells import KDA, Cell, GatedDeltaNet, Mamba, Mamba2, Mamba3
from longrnn.hf.foreign_load import quietly

# Length of keys and values of the cells with the delta rule.
HEAD = 128


class TimedLayer(NamedTuple):
    """A layer to time.

    Attributes:
        title: name of the cell.
        ours: the layer of longrnn.
        theirs: that of transformers; None if transformers has none.
        cache: an empty one for it.
    """

    title: str
    ours: Cell
    theirs: nn.Module | None = None
    cache: Any = None

    def prefill(self, text: Tensor) -> Mapping[str, Callable[[], object]]:
        """Returns functions that read `text` `(1, t, d)`, by name."""
        calls: dict[str, Callable[[], object]] = {
            "longrnn": partial(self.ours, text, self.ours.init_state(1))
        }
        if self.theirs is not None:
            calls["transformers"] = partial(self.theirs, text)
        calls["products alone"] = partial(products_of, self.ours, text.shape[1])
        return calls

    def decoding(self, text: Tensor, steps: int) -> Mapping[str, Callable[[], object]]:
        """Returns functions that read so many tokens one at a time after `text`, by name."""
        tokens = text[:, :steps].split(1, dim=1)
        start = self.ours(text, self.ours.init_state(1))[1]

        def decode() -> None:
            state = start
            for token in tokens:
                _, state = self.ours(token, state)

        calls: dict[str, Callable[[], object]] = {"longrnn": decode}
        if self.theirs is not None:
            layer, cache = self.theirs, self.cache
            layer(text, cache_params=cache)

            def decode_theirs() -> None:
                for token in tokens:
                    layer(token, cache_params=cache)

            calls["transformers"] = decode_theirs
        calls["reading the weights"] = partial(read_weights, self.ours, steps)
        return calls


def mamba(d_model: int) -> TimedLayer:
    """A Mamba-1 with the weights of a `MambaMixer`."""
    from transformers import DynamicCache, MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    config = MambaConfig(hidden_size=d_model, num_hidden_layers=1)
    theirs, cell = MambaMixer(config, 0).eval(), Mamba(d_model, d_model)
    cell.load_state_dict(theirs.state_dict())
    return TimedLayer("Mamba-1", cell, theirs, DynamicCache(config=config))


def mamba2(d_model: int) -> TimedLayer:
    """A Mamba-2 of the shape of the published models."""
    from transformers import DynamicCache, Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    sizes = {name: size for name, size in MIXER.items() if name != "kind"}
    config = Mamba2Config(
        hidden_size=d_model,
        num_hidden_layers=1,
        num_heads=2 * d_model // MIXER["head_dim"],
        head_dim=MIXER["head_dim"],
        n_groups=1,
    )
    theirs = Mamba2Mixer(config, 0).eval()
    cache = DynamicCache(config=config)
    return TimedLayer("Mamba-2", Mamba2(d_model, d_model, **sizes), theirs, cache)


def mamba3(d_model: int) -> TimedLayer:
    """A Mamba-3 of the same shape; transformers has none."""
    return TimedLayer("Mamba-3", Mamba3(d_model, d_model, d_state=128, head_dim=64))


def gated_deltanet(d_model: int) -> TimedLayer:
    """A Gated DeltaNet as in Qwen3-Next."""
    from transformers import DynamicCache, Qwen3NextConfig

    with quietly():
        from transformers.models.qwen3_next import modeling_qwen3_next as module

    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        rule = getattr(module, name)  # wrapped, so that Triton kernels take its place
        setattr(module, name, getattr(rule, "__wrapped__", rule))
    heads = max(2, d_model // 64)
    keys = heads // 2
    cell = GatedDeltaNet(
        d_model, d_model, n_heads=heads, n_key_heads=keys, key_dim=HEAD, value_dim=HEAD
    )
    config = Qwen3NextConfig(
        hidden_size=d_model,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_value_heads=heads,
        linear_num_key_heads=keys,
        linear_key_head_dim=HEAD,
        linear_value_head_dim=HEAD,
    )
    theirs = module.Qwen3NextGatedDeltaNet(config, 0)
    return TimedLayer("Gated DeltaNet", cell, theirs, DynamicCache(config=config))


def kda(d_model: int) -> TimedLayer:
    """A Kimi Delta Attention as in Kimi Linear."""
    from transformers import DynamicCache, KimiLinearConfig

    with quietly():
        from transformers.models.kimi_linear import modeling_kimi_linear as module

    for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
        rule = getattr(module, name)
        setattr(module, name, getattr(rule, "__wrapped__", rule))
    heads = max(1, d_model // HEAD)
    config = KimiLinearConfig(
        hidden_size=d_model,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        mlp_layer_types=["dense"],
        linear_head_dim=HEAD,
        linear_num_heads=heads,
    )
    theirs = module.KimiLinearDeltaAttention(config, 0).eval()
    cell = KDA(d_model, d_model, n_heads=heads, key_dim=HEAD, value_dim=HEAD)
    return TimedLayer("Kimi Delta Attention", cell, theirs, DynamicCache(config=config))


LAYERS: Mapping[str, Callable[[int], TimedLayer]] = {
    "mamba": mamba,
    "mamba2": mamba2,
    "mamba3": mamba3,
    "gated_deltanet": gated_deltanet,
    "kda": kda,
}

"""Layers and models of longrnn and of transformers of the same sizes, and what bounds them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.models import MIXER, build, products, read_weights, transformers_twin
from longrnn import RecurrentConfig, RecurrentLM
from longrnn.cells import KDA, Cell, GatedDeltaNet, Mamba3
from longrnn.hf.foreign_load import quietly, use_torch_on_cpu
from longrnn.hf.hybrid.families import FAMILIES

BACKENDS = {"longrnn": "auto", "longrnn, backend torch": "torch"}
# Lengths of keys and values of the cells with the delta rule.
HEAD: dict[str, Any] = {"key_dim": 128, "value_dim": 128}


class Timed(NamedTuple):
    """A layer or a model to time, beside that of transformers.

    Attributes:
        title: of the layer or the model.
        ours: of longrnn, by name; all have the weights of the first.
        theirs: of transformers; None if it has none.
        cache: an empty one for `theirs`.
        our_options: of every call of ours.
        their_options: of every call of theirs.
    """

    title: str
    ours: Mapping[str, RecurrentLM | Cell]
    theirs: nn.Module | None = None
    cache: Any = None
    our_options: Mapping[str, Any] = {}
    their_options: Mapping[str, Any] = {}

    def prefill(self, text: Tensor) -> Mapping[str, Callable[[], Any]]:
        """Returns functions that read `text` `(b, t)` or `(b, t, d)`, by name."""
        calls: dict[str, Callable[[], Any]] = {
            name: partial(module, text, module.init_state(len(text)), **self.our_options)
            for name, module in self.ours.items()
        }
        if self.theirs is not None:
            calls["transformers"] = partial(self.theirs, text, **self.their_options)
        calls["products alone"] = partial(products, self.ours["longrnn"], text.shape[1])
        return calls

    def training(self, text: Tensor) -> Mapping[str, Callable[[], Any]]:
        """Returns functions that read `text` `(b, t, d)` and compute all gradients, by name."""

        def with_gradients(read: Callable[[], Any]) -> None:
            y = read()
            if y is not None:  # the products compute their own gradients
                (y if isinstance(y, Tensor) else y[0]).sum().backward()

        calls = self.prefill(text.clone().requires_grad_())
        return {name: partial(with_gradients, read) for name, read in calls.items()}

    def decoding(self, text: Tensor, tokens: Tensor) -> Mapping[str, Callable[[], object]]:
        """Returns functions that read `tokens` one at a time after `text`, by name."""
        pieces = tokens.split(1, dim=1)

        def ours(module: RecurrentLM | Cell, state: Any) -> None:
            for piece in pieces:
                _, state = module(piece, state, **self.our_options)

        def theirs(module: nn.Module) -> None:
            for piece in pieces:
                module(piece, cache_params=self.cache, **self.their_options)

        calls: dict[str, Callable[[], object]] = {}
        for name, module in self.ours.items():
            _, state = module(text, module.init_state(len(text)), **self.our_options)
            calls[name] = partial(ours, module, state)
        if self.theirs is not None:
            self.theirs(text, cache_params=self.cache, **self.their_options)
            calls["transformers"] = partial(theirs, self.theirs)
        steps = tokens.shape[1]
        calls["reading the weights"] = partial(read_weights, self.ours["longrnn"], steps)
        return calls


def timed_model(args: argparse.Namespace, dtype: torch.dtype) -> Timed:
    """A Mamba-1 or Mamba-2 with each backend, and that of transformers with equal weights."""
    from transformers import DynamicCache

    ours = {name: build(args, backend).to(dtype) for name, backend in BACKENDS.items()}
    theirs = transformers_twin(ours["longrnn"])
    cache = DynamicCache(config=theirs.config)
    title = ours["longrnn"].config.mixer["kind"]
    return Timed(title, ours, theirs, cache, {"keep": 1}, {"logits_to_keep": 1})


def mamba_layer(title: str, mixer: dict[str, Any], d_model: int) -> Timed:
    """A Mamba-1 or 2, beside the same layer of transformers with its weights."""
    from transformers import DynamicCache

    model = RecurrentLM(RecurrentConfig(8, d_model, 1, mixer)).eval()
    twin = transformers_twin(model)
    layer, cache = twin.backbone.layers[0].mixer, DynamicCache(config=twin.config)
    return Timed(title, {"longrnn": model.cells[0]}, layer, cache)


def mamba3(d_model: int) -> Timed:
    """A Mamba-3 of the same shape; transformers has none."""
    return Timed("Mamba-3", {"longrnn": Mamba3(d_model, d_model, d_state=128, head_dim=64)})


def hybrid_layer(title: str, cell: Cell, kind: str, **sizes: Any) -> Timed:
    """A cell, beside the layer of a hybrid whose configuration has these sizes."""
    from transformers import AutoConfig, DynamicCache

    config = AutoConfig.for_model(kind, num_hidden_layers=1, hidden_size=cell.d_model, **sizes)
    with quietly():
        module = import_module(f"transformers.models.{kind}.modeling_{kind}")
    theirs = getattr(module, FAMILIES[kind].layer)(config, 0).eval()
    use_torch_on_cpu(theirs)
    return Timed(title, {"longrnn": cell}, theirs, DynamicCache(config=config))


def gated_deltanet(d_model: int) -> Timed:
    """A Gated DeltaNet as in Qwen3-Next."""
    heads = max(2, d_model // 64)
    return hybrid_layer(
        "Gated DeltaNet",
        GatedDeltaNet(d_model, d_model, n_heads=heads, n_key_heads=heads // 2, **HEAD),
        "qwen3_next",
        layer_types=["linear_attention"],
        linear_num_value_heads=heads,
        linear_num_key_heads=heads // 2,
        linear_key_head_dim=HEAD["key_dim"],
        linear_value_head_dim=HEAD["value_dim"],
    )


def kda(d_model: int) -> Timed:
    """A Kimi Delta Attention as in Kimi Linear."""
    heads = max(1, d_model // HEAD["key_dim"])
    return hybrid_layer(
        "Kimi Delta Attention",
        KDA(d_model, d_model, n_heads=heads, **HEAD),
        "kimi_linear",
        layer_types=["linear_attention"],
        mlp_layer_types=["dense"],
        linear_num_heads=heads,
        linear_head_dim=HEAD["key_dim"],
    )


LAYERS: Mapping[str, Callable[[int], Timed]] = {
    "mamba": partial(mamba_layer, "Mamba-1", {"kind": "mamba"}),
    "mamba2": partial(mamba_layer, "Mamba-2", MIXER),
    "mamba3": mamba3,
    "gated_deltanet": gated_deltanet,
    "kda": kda,
}

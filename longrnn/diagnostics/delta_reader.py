"""`DeltaReader`: reads the state matrices of Gated DeltaNet layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from longrnn.diagnostics.observers import OutputMeans
from longrnn.diagnostics.readers import Kept, Reader
from longrnn.hf.adapter import HFLanguageModel
from longrnn.hf.delta import DeltaWatch, gate_norm_output
from longrnn.models.base import LMOutput
from longrnn.state import LMState


class DeltaReader(Reader):
    """Reads the state matrices of Gated DeltaNet layers, which transformers computes.

    A channel is one entry of the values: memories are S transposed, `(b, h, d_v, d_k)`.

    Args:
        model: one with such layers.
    """

    def __init__(self, model: HFLanguageModel) -> None:
        self.model, self.watch = model, DeltaWatch(model)
        self.n_layers, self.n_heads = len(self.watch.layers), self.watch.layers[0].num_v_heads

    @contextmanager
    def watching(self) -> Iterator[list[OutputMeans]]:
        outputs = [OutputMeans() for _ in self.watch.layers]
        handles = []
        with self.watch:
            try:
                for layer, output in zip(self.watch.layers, outputs, strict=True):
                    handles.append(layer.register_forward_hook(output.see_tensor))
                    projection = gate_norm_output(layer)
                    handles.append(projection.register_forward_pre_hook(output.see_input))
                yield outputs
            finally:
                for handle in handles:
                    handle.remove()

    def start(self, batch_size: int) -> LMState:
        return self.model.init_state(batch_size)

    def process(self, tokens: Tensor, state: LMState) -> LMOutput:
        return self.model(tokens, state)

    def memories(self, state: LMState) -> list[Tensor]:
        return [matrix.transpose(-1, -2) for matrix in self.watch.states(state)]

    def mark(self) -> None:
        self.watch.mark()

    def kept(self, layer: int, marked: Tensor | None) -> Kept | None:
        transfer = self.watch.transfers[layer]
        assert transfer is not None, "tokens were processed"
        total = transfer.total.double()
        retention = total.flatten(2).norm(dim=-1) / total.shape[-1] ** 0.5
        # S = M S_marked, and the memory is S transposed.
        first = None
        if marked is not None:
            first = marked.double() @ transfer.recent.double().transpose(-1, -2)
        return Kept(retention, first)

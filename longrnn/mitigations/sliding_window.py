"""`sliding_window`: limits the memory of a head to its last tokens."""

from torch import Tensor

from longrnn.cells import Cell, Edit
from longrnn.mitigations.base import MITIGATIONS, Mitigation
from longrnn.options import Tokens


@MITIGATIONS.register("sliding_window")
class SlidingWindow(Mitigation):
    """The state of a head depends on its last `window` inputs only (arXiv 2410.07145).

    h_t = Σ_{i = t−w+1 … t} a_{i+1} … a_t u_i. The paper computes it as a difference of two states,
    this implementation as a sum (see `longrnn.ops.scan.window`). In an LSTM and a GRU the same
    holds for the memory, given its gates. A layer computes the same as a scan over its last w
    inputs from a zero state; a token of the last layer depends on about (number of layers) · w
    tokens. Memory from before the first token, in a given state, is outside the window.

    The model's state holds the inputs of the last min(w, tokens read) tokens: h p + g n numbers per
    token and layer in the dtype of the weights, and 2 h in float32. For the 130m shape these are
    160 KB per token in float32, so 1.3 GB at w = 8,192, and up to a quarter more while tokens are
    generated. A generated token reads all of them.

    Args:
        window: w >= 1, in tokens.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    window: Tokens

    @classmethod
    def undefined(cls, cell: type[Cell]) -> str | None:
        if not cell.diagonal:
            return (
                "its transitions are matrices, by which a window cannot weight its inputs in a "
                "scan; use forget_more"
            )
        return None if cell.gated else "its state is not a sum over past inputs; use state_norm"

    def bind(self, layer: int, heads: Tensor) -> Edit:
        return Edit(window=self.window, heads=None if bool(heads.all()) else heads)

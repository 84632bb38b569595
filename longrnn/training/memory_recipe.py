"""The options of `longrnn linearize`, which the command line reads without torch."""

from typing import Annotated

from pydantic import Field

from longrnn.options import Count, Layers, Options, Tokens


class MemoryRecipe(Options):
    """What a memory for a transformer is made of, and how long it is trained."""

    window: Tokens = 64
    """How many tokens attention reads."""
    sinks: Annotated[int, Field(ge=0)] = 4
    """How many first tokens it reads beside them."""
    length: Tokens = 1024
    """Tokens of a row, which the transformer reads whole."""
    layers: Layers | None = None
    """Layers that get a memory, counted from 0, such as 4-12,20 (default: all); the others have the
    window alone."""
    replace: Count | None = None
    """Number of layers whose attention a Mamba-2 replaces as a whole: those where full attention
    lowers the loss least, which is measured and listed. The others keep it; no layer has a window.
    The result is a GraniteMoeHybrid without experts."""
    keys: Annotated[int, Field(ge=0)] = 0
    """Rows of each batch with keys in their text, up to 8, which questions at their end ask for.
    Their distance grows over `task.grow_steps` (100) steps up to the whole row."""
    lora: Count | None = None
    """Rank of adapters of the attention, which the second stage trains too; OUTPUT/teacher is then
    an adapter of OUTPUT/attention."""
    budget: Annotated[float, Field(gt=0)] | None = None
    """Minutes for both stages, which then have as many steps as fit, by the speed measured, instead
    of max_steps."""

"""Settings of a calibration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from longrnn.errors import UserError
from longrnn.options import Count, Options, Seed, Tokens
from longrnn.units import format_length

Share = Annotated[float, Field(gt=0, le=1)]


class Settings(Options):
    """What a method of `longrnn.diagnostics.calibrate` reads."""

    train_length: Annotated[Tokens, Field(ge=2)] | None = Field(
        default=None,
        description="Length that the model was trained on (default: length.max of train.yaml).",
    )
    target_length: Tokens | None = Field(
        default=None,
        description="Length at which the model should work; all methods but state_norm need it.",
    )
    windows: Count = Field(default=32, description="Maximum number of windows of text.")
    margin: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=1.0,
        description="state_norm, per_head: ratio of the threshold to the largest norm seen.",
    )
    quantile: Share | None = Field(
        default=None,
        description="token_filter, per_head: share of tokens to filter out (default: 1 − training "
        "length / target length).",
    )
    share: Share | None = Field(
        default=None,
        description="scale_delta: instead of a search, divide the step sizes by target length / "
        "training length in this share of the heads, those with the longest receptive fields.",
    )
    steps: Count = Field(default=30, description="Steps of the search for factors.")
    seed: Seed = Field(default=0, description="Random seed of the search, and of the keys.")
    keys: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="per_head: passkey prompts of the target length whose answers count beside the "
        "loss of the text.",
    )
    passes: Annotated[int, Field(ge=5)] = Field(
        default=300,
        description="per_head: the maximum number of passes over all windows and prompts.",
    )

    def check(self) -> None:
        """Refuse a target within the training length.

        Raises:
            UserError: with both lengths.
        """
        if self.target_length is not None and self.target_length <= self.trained():
            raise UserError(
                f"the target length {format_length(self.target_length)} must be above the "
                f"training length {format_length(self.trained())}: give a greater one"
            )

    def trained(self) -> int:
        """Return the training length.

        Raises:
            UserError: there is none.
        """
        if self.train_length is None:
            raise UserError("the training length is not known: give --train-length")
        return self.train_length

    def target(self) -> int:
        """Return the target length.

        Raises:
            UserError: there is none.
        """
        if self.target_length is None:
            raise UserError(
                "this method needs --target-length: give the length that the model should reach"
            )
        return self.target_length

    def filtered(self) -> float:
        """Return the share of tokens to filter out."""
        return 1 - self.trained() / self.target() if self.quantile is None else self.quantile

"""Train other weights by the loss and the steps of `fit(select=true)`, or the same otherwise.

    python scripts/study_fit.py recall-collapse --trained lora --text TEXT --length 64k --rate 0.01
    python scripts/study_fit.py recall-collapse --trained steps --keys-too --text TEXT --rate 0.002

`lora` and `all` train weights as in the checkpoint; `steps` trains what the fit does, with a pull
towards the checkpoint, or, of a Mamba-2, with the rows that make B and C. Text, rows with keys,
carried states, steps and their schedule are those of `longrnn calibrate`. The result is a
checkpoint, which `longrnn eval` measures beside a fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import studies
import torch

from longrnn.cells.mamba2 import Mamba2
from longrnn.cells.weights import Part, rows_from
from longrnn.checkpoints.adapters import add_adapters
from longrnn.diagnostics.fit import TimeScaleFit
from longrnn.diagnostics.fitted import Additions, spread
from longrnn.diagnostics.job import Job
from longrnn.errors import UserError
from longrnn.training.models import save
from longrnn.units import parse_length


class WeightsFit(TimeScaleFit):
    """`fit(select=true)` that trains weights of the model itself.

    Attributes:
        trained: all of them.
    """

    trained: list[Any]

    def train(self, job: Job) -> None:
        """Take all steps, which change the weights."""
        with torch.enable_grad():
            self._train(job, [Additions(None, None, {}) for _ in job.model.cells])

    def _groups(self, layers: Sequence[Additions]) -> list[dict[str, Any]]:
        return [{"params": self.trained, "scale": self.learning_rate}]


class KeyedMamba2(Mamba2):
    """A Mamba-2 of which a fit trains the rows that make B and C too."""

    @property
    def step_weights(self) -> dict[str, Part]:
        return {"in_proj.weight": rows_from(-self.n_heads - 2 * self.n_groups * self.d_state)}


class StepsFit(TimeScaleFit):
    """`fit(select=true)` with a change.

    Attributes:
        pull: the gradient gets this many times the additions to weights.
        keys_too: train the rows of a Mamba-2 that make B and C too.
    """

    pull: float = 0.0
    keys_too: bool = False

    def train(self, job: Job) -> None:
        """Take all steps, and add what they reached to the weights."""
        layers = [Additions.of(cell, select=True) for cell in job.model.cells]
        spread(job, layers)
        if self.keys_too:
            layers = with_keys(job.model.cells, layers)
        with torch.enable_grad():
            self._train(job, layers)
        for cell, additions in zip(job.model.cells, layers, strict=True):
            for name, weight in (cell.fold(additions.added(None)) or {}).items():
                attrgetter(name)(cell).copy_(weight)

    def _groups(self, layers: Sequence[Additions]) -> list[dict[str, Any]]:
        *others, weights = super()._groups(layers)
        return [*others, weights | {"weight_decay": self.pull}]


def with_keys(cells: Sequence[Any], layers: Sequence[Additions]) -> list[Additions]:
    """Return additions to the dt rows of Mamba-2 with those to B and C, which begin at 0."""
    found = []
    for cell, additions in zip(cells, layers, strict=True):
        if not isinstance(cell, Mamba2):
            raise UserError("--keys-too is defined for Mamba-2 alone: leave it out")
        cell.__class__ = KeyedMamba2
        steps = additions.weights["in_proj.weight"].detach()
        keys = steps.new_zeros(2 * cell.n_groups * cell.d_state, steps.shape[1])
        both = torch.cat([keys, steps]).requires_grad_(True)
        found.append(additions._replace(weights={"in_proj.weight": both}))
    return found


@torch.no_grad()
def main() -> None:
    parser = studies.options(__doc__, "runs/fit")
    parser.add_argument("checkpoint")
    parser.add_argument("--trained", choices=["lora", "all", "steps"], required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--length", type=parse_length, default=2**16)
    parser.add_argument("--rate", type=float, required=True, help="the highest, of weights")
    parser.add_argument("--rank", type=int, default=1, help="of the LoRA of in_proj and out_proj")
    parser.add_argument("--pull", type=float, default=0.0, help="weight decay of additions")
    parser.add_argument("--keys-too", action="store_true", help="the rows of B and C with steps")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--keys", type=int, default=4, help="rows with a passkey")
    args = parser.parse_args()
    if args.output.exists():
        raise UserError(f"{args.output} exists: give another --output")
    torch.manual_seed(0)
    job = Job.open(args.checkpoint, args.text, None, args.length, device=None)
    model: Any = job.model
    steps = {"steps": args.steps, "keys": args.keys, "select": True}
    if args.trained == "steps":
        model.requires_grad_(False)
        how = {"pull": args.pull, "keys_too": args.keys_too}
        StepsFit(**steps, **how, weights_learning_rate=args.rate).train(job)
    else:
        model.requires_grad_(True)
        if args.trained == "lora":
            model.base_name = args.checkpoint
            add_adapters(model, r=args.rank, targets=["in_proj", "out_proj"], full=[])
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        WeightsFit(**steps, learning_rate=args.rate, trained=trained).train(job)
        print(f"trained {sum(weight.numel() for weight in trained):,} numbers: {args.output}")
    save(model, args.output, model.state_dict(), job.tokenizer)


if __name__ == "__main__":
    studies.run(main)

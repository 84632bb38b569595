"""Train other weights by the loss and the steps of `fit(select=true)`.

    python scripts/study_fit.py recall-collapse --trained lora --text TEXT --length 64k --rate 0.01

`lora` trains adapters of rank 1, and `all` trains every weight. Text, rows with keys, carried
states, steps and their schedule are those of `longrnn calibrate`. The result is a checkpoint, which
`longrnn eval` measures beside a fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import studies
import torch

from longrnn.checkpoints.adapters import add_adapters
from longrnn.diagnostics.fit import TimeScaleFit
from longrnn.diagnostics.fitted import Additions
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
        self._train(job, [Additions(None, None, {}) for _ in job.model.cells])

    def _groups(self, layers: Sequence[Additions]) -> list[dict[str, Any]]:
        return [{"params": self.trained, "scale": self.learning_rate}]


def main() -> None:
    parser = studies.options(__doc__, "runs/fit")
    parser.add_argument("checkpoint")
    parser.add_argument("--trained", choices=["lora", "all"], required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--length", type=parse_length, default=2**16)
    parser.add_argument("--rate", type=float, required=True, help="the highest, of weights")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--keys", type=int, default=4, help="rows with a passkey")
    args = parser.parse_args()
    if args.output.exists():
        raise UserError(f"{args.output} exists: give another --output")
    torch.manual_seed(0)
    job = Job.open(args.checkpoint, args.text, None, args.length, device=None)
    model: Any = job.model
    model.requires_grad_(True)
    if args.trained == "lora":
        model.base_name = args.checkpoint
        add_adapters(model, r=1, targets=["in_proj", "out_proj"], full=[])
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    steps = {"steps": args.steps, "keys": args.keys, "select": True}
    WeightsFit(**steps, learning_rate=args.rate, trained=trained).train(job)
    print(f"trained {sum(weight.numel() for weight in trained):,} numbers: {args.output}")
    save(model, args.output, model.state_dict(), job.tokenizer)


if __name__ == "__main__":
    studies.run(main)

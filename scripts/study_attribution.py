"""Attribute the gradient of a run to rare and to frequent tokens, at each checkpoint.

    longrnn train reverse_dual_lstm max_steps=100 save_steps=50 output_dir=runs/dual
    python scripts/study_attribution.py runs/dual

ArXiv 2402.00236 attributes the instability of training with a large vocabulary to rare tokens. For
one sequence with loss l, the row of a token in the embedding has the gradient of l at all places
where the sequence has this token. The squares of these gradients are summed over rare and over
frequent tokens; what reaches the embedding through a tied head is not counted. Sequences are drawn
as in training, from `reverse_dual_frequency`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from studies import estimate, options, record, run, shown, table
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn import TASKS, load
from longrnn.errors import UserError


def main() -> None:
    parser = options(__doc__, "runs/attribution")
    parser.add_argument("run", type=Path, help="output_dir of a run on reverse_dual_frequency")
    parser.add_argument("--n", type=int, default=1024, help="sequences")
    args = parser.parse_args()
    file = args.run / "train.yaml"
    trained = yaml.safe_load(file.read_text()) if file.is_file() else {}
    task: Any = TASKS.build(trained["task"]) if "task" in trained else None
    if not getattr(task, "frequency_classes", dict)():
        raise UserError(f"{args.run} is not a run on reverse_dual_frequency: give its output_dir")
    batch = task.sample(args.n, length=trained["length"]["max"])
    masks = torch.zeros(2, task.vocab_size, dtype=torch.bool)
    for mask, name in zip(masks, ("rare", "frequent"), strict=True):
        mask[list(task.frequency_classes()[name])] = True
    rows, shares = [], []
    for folder in sorted(args.run.glob("checkpoint-*")):
        squares, counts = attribution(load(folder), batch.tokens, batch.targets, masks)
        shares.append(estimate((squares[0] / squares.sum(0)).tolist()))
        per_token = (squares.sum(1) / counts.sum(1)).tolist()
        rows.append([folder.name, shares[-1], *(f"{value:.3g}" for value in per_token)])
    if not rows:
        raise UserError(f"{args.run} has no checkpoints: train with save_steps")
    drawn = masks[0][batch.tokens[:, : trained["length"]["max"]]].double().mean()
    record(
        args.output,
        f"Attribution of the gradient: {args.run}",
        table(["checkpoint", "share of rare tokens", "per rare token", "per frequent token"], rows),
        f"**Verdict.** {float(drawn):.1%} of the drawn tokens are rare; at the last checkpoint "
        f"they have {shown(shares[-1])} of the squared gradient.",
    )


def attribution(
    model: Any, tokens: Tensor, targets: Tensor, masks: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns squared gradients at the rows of each class, and the number of these rows.

    Args:
        model: any recurrent model.
        tokens: `(n, t)`.
        targets: `(n, t)`.
        masks: `(classes, v)` bool, the ids of each class.

    Returns:
        Both `(classes, n)` float64.
    """
    squares, counts = [], []
    for part, wanted in zip(tokens.split(64), targets.split(64), strict=True):
        seen: list[Tensor] = []

        def keep(module: nn.Module, args: Any, vectors: Tensor, seen: list[Tensor] = seen) -> None:
            seen.append(vectors)

        handle = model.embedding.register_forward_hook(keep)
        logits = model(part).logits
        handle.remove()
        loss = F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none")
        total = (loss.sum(1) / (wanted >= 0).sum(1)).sum()  # sequences are independent
        gradient = torch.cat(torch.autograd.grad(total, seen), dim=1).double()
        same = part[:, :, None] == part[:, None, :]
        # ‖Σ g_i‖² over the places of a token is Σ_ij g_i · g_j.
        at_places = (gradient @ gradient.mT * same).sum(2)
        member = masks[:, part]
        squares.append((member * at_places).sum(2))
        counts.append((member / same.sum(2)).sum(2))
    return torch.cat(squares, 1), torch.cat(counts, 1).round()


if __name__ == "__main__":
    run(main)

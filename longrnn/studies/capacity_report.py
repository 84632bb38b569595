"""Reads what was recorded of a family of models, fits its capacity, and prints and writes both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longrnn.config import read_recorded
from longrnn.console import print_table
from longrnn.diagnostics.record import state_size
from longrnn.errors import UserError
from longrnn.hf.load import load_recurrent
from longrnn.hf.training_length import training_length
from longrnn.locks import Lock
from longrnn.studies import capacity, capacity_fits
from longrnn.studies.capacity import Member, Size
from longrnn.studies.capacity_fits import RATIO_PARAMETERS, Fit, conclusion
from longrnn.studies.capacity_plot import write
from longrnn.units import format_length


def report(checkpoints: Sequence[str], results: Sequence[Path], folder: Path) -> list[Path]:
    """Prints the capacity of a family and writes `capacity.jsonl` and `capacity.png`.

    Args:
        checkpoints: the family, as folders of runs.
        results: recorded evaluations of these models: files, or folders that are searched.
        folder: where to write; it is locked until the process ends.

    Returns:
        The files that were written.

    Raises:
        UserError: the training length of a model is not known, or as `capacity.read_recorded`.
    """
    recorded = capacity.read_recorded(results)
    members = []
    for name in dict.fromkeys(checkpoints):
        trained = training_length(name)
        if trained is None:
            raise UserError(f"{name} has no train.yaml with its training length: give run folders")
        model = load_recurrent(name)
        seed = int(read_recorded(Path(name)).get("seed", 0))
        about = (model.fingerprint(), state_size(model), trained, seed)
        members.append(capacity.member(name, *about, recorded))
    members.sort(key=lambda one: (one.state_size, one.seed, one.train_length))
    sizes = capacity.sizes(members)
    fits = {
        name: [
            capacity_fits.fit(form, [(size.state_size, getattr(size, name)) for size in sizes])
            for form in forms
        ]
        for name, forms in capacity_fits.FITTED.items()
    }
    Lock.of_folder(folder, instead="choose another --output").hold_until_exit()
    written = write(members, sizes, fits, folder)
    _print(members, sizes)
    for name, fitted in ((name, one) for name, all_ in fits.items() for one in all_):
        print(f"T_{name}: {fitted}")
        slope = fitted.slope() if isinstance(fitted, Fit) else None
        if isinstance(fitted, Fit) and slope is not None:
            settled = conclusion(slope, len(fitted.parameters), "points (state sizes × seeds)")
            print(f"  slope: {settled}")
    ratio = capacity_fits.ratio_by_size_and_length(members)
    if isinstance(ratio, str):
        print(ratio)
    else:
        print(
            f"log2 of loss beyond / inside: {ratio.by_state} per doubling of the state, "
            f"{ratio.by_length} per doubling of the training length ({ratio.by_state.n} models)"
        )
        for name, slope in (("state", ratio.by_state), ("training length", ratio.by_length)):
            print(f"  {name}: {conclusion(slope, RATIO_PARAMETERS, 'models')}")
    print("N: thousands of numbers in the state; intervals 95 %, Student-t")
    return written


def _print(members: Sequence[Member], sizes: Sequence[Size]) -> None:
    """Prints one table of the models and one of the state sizes and seeds."""
    from rich.table import Table

    width = 100 + max(len(one.name) for one in members)
    table = Table()
    for name in (
        "model",
        "state",
        "seed",
        "trained on",
        "loss beyond / inside",
        "forgets robustly",
    ):
        table.add_column(name)
    table.add_column("recalls up to")
    for one in members:
        table.add_row(
            one.name,
            f"{one.state_size:,}",
            str(one.seed),
            format_length(one.train_length),
            "–" if one.beyond is None else f"{one.beyond:.2f}",
            {None: "–", True: "yes", False: "no"}[one.robust],
            {None: "–", 0: "none"}.get(one.recalled, format_length(one.recalled or 0)),
        )
    print_table(table, width)
    table = Table()
    for name in ("state", "seed", "T_forget", "T_recall"):
        table.add_column(name)
    for size in sizes:
        table.add_row(
            f"{size.state_size:,}",
            str(size.seed),
            *("–" if point is None else str(point) for point in (size.forget, size.recall)),
        )
    print_table(table, width)

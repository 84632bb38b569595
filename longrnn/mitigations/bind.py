"""Binds mitigations to the cells of a model: which heads of which layers they change, and how."""

from collections.abc import Callable, Sequence
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longrnn.cells import Cell, Edit, merge
from longrnn.cells.base import kind_of
from longrnn.errors import UserError
from longrnn.mitigations.base import COLLAPSING, Chain, Mitigation, Pairs
from longrnn.mitigations.values import check_sizes
from longrnn.options import validated
from longrnn.yaml import read_mapping


class Bound(NamedTuple):
    """A mitigation of a model.

    Attributes:
        mitigation: the mitigations in order; its description refers to no file.
        heads: per part and layer, the heads that are changed, `(h,)` bool.
        edits: one per layer; None where nothing is changed.
    """

    mitigation: Chain
    heads: list[list[Tensor]]
    edits: list[Edit | None]


def bind(chain: Chain, cells: Sequence[Cell], fingerprint: Callable[[], str]) -> Bound:
    """Binds mitigations to the cells of a model.

    Args:
        chain: the mitigations.
        cells: of the model, first layer first.
        fingerprint: returns that of the model without mitigation; called if it is compared.

    Raises:
        UserError: a mitigation that is not defined for the cells, layers or heads that do not
            exist, numbers calibrated for another model, or members that exclude each other.
    """
    for part in chain.parts:
        _check(part, cells, fingerprint)
    heads = [_select(part, cells, fingerprint) for part in chain.parts]
    chain = Chain(tuple(map(_without_files, chain.parts, heads)))
    edits = []
    for layer, cell in enumerate(cells):
        pairs = zip(chain.parts, heads, strict=True)
        chosen = [part.bind(layer, masks[layer]) for part, masks in pairs if masks[layer].any()]
        edit = merge(chosen)
        _check_weights(edit, cell)
        edits.append(edit if edit.stages else None)
    return Bound(chain, heads, edits)


def _check_weights(edit: Edit, cell: Cell) -> None:
    """Refuses additions to weights that a cell does not have, or of other sizes."""
    for name in ("rate", "bias"):
        addition = getattr(edit, name)
        if addition is None:
            continue
        if getattr(cell, f"{name}_weight") is None:
            raise UserError(
                f"time_scales has no option {name} for {cell.kind}, whose {name} is not a weight: "
                "leave it out"
            )
        cell.fold(Edit(**{name: addition}).to(cell.device))  # refuses other sizes
    for name, addition in (edit.weights or {}).items():
        part = cell.step_weights.get(name)
        if part is None or attrgetter(name)(cell)[part].shape != addition.shape:
            raise UserError(
                f"time_scales has an addition {tuple(addition.shape)} to {name}, which is not one "
                f"of the weights that make the steps of {cell.kind}: calibrate for this model"
            )


def check_defined(part: type[Mitigation] | Mitigation, cell: type[Cell]) -> None:
    """Raises a `UserError` if a mitigation is not defined for a kind of cell."""
    reason = part.undefined(cell)
    if reason is not None:
        raise UserError(f"{part.name} is not defined for {kind_of(cell)}: {reason}")


def _without_files(part: Mitigation, masks: Sequence[Tensor]) -> Mitigation:
    """A mitigation with the heads that its diagnosis lists in place of the diagnosis."""
    if part.heads != COLLAPSING:
        return part
    pairs = [[layer, int(h)] for layer, mask in enumerate(masks) for h in mask.nonzero()[:, 0]]
    return part.model_copy(update={"diagnosis": None, "heads": pairs})


def _check(part: Mitigation, cells: Sequence[Cell], fingerprint: Callable[[], str]) -> None:
    """Refuses a mitigation that is not defined for cells or was calibrated for another model."""
    known = part.calibration
    if known is not None and known.fingerprint != (current := fingerprint()):
        raise UserError(
            f"{known.source} was calibrated for another model (fingerprint {known.fingerprint}, "
            f"this model has {current}): calibrate again"
        )
    check_defined(part, type(cells[0]))
    for option in part.own_options():
        check_sizes(option, getattr(part, option), [cell.n_heads for cell in cells])


def _select(
    part: Mitigation, cells: Sequence[Cell], fingerprint: Callable[[], str]
) -> list[Tensor]:
    """The heads that a mitigation changes, per layer, `(h,)` bool.

    Raises:
        UserError: layers or heads that the model does not have, or a diagnosis that cannot be used.
    """
    counts = [cell.n_heads for cell in cells]
    heads: Any = _collapsing(part, fingerprint) if part.heads == COLLAPSING else part.heads
    every = range(len(counts))
    layers = every if part.layers is None else part.layers
    pairs = heads
    if not heads or isinstance(heads[0], int):
        pairs = list(product(layers, [None] if heads is None else heads))
    for layer in (*layers, *(layer for layer, _ in pairs)):
        if layer not in every:
            raise UserError(f"the model has no layer {layer}: use 0 to {len(counts) - 1}")
    masks = [torch.zeros(count, dtype=torch.bool) for count in counts]
    for layer, head in pairs:
        if head is not None and head >= counts[layer]:
            raise UserError(f"layer {layer} has no head {head}: use 0 to {counts[layer] - 1}")
        if layer in layers:
            masks[layer][slice(None) if head is None else head] = True
    return masks


def _collapsing(part: Mitigation, fingerprint: Callable[[], str]) -> Pairs:
    """The pairs [layer, head] that the diagnosis lists."""
    path, remedy = Path(str(part.diagnosis)), "make one with `longrnn diagnose states CHECKPOINT`"
    diagnosis = read_mapping(path, remedy, kind="diagnosis file")
    where = f"{path}, which must be the diagnosis.yaml of diagnose states"
    pairs = validated(Pairs, diagnosis.get(COLLAPSING), where)
    if diagnosis.get("fingerprint") not in (None, fingerprint()):
        raise UserError(f"{path} is the diagnosis of another model: make one of this model")
    if not pairs:
        raise UserError(
            f"{path} lists no collapsing head: leave the mitigation out, or give its heads"
        )
    return pairs

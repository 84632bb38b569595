"""The state of a language model as a value, and the functions over it.

A state is a tree of tensors (named tuples, tuples and lists nest freely) whose every leaf has the
batch as its first axis. Nothing here changes a state in place: a state that was kept is never used
up by its readers. `reset` selects with `torch.where` and never multiplies, so that a NaN cannot
survive a reset. What grows with the text, such as the keys of a transformer, stands in a `History`,
so that rows that have read different numbers of tokens go together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.errors import UserError

PyTree: TypeAlias = Any
S = TypeVar("S")

# What `save` writes.
FORMAT = "longrnn-state-2"
# More than any sequence has; sums of two positions still fit into int64.
MOST_TOKENS = 2**53


class LMState(NamedTuple):
    """Everything a language model remembers.

    Attributes:
        position: `(b,)` int64, tokens consumed so far: the only source of absolute positions.
        layers: one entry per layer, its structure owned by that layer: the state of its cell, and
            what an edit of the cell remembers.
    """

    position: Tensor
    layers: tuple[PyTree, ...]


class History(NamedTuple):
    """One entry per token that was read, the last token last.

    A row that has read fewer tokens than another has zeros in front, which are never read: how many
    entries are its own follows from its position.

    Attributes:
        entries: `(b, …, t, d)`.
    """

    entries: Tensor


def tree_map(function: Callable[..., Any], tree: S, *others: S) -> S:
    """Applies `function` to every leaf of `tree` (and the matching leaves of `others`).

    Histories of several trees are first made equally long.
    """
    if isinstance(tree, History) and others:
        tree, *others = _aligned(tree, *others)  # type: ignore[assignment]
    if isinstance(tree, (tuple, list)):
        branches = [tree_map(function, *items) for items in zip(tree, *others, strict=True)]
        named = hasattr(tree, "_fields")
        return type(tree)(*branches) if named else type(tree)(branches)  # type: ignore[return-value]
    return function(tree, *others)


def _aligned(*histories: Any) -> list[History]:
    """Each with zeros in front, up to the length of the longest."""
    longest = max(history.entries.shape[-2] for history in histories)
    return [
        history
        if history.entries.shape[-2] == longest
        else History(F.pad(history.entries, (0, 0, longest - history.entries.shape[-2], 0)))
        for history in histories
    ]


def leaves(tree: PyTree, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every leaf with its dotted path, for example `layers.0.ssm`."""
    if isinstance(tree, (tuple, list)):
        names: Sequence[Any] = getattr(tree, "_fields", range(len(tree)))
        for name, branch in zip(names, tree, strict=True):
            yield from leaves(branch, f"{path}.{name}" if path else str(name))
    else:
        yield path, tree


def unflatten(like: S, values: Iterable[Tensor]) -> S:
    """The structure of `like` with `values` as its leaves, in the order of `leaves`."""
    ordered = iter(values)
    return tree_map(lambda _: next(ordered), like)


def histories(tree: PyTree, path: str = "") -> set[str]:
    """Dotted paths of the leaves that are entries of a `History`."""
    if isinstance(tree, History):
        return {f"{path}.entries" if path else "entries"}
    if not isinstance(tree, (tuple, list)):
        return set()
    names: Sequence[Any] = getattr(tree, "_fields", range(len(tree)))
    found = [
        histories(branch, f"{path}.{name}" if path else str(name))
        for name, branch in zip(names, tree, strict=True)
    ]
    return set().union(*found)


def map_histories(function: Callable[[Tensor], Tensor], tree: S) -> S:
    """Applies `function` to the entries of every `History`, and leaves the other leaves alone."""
    if isinstance(tree, History):
        return History(function(tree.entries))  # type: ignore[return-value]
    if not isinstance(tree, (tuple, list)):
        return tree
    branches = [map_histories(function, branch) for branch in tree]
    named = hasattr(tree, "_fields")
    return type(tree)(*branches) if named else type(tree)(branches)  # type: ignore[return-value]


def same_row(one: torch.Size, other: torch.Size, growing: bool) -> bool:
    """Whether two leaves have rows of one shape, the length of a history aside.

    Args:
        one: shape of one leaf without its batch axis.
        other: of the other one.
        growing: whether they are entries of a `History`.
    """
    return one[:-2] + one[-1:] == other[:-2] + other[-1:] if growing else one == other


def detach(state: S) -> S:
    """The same values, cut from the autograd graph."""
    return tree_map(Tensor.detach, state)


def clone(state: S) -> S:
    """A copy that shares no memory with `state`."""
    return tree_map(Tensor.clone, state)


def reset(state: S, initial: S, where: Tensor) -> S:
    """Rows of `initial` where `where` is true, rows of `state` elsewhere.

    Args:
        where: `(b,)` bool.

    A tensor that both trees share is returned as it is, and not copied.
    """

    def select(old: Tensor, new: Tensor) -> Tensor:
        if old is new:
            return old
        return torch.where(where.view(-1, *[1] * (old.ndim - 1)), new, old)

    return tree_map(select, state, initial)


def take(state: S, rows: Tensor | Sequence[int]) -> S:
    """The rows of the batch that `rows` (int64 indices) names, in that order, repeats allowed."""
    index = torch.as_tensor(rows)
    if index.dtype == torch.bool:
        raise UserError("take needs row numbers and not a mask: give mask.nonzero()[:, 0]")
    index = index.long()
    return tree_map(lambda leaf: leaf.index_select(0, index.to(leaf.device)), state)


def expand(state: S, n: int) -> S:
    """Each row `n` times in sequence: a batch of b becomes b·n."""
    return tree_map(lambda leaf: leaf.repeat_interleave(n, dim=0), state)


def join(states: Sequence[S]) -> S:
    """The rows of several states of one model, one after another."""
    first, *others = states
    return tree_map(lambda *rows: torch.cat(rows), first, *others)


def nbytes(state: PyTree) -> int:
    """Bytes that the tensors of a state hold."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(state))


def save(state: LMState, path: str | os.PathLike[str], *, model: Any = None) -> None:
    """Writes a state as safetensors, beside the target first and then renamed over it.

    The file carries its own SHA-256, which `load` verifies.

    Args:
        path: the file to write.
        model: where given, its `fingerprint()` is recorded, and `load` then refuses the state for
            any other model.
    """
    from longrnn.checksums import sealed
    from longrnn.files import write_atomic

    tensors = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in leaves(state)}
    metadata = {
        "format": FORMAT,
        "fingerprint": model.fingerprint() if model is not None else "",
        "position": json.dumps(state.position.tolist()),
        "dtype": json.dumps({name: str(leaf.dtype) for name, leaf in tensors.items()}),
    }
    write_atomic(Path(path), sealed(tensors, metadata))


def load(path: str | os.PathLike[str], like: Any) -> LMState:
    """Reads a state that `save` wrote.

    Args:
        path: the file.
        like: the model that will use it (then its fingerprint is compared), or a state of the
            expected structure; the result is on its device.

    Raises:
        UserError: no such file, not a state, damaged, or the state of another model.
    """
    from safetensors import safe_open

    from longrnn.checksums import verify_sealed
    from longrnn.files import one_line

    # Not `Path.is_file`, which raises for a name that is too long and in a folder without access.
    if not os.path.isfile(path):
        raise UserError(f"no state file at {path}: give the path that `state.save` wrote")
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get("format") != FORMAT:
            raise UserError(f"{path} holds no state: give a file that `state.save` wrote")
        verify_sealed(Path(path), metadata)
    except UserError:
        raise
    except Exception as error:  # a SafetensorError, or what torch raises for a dtype it lacks
        raise UserError(
            f"{path} is truncated or not a state file ({one_line(error)}): save it again"
        ) from error
    example, same_model = like, False
    if not isinstance(like, LMState):
        recorded = metadata.get("fingerprint", "")
        same_model = bool(recorded)
        if recorded and recorded != like.fingerprint():
            raise UserError(
                f"{path} is the state of another model (fingerprint {recorded}, this model has "
                f"{like.fingerprint()}): load the checkpoint that made it"
            )
        example = like.init_state(1)
    return _fill(example, tensors, path, same_model)


def _fill(
    example: LMState, tensors: dict[str, Tensor], path: str | os.PathLike[str], same_model: bool
) -> LMState:
    expected, growing = dict(leaves(example)), histories(example)
    if expected.keys() != tensors.keys():
        different = sorted(expected.keys() ^ tensors.keys())
        if same_model:
            raise UserError(
                f"{path} was saved by another version of longrnn ({different[0]} is only in one of "
                "the two): compute the state again, or use the version that saved it"
            )
        raise UserError(
            f"{path} is the state of another model ({different[0]} is only in one of the two): "
            "load the checkpoint that made it"
        )
    for name, leaf in expected.items():
        found = tensors[name]
        same = leaf.ndim == found.ndim
        same = same and same_row(leaf.shape[1:], found.shape[1:], name in growing)
        if not same or leaf.dtype != found.dtype:
            raise UserError(
                f"{path} is the state of another model ({name} has shape {tuple(found.shape[1:])} "
                f"{found.dtype} per row, {tuple(leaf.shape[1:])} {leaf.dtype} was expected): "
                "load the checkpoint that made it"
            )
    _check_values(tensors, path)
    return unflatten(example, [tensors[name].to(leaf.device) for name, leaf in leaves(example)])


def _check_values(tensors: dict[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Refuses values that no model gives a state.

    Raises:
        UserError: leaves of different numbers of rows, numbers that are not finite, or positions
            that are not counts of tokens.
    """
    position = tensors["position"]
    for name, tensor in tensors.items():
        if len(tensor) != len(position):
            raise UserError(
                f"{path} has {len(position)} rows, and {name} has {len(tensor)}: save it again"
            )
        if not torch.isfinite(tensor).all():
            raise UserError(
                f"{path} holds values in {name} that are not finite, from which no model can go "
                "on: save the state of a model whose outputs are finite"
            )
    if not ((position >= 0) & (position <= MOST_TOKENS)).all():
        raise UserError(
            f"{path} says that {position.tolist()} tokens were read, which is not valid: "
            "save it again"
        )

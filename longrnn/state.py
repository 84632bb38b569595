"""The state of a language model as a value, and the functions over it.

A state is a tree of tensors (named tuples, tuples and lists nest freely) whose every leaf has the
batch as its first axis. Nothing here changes a state in place: a state that was kept is never used
up by its readers. `reset` selects with `torch.where` and never multiplies, so that a NaN cannot
survive a reset. What grows with the text, such as the keys of a transformer, stands in a `History`,
so that rows that have read different numbers of tokens go together.
"""

from __future__ import annotations

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
# The position of one row.
POSITION = torch.empty((), dtype=torch.int64, device="meta")


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


def histories(tree: PyTree) -> set[str]:
    """Dotted paths of the leaves that are entries of a `History`."""
    return {path for path, _ in leaves(tree) if path.rpartition(".")[2] == "entries"}


def map_histories(function: Callable[[Tensor], Tensor], tree: S) -> S:
    """Applies `function` to the entries of every `History`, and leaves the other leaves alone."""
    growing, pairs = histories(tree), leaves(tree)
    return unflatten(tree, [function(one) if path in growing else one for path, one in pairs])


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
    example = like
    if not isinstance(like, LMState):
        recorded = metadata.get("fingerprint", "")
        if recorded and recorded != like.fingerprint():
            raise UserError(
                f"{path} is the state of another model (fingerprint {recorded}, this model has "
                f"{like.fingerprint()}): load the checkpoint that made it"
            )
        example = like.init_state(1)
    expected = dict(leaves(example))
    if expected.keys() != tensors.keys():
        different = sorted(expected.keys() ^ tensors.keys())
        raise UserError(
            f"{path} is the state of another model ({different[0]} is only in one of the two): "
            "load the checkpoint that made it"
        )
    state = unflatten(example, [tensors[name].to(leaf.device) for name, leaf in expected.items()])
    try:
        check(state, tree_map(lambda leaf: leaf[0], example).layers, state.position.numel())
    except UserError as error:
        raise UserError(f"{path} cannot be used: {error}") from error
    for name, leaf in leaves(state):
        if not torch.isfinite(leaf).all():
            raise UserError(
                f"{path} holds values in {name} that are not finite, from which no model can go "
                "on: save the state of a model whose outputs are finite"
            )
    if not ((state.position >= 0) & (state.position <= MOST_TOKENS)).all():
        raise UserError(
            f"{path} says that {state.position.tolist()} tokens were read, which is not valid: "
            "save it again"
        )
    return state


def check(state: LMState, like: PyTree, batch_size: int) -> None:
    """Refuses the state of another model, of another mitigation, or of another batch size.

    Args:
        state: the state to check.
        like: the expected `layers` of one row, without batch axis.
        batch_size: the expected number of rows.

    Raises:
        UserError: the state does not fit.
    """
    if not isinstance(state, LMState):
        raise UserError(
            f"state must be an LMState, not a {type(state).__name__}: give the `state` of the "
            "result of an earlier call, or init_state(batch_size)"
        )
    whole = LMState(POSITION, like)
    if _is_like(state, whole, batch_size):
        return
    given, expected = dict(leaves(state)), dict(leaves(whole))
    growing = histories(whole)
    for name in sorted(given.keys() | expected.keys()):
        one, other = given.get(name), expected.get(name)
        if (
            one is None
            or other is None
            or one.ndim == 0
            or one.dtype != other.dtype
            or not _same_row(one.shape[1:], other.shape, name in growing)
        ):
            raise UserError(
                f"this is the state of another model or mitigation ({name} is "
                f"{described(one)}, and per row {described(other)} was expected): start from "
                "init_state of this model"
            )
    name, rows = next((n, len(leaf)) for n, leaf in given.items() if len(leaf) != batch_size)
    raise UserError(
        f"the state has {rows} rows ({name}), and {batch_size} were expected: use state.take or "
        "state.expand to make them equal"
    )


def described(given: object) -> str:
    """The dtype and the shape of a tensor, or the type of anything else."""
    if isinstance(given, Tensor):
        return f"{given.dtype} of shape {tuple(given.shape)}"
    return "missing" if given is None else f"a {type(given).__name__}"


def _is_like(given: PyTree, like: PyTree, rows: int) -> bool:
    """Whether a tree has the leaves of `like` with so many rows; one pass, made for every token."""
    if isinstance(like, Tensor):
        return (
            isinstance(given, Tensor)
            and given.dtype == like.dtype
            and given.shape == (rows, *like.shape)
        )
    if type(given) is not type(like) or len(given) != len(like):
        return False
    if isinstance(like, History):
        entries = given.entries
        return (
            isinstance(entries, Tensor)
            and entries.dtype == like.entries.dtype
            and len(entries) == rows
            and _same_row(entries.shape[1:], like.entries.shape, True)
        )
    for one, other in zip(given, like, strict=True):  # noqa: SIM110 (`all` takes longer)
        if not _is_like(one, other, rows):
            return False
    return True


def _same_row(one: torch.Size, other: torch.Size, growing: bool) -> bool:
    """Whether two rows have one shape, apart from the length of a history (`growing`)."""
    return one[:-2] + one[-1:] == other[:-2] + other[-1:] if growing else one == other

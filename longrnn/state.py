"""The state of a language model as a value, and the functions over it.

A state is a tree of tensors (named tuples, tuples and lists nest freely) whose every leaf has the
batch as its first axis. Nothing here changes a state in place, so any number of calls may continue
the same state. `reset` selects with `torch.where` and never multiplies, so that a NaN cannot
survive a reset. A tensor that grows with the text, such as the keys of a transformer, is in a
`History`, so that rows that have read different numbers of tokens fit into one batch.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.errors import UserError

PyTree: TypeAlias = Any
S = TypeVar("S")

# What `save` writes.
STATE_FORMAT = "longrnn-state-3"
NO_FINGERPRINTS = {"fingerprint": "", "weights": ""}
# The position of one row.
POSITION = torch.empty((), dtype=torch.int64, device="meta")


class LMState(NamedTuple):
    """Everything a language model remembers.

    Attributes:
        position: `(b,)` int64, tokens of the current document of each row that were consumed: the
            only source of absolute positions.
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
    short = [(history, longest - history.entries.shape[-2]) for history in histories]
    return [
        History(F.pad(history.entries, (0, 0, by, 0))) if by else history for history, by in short
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


def is_entries(path: str) -> bool:
    """Whether the leaf at a dotted path is the entries of a `History`."""
    return path.endswith("entries")


def recurrent(layers: PyTree) -> list[Tensor]:
    """The leaves of layers that are numbers of a recurrence or convolution, not keys or flags."""
    return [leaf for path, leaf in leaves(layers) if _is_number(path, leaf)]


def with_recurrent(layers: S, values: Iterable[Tensor]) -> S:
    """Layers with other tensors in place of those that `recurrent` returns."""
    ordered, pairs = iter(values), leaves(layers)
    replaced = [next(ordered) if _is_number(path, leaf) else leaf for path, leaf in pairs]
    return unflatten(layers, replaced)


def _is_number(path: str, leaf: Tensor) -> bool:
    return not is_entries(path) and leaf.is_floating_point()


def detach(state: S) -> S:
    """The same values, cut from the autograd graph."""
    return tree_map(Tensor.detach, state)


def clone(state: S) -> S:
    """A copy that shares no memory with `state`."""
    return tree_map(Tensor.clone, state)


def reset(state: S, initial: S, where: Tensor) -> S:
    """Rows of `initial` where `where`, `(b,)` bool, is true, rows of `state` elsewhere.

    A tensor that both trees share is returned as it is, and not copied.
    """

    def select(old: Tensor, new: Tensor) -> Tensor:
        if old is new:
            return old
        return torch.where(where.view(-1, *[1] * (old.ndim - 1)), new, old)

    return tree_map(select, state, initial)


def take(state: S, rows: Tensor | Sequence[int]) -> S:
    """The rows of the batch that `rows` names: indices in any order, with repeats, or a mask."""
    index = torch.as_tensor(rows)
    index = index.nonzero()[:, 0] if index.dtype == torch.bool else index.long()
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


def fingerprints(model: Any) -> dict[str, str]:
    """What a file of a state records about its model: one hash for `load`, one for `load_start`."""
    plain = model.starting_from(None)
    weights = plain.weights_fingerprint(rounded=True)
    return {"fingerprint": plain.fingerprint(), "weights": weights}


def save(
    state: LMState,
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    recorded: Mapping[str, str] | None = None,
) -> None:
    """Writes a state as safetensors, beside the target first and then renamed over it.

    The file carries a SHA-256 of its content, which `load` verifies.

    Args:
        state: any number of rows; `load_start` takes one.
        path: the file to write.
        model: where given, its fingerprints are recorded, and `load` then refuses the state for
            any other model or mitigation.
        recorded: these fingerprints, instead of a model.

    Raises:
        UserError: the file cannot be written.
    """
    from safetensors.torch import save as serialized

    from longrnn.files import one_line, write_atomic

    if recorded is None:
        recorded = NO_FINGERPRINTS if model is None else fingerprints(model)
    tensors = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in leaves(state)}
    try:
        write_atomic(Path(path), serialized(tensors, _metadata(tensors, recorded)))
    except (OSError, ValueError) as error:
        raise UserError(
            f"the state cannot be written to {str(path)!r} ({one_line(error)}): give another path"
        ) from error


def _metadata(tensors: dict[str, Tensor], recorded: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a state file, with the SHA-256 of its content."""
    from safetensors.torch import save as serialized

    content = serialized(tensors) + "/".join(recorded.values()).encode()
    return {"format": STATE_FORMAT, **recorded, "sha256": hashlib.sha256(content).hexdigest()}


def load(path: str | os.PathLike[str], model: Any) -> LMState:
    """Reads a state that `save` wrote, onto the device of a model.

    Args:
        path: the file.
        model: will use the state; compared with a recorded fingerprint, and by its tensors.

    Raises:
        UserError: no such file, not a state, damaged, or the state of another model.
    """
    tensors, recorded = _read(path)
    _refuse_other(path, recorded["fingerprint"], model.starting_from(None).fingerprint())
    rows = tensors["position"].numel() if "position" in tensors else 0
    return fitted(tensors, model.zero_state(1), rows, str(path))


def load_start(path: str | os.PathLike[str], model: Any, *, is_own: bool = False) -> LMState:
    """Reads the state from which a model is to start (`LanguageModel.starting_from`).

    Args:
        path: the file, of one row.
        model: of the same weights in any dtype, which the state gets, and under any mitigation.
        is_own: whether the file is part of the checkpoint of the model.

    Raises:
        UserError: as `load`.
    """
    tensors, recorded = _read(path)
    if not is_own:
        _refuse_other(path, recorded["weights"], model.weights_fingerprint(rounded=True))
    return start_of(tensors, model, str(path))


def start_of(tensors: Mapping[str, Tensor], model: Any, source: str) -> LMState:
    """Leaves by name as a state of one row, in the dtypes of a model."""
    zero = model.zero_state(1)
    dtypes = {name: leaf.dtype for name, leaf in leaves(zero)}
    cast = {name: leaf.to(dtypes.get(name, leaf.dtype)) for name, leaf in tensors.items()}
    return fitted(cast, zero, 1, source)


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a state file by name, and the fingerprints that it records."""
    from safetensors import safe_open

    # Not `Path.is_file`, which raises for a name that is too long and in a folder without access.
    if not os.path.isfile(path):
        raise UserError(f"no state file at {path}: give the path that `state.save` wrote")
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception:  # a SafetensorError, or what torch raises for a dtype it lacks
        metadata, tensors = {}, {}
    recorded = {name: metadata.get(name, "") for name in NO_FINGERPRINTS}
    if metadata != _metadata(tensors, recorded):
        raise UserError(
            f"{path} is truncated, damaged or not a state file: save the state again with "
            "`state.save`"
        )
    return tensors, recorded


def _refuse_other(path: str | os.PathLike[str], recorded: str, fingerprint: str) -> None:
    """Refuses the file of another model; one without a fingerprint may be of any model."""
    if recorded not in ("", fingerprint):
        raise UserError(
            f"{path} is the state of another model (fingerprint {recorded}, this model has "
            f"{fingerprint}): load the checkpoint that made it"
        )


def fitted(tensors: Mapping[str, Tensor], zero: LMState, rows: int, source: str) -> LMState:
    """Leaves by name as a state like one of zeros, on its device.

    Args:
        tensors: the leaves.
        zero: a state of the same model, of any number of rows.
        rows: of the leaves.
        source: where they come from, for errors.

    Raises:
        UserError: they do not fit.
    """
    check_leaves(tensors, tree_map(lambda leaf: leaf[0], zero), rows, source)
    return unflatten(zero, [tensors[name].to(leaf.device) for name, leaf in leaves(zero)])


def check(state: LMState, like: PyTree, batch_size: int) -> None:
    """Refuses a state whose tensors do not fit the model, and one of another window.

    Compared are names, shapes and dtypes; those of a window differ with its length and its heads.
    Numbers are not: the state of a model of the same shape, or of this model under another
    mitigation without a window, goes on. A limit of its norm then applies from the next token on.
    The fingerprint that `save` records distinguishes such states.

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
    if not _is_like(state, whole, batch_size):
        check_leaves(dict(leaves(state)), whole, batch_size, "the given state")


def _is_like(given: PyTree, like: PyTree, rows: int, grows: bool = False) -> bool:
    """Whether a tree has the leaves of `like` with `rows` rows: one pass, made for every token.

    Args:
        given: the tree.
        like: of one row, without batch axis.
        rows: of every leaf.
        grows: whether a leaf is that of a history.
    """
    if isinstance(like, tuple):
        grows = isinstance(like, History)
        return (
            type(given) is type(like)
            and len(given) == len(like)
            and all(_is_like(*pair, rows, grows) for pair in zip(given, like, strict=True))
        )
    return (
        isinstance(given, Tensor)
        and given.dtype == like.dtype
        and _fixed(given.shape, grows) == (rows, *_fixed(like.shape, grows))
    )


def check_leaves(given: Mapping[str, Tensor], like: LMState, rows: int, source: str) -> None:
    """Compares leaves with those of one row, `like`."""
    expected = dict(leaves(like))
    for name in {**expected, **given}:
        leaf, wanted = given.get(name), expected.get(name)
        if (
            not isinstance(leaf, Tensor)
            or wanted is None
            or leaf.dtype != wanted.dtype
            or leaf.ndim == 0
            or _fixed(leaf.shape[1:], is_entries(name)) != _fixed(wanted.shape, is_entries(name))
        ):
            raise UserError(
                f"{source} is the state of another model or mitigation ({name} is "
                f"{described(leaf)}, and per row {described(wanted)} was expected): start from "
                "init_state of this model"
            )
        if len(leaf) != rows:
            raise UserError(
                f"{source} has {len(leaf)} rows ({name}), and {rows} were expected: use state.take "
                "or state.expand to make them equal"
            )


def _fixed(shape: torch.Size, grows: bool) -> tuple[int, ...]:
    """A shape without the length of a history."""
    return shape[:-2] + shape[-1:] if grows else shape


def described(given: object) -> str:
    """The dtype and the shape of a tensor, or the type of anything else."""
    if isinstance(given, Tensor):
        return f"{given.dtype} of shape {tuple(given.shape)}"
    return "missing" if given is None else f"a {type(given).__name__}"

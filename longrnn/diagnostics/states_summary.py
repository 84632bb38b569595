"""A diagnosis of states in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

from longrnn.diagnostics.channels import SHARE, OutputChange, holding
from longrnn.diagnostics.collapse import GLOBAL
from longrnn.diagnostics.states import Diagnosis
from longrnn.units import format_length

# Maximum number of heads, and of channels of one head, in a sentence.
NAMED = 6


def summary(diagnosis: Diagnosis) -> str:
    """Describe the heads that collapse or are global, and in a second line the channels."""
    heads = f"{_collapse(diagnosis)} {_globals(diagnosis)}"
    return f"{heads}\n{_outliers(diagnosis)} {_output(diagnosis)}"


def worst_heads(diagnosis: Diagnosis) -> list[tuple[int, int]]:
    """Return (layer, head) of the heads that collapse, by the growth of their norm."""
    growth: dict[tuple[int, int], float] = {}
    for finding in diagnosis.findings:
        if finding.left:
            size = finding.growth if math.isfinite(finding.growth) else math.inf
            pair = finding.layer, finding.head
            growth[pair] = max(size, growth.get(pair, 0.0))
    return sorted(growth, key=lambda pair: (-growth[pair], pair))


def _collapse(diagnosis: Diagnosis) -> str:
    collapsing = worst_heads(diagnosis)
    total = _total(diagnosis)
    trained = format_length(diagnosis.about["train_length"])
    if not collapsing:
        length = format_length(diagnosis.about["length"])
        return (
            f"None of {total} heads collapses between the training length of {trained} and "
            f"{length} tokens."
        )
    first = min(finding.onset for finding in diagnosis.findings if finding.onset is not None)
    order = ", the state that grows most first" if len(collapsing) > 1 else ""
    return (
        f"{_count(collapsing, total)} beyond the training length of {trained} tokens, the first "
        f"from position {first:,} on{order}: {_list(collapsing)}."
    )


def _globals(diagnosis: Diagnosis) -> str:
    globals_ = diagnosis.global_heads()
    if not diagnosis.retention_is_defined():
        return "Which heads are global is not known, because retention is not defined here."
    if not globals_:
        return f"None keeps more than {GLOBAL:.0%} of a state over the training length."
    kept = f"global (keeping more than {GLOBAL:.0%} of a state over the training length)"
    if len(globals_) == _total(diagnosis) > 1:
        return f"All are {kept}."
    verb = "is" if len(globals_) == 1 else "are"
    return f"{len(globals_)} {verb} {kept}: {_list(globals_)}."


def _outliers(diagnosis: Diagnosis) -> str:
    """Name the outlier channels on the first prompt, or say how even the worst head is."""
    channels, prompt = diagnosis.channels, diagnosis.prompts[0].name
    found = channels.outlier[:, 0]
    worst = worst_heads(diagnosis)
    heads = [(layer, head) for layer, head in found.any(-1).nonzero().tolist()]
    if heads:
        order = sorted(heads, key=lambda pair: worst.index(pair) if pair in worst else len(worst))
        named = [
            f"layer {layer} head {head} ({_channels(found[layer, head].nonzero()[:, 0].tolist())})"
            for layer, head in order[:NAMED]
        ]
        more = f" and {len(order) - NAMED} more heads" if len(order) > NAMED else ""
        return f"On {prompt}, these heads have outlier channels: {', '.join(named)}{more}."
    if not worst:
        return f"On {prompt}, no head has outlier channels."
    at = worst[0][0], 0, worst[0][1]
    return (
        f"On {prompt}, no head has outlier channels: {SHARE:.0%} of the energy of the state of "
        f"layer {at[0]} head {at[2]} is in {_known(channels.holding_end()[at].item())} of "
        f"{found.shape[-1]} channels at the end, and was in "
        f"{_known(channels.holding_trained()[at].item())} at the training length."
    )


def _output(diagnosis: Diagnosis) -> str:
    """Say which heads, or how many channels, make up the output beyond the training length."""
    channels = diagnosis.channels
    change = most_changed(diagnosis)
    at = change.layer, change.prompt
    spread = (
        f"{SHARE:.0%} of its energy is in "
        f"{_known(holding(channels.output_beyond[at].flatten()).item())} of "
        f"{channels.outlier[0, 0].numel()} channels beyond the training length, and in "
        f"{_known(holding(channels.output_inside[at].flatten()).item())} inside"
    )
    if not change.gaining:
        return f"The output that changes most is that of layer {change.layer}: {spread}."
    before = sum(change.inside[head] for head in change.gaining)
    after = sum(change.beyond[head] for head in change.gaining)
    heads = "head" if len(change.gaining) == 1 else "heads"
    return (
        f"The output that changes most is that of layer {change.layer}: behind its norm, the share "
        f"of {heads} {_and(change.gaining)} goes from {before:.0%} inside the training length to "
        f"{after:.0%} beyond, and that of all others from {1 - before:.0%} to {1 - after:.0%}; "
        f"{spread}."
    )


def most_changed(diagnosis: Diagnosis) -> OutputChange:
    """Return the layer whose output changes most on the first prompt."""
    changes = diagnosis.channels.output_changes()
    return next(change for change in changes if change.prompt == 0)


def _total(diagnosis: Diagnosis) -> int:
    return len({(finding.layer, finding.head) for finding in diagnosis.findings})


def _count(heads: Sequence[Sequence[int]], total: int) -> str:
    verb = "collapses" if len(heads) == 1 else "collapse"
    return f"{len(heads)} of {total} heads {verb}"


def _list(heads: Sequence[Sequence[int]]) -> str:
    named = ", ".join(f"layer {layer} head {head}" for layer, head in heads[:NAMED])
    more = len(heads) - NAMED
    return f"{named} and {more} more" if more > 0 else named


def _channels(indices: Sequence[int]) -> str:
    named = ", ".join(map(str, indices[:NAMED]))
    more = f" and {len(indices) - NAMED} more" if len(indices) > NAMED else ""
    return f"{'channel' if len(indices) == 1 else 'channels'} {named}{more}"


def _and(heads: Sequence[int]) -> str:
    names = [str(head) for head in heads]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _known(count: float) -> str:
    """A count as text; NaN where the energies are not finite."""
    return f"{count:.0f}" if math.isfinite(count) else "an unknown number"

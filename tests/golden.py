"""Numbers that are recorded in `tests/data/golden.json`, and the cases that compute them.

`python -m tests.golden NAME …` records the cases whose names begin with one of these names again,
and drops those that no longer exist: for results that are meant to change.

Inputs are functions of fixed seeds of numpy, and the text in `tests/data/book.txt`.
"""

import json
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from longrnn import load, mitigation
from tests.contracts.subjects import cell_leaves
from tests.texts import BOOK, DATA

RECORD = DATA / "golden.json"
Numbers = dict[str, list[Any]]
# Tokens read when a result is recorded; two are longer than a chunk of the scans (64 tokens).
LENGTHS = (6, 70, 400)
CHECKPOINTS = (
    "collapse-tiny",
    "passkey-tiny",
    "passkey-tiny-short",
    "recall-tiny",
    "recall-tiny-numbered",
)
# Under which mitigations: "" is none. Some act only on the longer texts, some on some heads.
MITIGATIONS = (
    "",
    "forget_more",
    "state_norm(threshold=0.3)",
    "forget_more(decay_scale=0.9)+sliding_window(window=9, layers=[0])",
    "scale_delta(scale=2, heads=[0])",
    "scale_decay(scale=0.1, layers=[1])",
    "power_decay(scale=1.5)",
    "token_filter(threshold=0.08, heads=[[0, 0], [1, 1]])",
    "sliding_window(window=300, heads=[1])",
    "power_decay(scale=0.8)+scale_delta(scale=0.7)+token_filter(threshold=0.005)"
    "+state_norm(threshold=1)",
)


@lru_cache(maxsize=1)
def opened(name: str) -> Any:
    return load(name, dtype=torch.float64)


def outputs(name: str, spec: str) -> Numbers:
    """Logits, losses and norms of the states of a checkpoint after each length, by name."""
    model, found = opened(name).under(mitigation(spec) if spec else None), Numbers()
    directions = np.random.default_rng(1).standard_normal((256, 1)) / 16
    for length in LENGTHS:
        drawn = np.random.default_rng(0).integers(0, 256, length)
        text = np.frombuffer(BOOK.read_bytes()[:length], np.uint8).astype(np.int64)
        ids = torch.from_numpy(np.stack([drawn, text]))
        with torch.no_grad():
            logits, state = model(ids)
        last = torch.cat([logits[:, -1, :2], logits[:, -1] @ torch.from_numpy(directions)], 1)
        found[f"{length} logits"] = last.flatten().tolist()
        found[f"{length} logsumexp"] = logits[:, -1].logsumexp(-1).tolist()
        loss = F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")
        found[f"{length} loss"] = loss.mean(1).tolist()
        for key, leaf in cell_leaves(model, state).items():
            found[f"{length} state {key.removeprefix('final ')}"] = [leaf.norm().item()]
    return found


CASES: dict[str, Callable[[], Numbers]] = {
    f"{name} {spec}".strip(): partial(outputs, name, spec)
    for name in CHECKPOINTS
    for spec in MITIGATIONS
}


def main(prefixes: Sequence[str]) -> None:
    """Records the cases whose names begin with one of `prefixes`."""
    recorded = json.loads(RECORD.read_text())
    record = {
        name: case() if name.startswith(tuple(prefixes)) else recorded[name]
        for name, case in CASES.items()
    }
    for found in record.values():
        for key, values in found.items():
            found[key] = [float(f"{x:.10g}") if isinstance(x, float) else x for x in values]
    lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in record.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

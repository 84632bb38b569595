"""Records `tests/data/golden.json`: `python -m tests.golden`.

`python -m tests.golden NAME …` records only the cases whose names begin with one of these names,
and drops those that no longer exist: for results that are meant to change.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial

from tests.golden.cases import EVALUATIONS, EXACT, MODELS, TRAINING, results
from tests.golden.results import RECORD


def main(prefixes: Sequence[str]) -> None:
    """Records all cases, or those whose names begin with one of `prefixes`."""
    models = {name: partial(results, case) for name, case in MODELS.items()}
    cases = {**models, **TRAINING, **EXACT, **EVALUATIONS}
    before = json.loads(RECORD.read_text()) if prefixes else {}
    record = {
        name: case() if not prefixes or name.startswith(tuple(prefixes)) else before[name]
        for name, case in cases.items()
    }
    for found in record.values():
        for key, values in found.items():
            found[key] = [float(f"{x:.10g}") if isinstance(x, float) else x for x in values]
    lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in record.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


main(sys.argv[1:])

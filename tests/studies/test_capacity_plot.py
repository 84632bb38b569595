"""The picture and the record of a family's capacity."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib import image

from longrnn.studies.capacity import Bounded, Member, Size
from longrnn.studies.capacity_fits import Fit, fit
from longrnn.studies.capacity_plot import write


def test_the_files(tmp_path: Path) -> None:
    """The record marks bounds and has all rows as JSON, and the picture is drawn."""
    members = [Member("a", "0", 1000, 256, 0, True, 1.5, None, None)]
    found = [
        Size(1000, 0, Bounded(256, "≤"), None),
        *(Size(1000 * n, 0, Bounded(300 * n + n % 2, ""), Bounded(512, "≥")) for n in (2, 3, 4)),
    ]
    line = fit("line", [(size.state_size, size.forget) for size in found])
    assert isinstance(line, Fit)
    none = fit("exponential", [(size.state_size, size.recall) for size in found])
    reds = {}
    for name, fits in (("both", {"forget": [line, line], "recall": [none]}),
                       ("none", {"forget": [str(none)], "recall": [none]})):  # fmt: skip
        written = write(members, found, fits, tmp_path / name)
        assert [path.name for path in written] == ["capacity.jsonl", "capacity.png"]
        pixels = image.imread(written[1])
        reds[name] = int((pixels[..., 0] > pixels[..., 2] + 0.3).sum())
    assert reds["both"] > 200
    assert reds["none"] == 0
    rows = [
        json.loads(line) for line in (tmp_path / "both/capacity.jsonl").read_text().splitlines()
    ]
    assert [row.get("row") for row in rows] == [None, "model", *["size"] * 4, *["fit"] * 3]
    assert rows[2] == {
        "row": "size", "state_size": 1000, "seed": 0, "forget": {"value": 256, "bound": "≤"},
        "recall": None,
    }  # fmt: skip
    assert rows[-2]["parameters"] == line.parameters
    assert rows[-1]["no_fit"].startswith("no fit: ")

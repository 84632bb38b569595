"""Figures in the documents equal the recorded ones: files, tables and intervals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors import safe_open

import longrnn
from longrnn.config import load_config
from longrnn.intervals import Estimate, proportion
from longrnn.mitigations import MITIGATIONS
from longrnn.models import RecurrentLM
from longrnn.training.config import TrainConfig

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
EMBEDDED = sorted(
    path.parent for path in Path(longrnn.__file__).parent.glob("checkpoints/*/*.json")
)
PROSE = [
    ROOT / "README.md", ROOT / "configs/train/README.md", *sorted((ROOT / "docs").glob("*.md"))
]  # fmt: skip
NUMBER = r"[−+-]?\d+(?:\.\d+)?"
INTERVAL = re.compile(rf"\[({NUMBER}), ({NUMBER})\]")


def recorded(name: str) -> str:
    return (RESULTS / f"{name}.md").read_text()


def table(text: str, *head: str) -> list[list[str]]:
    """Rows of the first table whose header begins with `head`, as lists of cells."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if cells_of(line)[: len(head)] == list(head))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append(cells_of(line))
    return found


def cells_of(line: str) -> list[str]:
    return [cell.strip().strip("`*") for cell in line.strip().strip("|").split("|")]


def share_of(cell: str) -> tuple[str, str, str]:
    """`share [low, high]` as three texts."""
    match = re.fullmatch(rf"({NUMBER}) \[({NUMBER}), ({NUMBER})\]", cell)
    assert match is not None, cell
    return match[1], match[2], match[3]


def value(text: str) -> float:
    return float(text.replace("−", "-"))


def size_of(folder: Path) -> int:
    """Parameters in the weights of an embedded checkpoint."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    total = 0
    for shape in shapes:
        count = 1
        for size in shape:
            count *= size
        total += count
    return total


def test_the_number_of_embedded_checkpoints() -> None:
    """The Makefile and the README name all checkpoints of the package."""
    names = {folder.name for folder in EMBEDDED}
    assert "three of the five embedded checkpoints" in (ROOT / "Makefile").read_text()
    assert len(names) == 5
    listed = re.search(r"embedded checkpoints \(([^)]*)\)", (ROOT / "README.md").read_text())
    assert listed is not None
    assert set(re.findall(r"`([\w-]+)`", listed[1])) == names


@pytest.mark.parametrize(
    ("document", "name"),
    [
        ("README.md", "passkey-tiny"),
        ("README.md", "passkey-tiny-short"),
        ("benchmarks/results/passkey_tiny.md", "passkey-tiny"),
        ("configs/train/README.md", "passkey-tiny"),
        ("benchmarks/results/recall_tiny.md", "recall-tiny"),
        ("benchmarks/results/recall_tiny.md", "recall-tiny-numbered"),
        ("benchmarks/results/state_collapse.md", "books_collapse.yaml"),
        ("benchmarks/results/state_collapse.md", "collapse-tiny"),
        ("benchmarks/results/initial_states.md", "books_collapse.yaml"),
    ],
)
def test_sizes_of_models(document: str, name: str) -> None:
    """Every number of parameters in a document equals that of the checkpoint or configuration."""
    if name.endswith(".yaml"):
        config = load_config(TrainConfig, ROOT / "configs/train" / name)
        assert config.model is not None
        expected = sum(p.numel() for p in RecurrentLM(config.model).parameters())
    else:
        expected = size_of(next(folder for folder in EMBEDDED if folder.name == name))
    written = re.findall(r"(?<!about )([\d.,]+[KM]?) parameters", (ROOT / document).read_text())
    # These documents name several embedded checkpoints.
    several = document.endswith(("README.md", "state_collapse.md", "recall_tiny.md"))
    known = {f"{size_of(folder):,}" for folder in EMBEDDED} if several else set()
    assert f"{expected:,}" in written
    assert set(written) <= known | {f"{expected:,}"}


def test_mitigations_per_cell() -> None:
    """The README's number of mitigations per cell equals the table in docs/mitigations.md."""
    rows = table((ROOT / "docs/mitigations.md").read_text(), "", "gru", "lstm", "mamba2", "rnn")
    assert {row[0] for row in rows} == set(MITIGATIONS)
    counts = [sum(row[i] == "yes" and row[0] != "none" for row in rows) for i in (4, 1, 2, 3)]
    line = next(x for x in (ROOT / "README.md").read_text().splitlines() if "| mitigations" in x)
    assert cells_of(line)[1:] == [str(count) for count in counts]


def losses() -> dict[str, list[float]]:
    rows = table(
        recorded("state_collapse"), "mitigation", "≤ 128", "≤ 1k", "≤ 4k", "≤ 16k", "≤ 64k"
    )
    return {row[0]: [float(cell) for cell in row[1:6]] for row in rows}


def test_rise_of_the_loss_beyond_the_training_length() -> None:
    """The range in the text equals that of the first row of the table."""
    inside, *beyond = losses()["none"]
    rises = [100 * (loss / inside - 1) for loss in beyond]
    assert f"{min(rises):.1f} to {max(rises):.1f} % higher" in recorded("state_collapse")


@pytest.mark.parametrize(
    ("names", "change"),
    [
        (("sliding_window-1x", "forget_more-train"), -0.005),
        (("state_norm", "scale_decay"), -0.003),
        (("scale_delta", "power_decay"), 0.0),
        (("token_filter",), 0.020),
    ],
)
def test_effect_of_mitigations_on_books(names: tuple[str, ...], change: float) -> None:
    """The differences that the text gives for the last column are those of the table."""
    found = losses()
    for name in names:
        assert found[name][-1] - found["none"][-1] == pytest.approx(change, abs=5e-4)
        assert not change or f"{abs(change):.3f}" in recorded("state_collapse")


def last_octaves() -> dict[str, str]:
    """The loss of collapse-tiny at 32k to 64k, by variant of the study."""
    head, *_ = re.findall(
        r"^\| mitigation \| text for.*$", recorded("state_collapse"), re.MULTILINE
    )
    column = cells_of(head).index("32k to 64k")
    rows = table(recorded("state_collapse"), "mitigation", "text for choosing")
    return {row[0]: row[column] for row in rows if row[column] != "–"}


def test_the_table_of_both_axes() -> None:
    """The table for choosing a mitigation is the recorded one, with the losses of the study."""
    page = table((ROOT / "docs/mitigations.md").read_text(), "mitigation", "loss, 32k to 64k")
    assert page == table(recorded("state_collapse"), "mitigation", "loss, 32k to 64k")
    losses = last_octaves()
    measured = {row[0]: row[1] for row in page if row[1] != "–"}
    assert measured.items() <= losses.items()
    assert {name.split("-")[0] for name in measured} == set(MITIGATIONS)


def test_the_bar_of_a_million_tokens() -> None:
    """The ratios of a stream follow from its octaves."""
    rows = table(recorded("state_collapse"), "mitigation", "32k to 64k", "64k to 128k")
    assert rows
    for row in rows:
        first, last, ratio = float(row[1]), float(row[5]), float(row[6])
        assert ratio == pytest.approx(last / first, abs=1e-3)


def test_ratios_to_other_programs_are_those_of_the_record() -> None:
    """The README gives the times of the others relative to the native backend."""
    one, two = re.findall(r"thread.*?:\n\n(\|.*?)\n\n", recorded("peers_cpu"), re.DOTALL)[:2]

    def ratios(text: str, name: str) -> list[str]:
        (row,) = [row for row in table(text, "", "prefill, float32") if row[0] == name]
        return re.findall(r"\(([\d.]+)\)", " ".join(row))

    shown = table((ROOT / "README.md").read_text(), "", "transformers", "llama.cpp")
    assert len(shown) == 4
    for column, name in enumerate(("transformers", "llama.cpp"), start=1):
        wanted = [f"{a}, {b}" for a, b in zip(ratios(one, name), ratios(two, name), strict=True)]
        assert [row[column] for row in shown] == wanted


def test_verdicts_of_gradient_stability() -> None:
    """The counts in the text equal those of the tables, for encodings against the control."""
    text = recorded("reverse_cpu")
    published = table(text, "condition", "encoding", "step")
    uniform = table(text, "encoding", "step", "same first token")
    encodings = {"sinusoidal", "learned", "random"}
    counted = [row[5] for row in published if row[1] in encodings]
    summary = ", ".join(f"{counted.count(v)} {v}" for v in ("higher", "lower", "inconclusive"))
    assert f"Of {len(counted)} comparisons" in text
    assert summary in text
    studies = " ".join((ROOT / "docs/studies.md").read_text().split())
    higher, lower, unclear = (counted.count(v) for v in ("higher", "lower", "inconclusive"))
    assert f"{higher} are higher, {lower} lower and {unclear} inconclusive" in studies
    old = [row[4] for row in uniform if row[0] in encodings]
    assert set(old) == {"lower"}
    assert f"All {len(old)} comparisons" in studies


def interval_of(share: float, n: int, independent: float | None = None) -> list[Estimate]:
    """The Wilson intervals of all counts whose share rounds to `share`."""
    counts = [right for right in range(n + 1) if f"{right / n:.2f}" == f"{share:.2f}"]
    return [proportion(right, n, independent) for right in counts]


def check(share: str, low: str, high: str, n: int, independent: float | None = None) -> None:
    # Numbers of independent prompts are recorded with one decimal.
    slack = 0.0051 if independent is None else 0.0151
    assert any(
        abs(one.low - float(low)) < slack and abs(one.high - float(high)) < slack
        for one in interval_of(float(share), n, independent)
    ), f"{share} [{low}, {high}] is not a Wilson interval of {n} prompts"


def test_shares_with_a_number_of_prompts() -> None:
    """Every `share [low, high] (n)` is a Wilson interval of n prompts."""
    text = "\n".join(path.read_text() for path in [*PROSE, *RESULTS.glob("*.md")])
    shares = re.findall(rf"({NUMBER}) \[({NUMBER}), ({NUMBER})\] \((?:n = )?(\d+)\)", text)
    assert len(shares) > 10
    for share, low, high, n in shares:
        check(share, low, high, int(n))


def test_tables_of_passkeys() -> None:
    """Cells are Wilson intervals of their number of prompts; each depth has a fifth of n."""
    rows = table(recorded("passkey_tiny"), "length", "n", "depth 0%")
    rows = [[row[0], row[1], "", *row[2:]] for row in rows]
    for part in recorded("recall_tiny").split("\n## ")[1:3]:
        for block in part.split("| length ")[1:]:
            rows += table(f"| length {block}", "length", "n", "counted")
    assert len(rows) == 7 + 19
    for _, n, counted, *cells in rows:
        for place, cell in enumerate(cells):
            share, low, high = share_of(cell)
            size = int(n) if place == len(cells) - 1 else int(n) // 5
            check(share, low, high, size, float(counted) if counted else None)
    demo = table((ROOT / "README.md").read_text(), "prompt length")
    assert len(demo) == 5
    for _, *cells in demo:
        for cell in cells:
            check(*share_of(cell), 50)


def test_intervals_in_prose_are_recorded() -> None:
    """Every interval in a sentence is in a results file, or is the Wilson interval of its n."""
    kept = set()
    for path in RESULTS.glob("*.md"):
        kept |= {(value(a), value(b)) for a, b in INTERVAL.findall(path.read_text())}
    kept |= {(-high, -low) for low, high in kept}  # "more" for "less"
    code = re.compile(r"^```.*?^```|^\|.*?$", flags=re.DOTALL | re.MULTILINE)
    text = " ".join(" ".join(code.sub("", path.read_text()) for path in PROSE).split())
    pairs = [pair for pair in INTERVAL.findall(text) if "." in pair[0]]  # others are indices
    assert len(pairs) > 10
    for low, high in pairs:
        digits = len(low.partition(".")[2])
        pair = (value(low), value(high))
        rounded = {(round(a, digits), round(b, digits)) for a, b in kept}
        shares = re.findall(rf"({NUMBER}) \[{re.escape(low)}, {re.escape(high)}\] of (\d+)", text)
        for share, n in shares:
            check(share, low, high, int(n))
        assert shares or pair in rounded, f"[{low}, {high}] is not recorded"

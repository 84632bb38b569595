"""The table of architectures in docs/load.md: what was measured on a tiny model of each.

Example:
    python -m tests.hf.architecture_table    # measures all architectures and writes the table
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longrnn import load, mitigation
from longrnn.diagnostics.observe import observe
from longrnn.errors import UserError
from longrnn.ops.rows import Rows
from longrnn.state import expand
from tests.hf.architectures import FEW, MANY, architecture
from tests.hf.foreign import tokens

DOCUMENT = Path(__file__).parents[2] / "docs/load.md"
REFUSED = ["deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4", "minimax", "moshi"]
REFUSED += ["openai-gpt", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm"]
KINDS = sorted({*FEW, *MANY, *REFUSED})
BEGIN = "<!-- architectures: python -m tests.hf.architecture_table -->\n"
END = "<!-- end of architectures -->\n"
COLUMNS = "loads", "pieces", "forks", "padding", "mitigations", "diagnosis", "reason"
NOT_OURS = "no layers that longrnn computes"
# Why recurrent layers are computed by transformers, by architecture.
FOREIGN_RECURRENCES = {"bailing_hybrid": "its Kimi Delta Attention has gates of full rank"}


class Support(NamedTuple):
    """What works with an architecture, in the words of the table; the fields are its columns."""

    loads: str
    pieces: str = "–"
    forks: str = "–"
    padding: str = "–"
    mitigations: str = "–"
    diagnosis: str = "–"
    reason: str = ""


def measure(kind: str) -> Support:
    """Returns what works with a tiny random model."""
    theirs, text = architecture(kind), tokens(2, 24, seed=3) % 60
    with torch.no_grad():
        whole = theirs(input_ids=text, use_cache=False).logits
    try:
        model: Any = opened(theirs)
    except UserError as error:
        found = re.search(r"cannot be evaluated here \((.*?)(?: by [\d.e+-]+)?\):", str(error))
        assert found, error  # noqa: PT017
        return Support("no", reason=found[1])
    first = model(text[:, :9])
    second = model(text[:, 9:], first.state)
    scale = 1e-5 * whole.abs().max()
    pieces = bool(((torch.cat([first.logits, second.logits], 1) - whole).abs() <= scale).all())
    fork = model(text[:1, 9:].expand(2, -1), expand(model(text[:1, :9]).state, 2)).logits
    forks = bool(((fork - whole[:1, 9:]).abs() <= scale).all())
    how = "yes" if getattr(model, "tokens_together", True) else "one token at a time"
    return Support(
        "yes",
        how if pieces else "no",
        "yes" if forks else "no",
        works(lambda: model(text, rows=Rows(torch.ones_like(text, dtype=torch.bool)))),
        works(lambda: model.under(mitigation("state_norm(threshold=1)"))(text)),
        works(lambda: observe(model, text, [20])),
        reason(model),
    )


def opened(theirs: Any) -> Any:
    """Saves a model and loads it."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return load(folder)


def reason(model: Any) -> str:
    """Why not all of the columns are a yes."""
    return "" if model.cells else FOREIGN_RECURRENCES.get(model.kind, NOT_OURS)


def works(call: Callable[[], Any]) -> str:
    try:
        call()
    except UserError:
        return "no"
    return "yes"


def rows(text: str) -> dict[str, Support]:
    """The entries of the table in a document, by architecture."""
    table = text.split(BEGIN)[1].split(END)[0]
    found: dict[str, Support] = {}
    for line in table.splitlines()[2:]:
        kinds, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for kind in kinds.replace("`", "").split(", "):
            assert kind not in found, kind
            found[kind] = Support(*cells)
    return found


def written(found: dict[str, Support]) -> str:
    """The table, with one row for all architectures of one result."""
    lines = [f"| architecture | {' | '.join(COLUMNS)} |", "| --- " * (len(COLUMNS) + 1) + "|"]
    best_first = sorted(set(found.values()), key=lambda one: (one.count("yes"), one), reverse=True)
    for support in best_first:
        kinds = ", ".join(f"`{kind}`" for kind, own in sorted(found.items()) if own == support)
        lines.append(f"| {kinds} | {' | '.join(support)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    content = DOCUMENT.read_text()
    before, rest = content.split(BEGIN)
    table = written({kind: measure(kind) for kind in KINDS})
    DOCUMENT.write_text(before + BEGIN + table + END + rest.split(END)[1])

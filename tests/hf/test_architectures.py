"""Every Hugging Face architecture fulfils the contract of a language model or is refused.

The table in docs/load.md has what was measured on a tiny model of each.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longrnn import load, mitigation
from longrnn.diagnostics.states import observe
from longrnn.errors import UserError
from longrnn.hf.foreign_load import open_hugging_face
from longrnn.ops.rows import Rows
from tests.hf.foreign import (
    KINDS,
    architecture,
    assert_continues,
    causal,
    in_one_call,
    tokens,
)

DOCUMENT = Path(__file__).parents[2] / "docs/load.md"
BEGIN, END = "<!-- architectures -->\n", "<!-- end of architectures -->\n"
TOLERANCE = 1e-5
# Of every kind of row: models of ours, hybrids, foreign models, and those that are refused.
MEASURED = ["mamba2", "falcon_h1", "xlstm", "qwen3_next", "openai-gpt"]
MEASURED += ["llama", "mistral", "gpt2", "rembert", "gemma3n_text"]


class Support(NamedTuple):
    """What works with an architecture, in the words of the table; the fields are its columns."""

    loads: str
    pieces: str = "–"
    forks: str = "–"
    padding: str = "–"
    mitigations: str = "–"
    diagnosis: str = "–"
    reason: str = ""


def measure(kind: str, folder: Path) -> Support:
    """Returns what works with a tiny random model, which is saved and loaded."""
    theirs, text = architecture(kind), tokens(2, 40, seed=3) % 60
    whole = in_one_call(theirs, text)
    theirs.save_pretrained(folder)
    try:
        model: Any = load(folder)
    except UserError as error:
        found = re.search(r"cannot be evaluated here \((.*?)(?: by [\d.e+-]+)?\):", str(error))
        assert found, error  # noqa: PT017
        return Support("no", reason=found[1])
    assert_continues(model, text, whole, TOLERANCE)
    return Support(
        "yes",
        "yes",
        "yes",
        works(lambda: model(text, rows=Rows(torch.ones_like(text, dtype=torch.bool)))),
        works(lambda: model.under(mitigation("state_norm(threshold=1)"))(text)),
        works(lambda: observe(model, text, [20])),
        "" if model.cells else "no layers that longrnn computes",
    )


def works(call: Callable[[], Any]) -> str:
    try:
        call()
    except UserError:
        return "no"
    return "yes"


def rows() -> dict[str, Support]:
    """The entries of the table in the document, by architecture."""
    table = DOCUMENT.read_text().split(BEGIN)[1].split(END)[0]
    found: dict[str, Support] = {}
    for line in table.splitlines()[2:]:
        kinds, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for kind in kinds.replace("`", "").split(", "):
            assert kind not in found, kind
            found[kind] = Support(*cells)
    return found


def test_the_table_of_the_documents_has_every_architecture_once() -> None:
    """And at least 45 of them load."""
    assert sorted(rows()) == KINDS
    assert sum(support.loads == "yes" for support in rows().values()) >= 45


def test_the_table_has_every_recurrent_architecture_of_the_installed_version() -> None:
    """Models of images and text are there as their text models, which have the same classes."""
    folder, known = Path(transformers.__file__).parent / "models", rows()
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        files = (folder / model_type_to_module_name(kind)).glob("modeling_*.py")
        code = "".join(path.read_text() for path in files)
        if "_is_stateful = True" in code or "LightningAttention" in code:
            assert {kind, f"{kind}_text"} & {*known}, kind


@pytest.mark.parametrize(
    "kind",
    [kind if kind in MEASURED else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_an_entry_of_the_table_is_what_is_measured(kind: str, tmp_path: Path) -> None:
    assert rows()[kind] == measure(kind, tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named_as_the_reason(value: float) -> None:
    theirs = causal("llama")
    with torch.no_grad():
        theirs.model.norm.weight[3] = value
    with pytest.raises(UserError, match="model.norm.weight"):
        open_hugging_face(theirs)

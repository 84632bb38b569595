"""`mitigation`: builds a mitigation from a line of text, a mapping, or a calibration file.

state_norm(threshold=30)+forget_more(decay_scale=0.9999)
{"kind": "sliding_window", "window": 8192}
calibrated.yaml
calibrated.yaml+forget_more
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from longrnn.errors import UserError
from longrnn.files import write_atomic
from longrnn.mitigations.base import MITIGATIONS, Calibration, Chain, Mitigation
from longrnn.options import Options, validated
from longrnn.yaml import parse_yaml, read_mapping, yaml_text

# In place of a mitigation: changes nothing.
NONE = "none"
# Likewise: lifts the maximum length of a Hugging Face model.
BEYOND = "beyond"
# Likewise: limits the attention of one.
ATTENTION_WINDOW = "attention_window"
# Likewise: scales the rotary encoding of one.
ROPE = "rope"
# Methods against state collapse that are not mitigations, and how to use them.
ELSEWHERE = {
    "chunk_select": "it selects among states and changes no recurrence; give --chunk-select to "
    "eval passkey, or call longrnn.inference.chunk_select.select",
    ATTENTION_WINDOW: "it changes layers of attention; give it after a Hugging Face model",
    ROPE: "it changes rotary encodings; give it after a Hugging Face model that has one",
}
# The parts of options that YAML writes in another way, and texts in quotes, which stay.
_PARTS = re.compile(
    r"""(?P<quoted>'[^']*'|"[^"]*")|(?P<separator>^|,)\s*(?P<name>\w+)\s*=|\bNone\b(?![\w./-])"""
)


class MitigationFile(Options):
    """What `longrnn calibrate` writes."""

    format: Literal["longrnn-mitigation-1"]
    fingerprint: str
    length: int
    text_sha256: list[str]
    mitigation: list[dict[str, Any]] = Field(min_length=1)


MitigationSpec = str | Path | Mapping[str, Any] | Sequence[Any] | Mitigation | Chain


def mitigation(spec: MitigationSpec) -> Chain:
    """Builds a mitigation, which may be a chain of several.

    Args:
        spec: `"name(option=value, …)"`; the path of a file that `longrnn calibrate` wrote, ending
            in .yaml or .yml; several of these joined by `+`; a mapping with `kind`; or a list of
            any of these.

    Raises:
        UserError: unknown names, values out of range, or a file that is not a calibration.
    """
    if isinstance(spec, Chain):
        return spec
    if isinstance(spec, Mitigation):
        return Chain((spec,))
    if isinstance(spec, Mapping):
        return Chain((MITIGATIONS.build(spec),))
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        return Chain(tuple(part for item in spec for part in mitigation(item).parts))
    parts: list[Mitigation] = []
    for part in split(str(spec)):
        parts += _read(Path(part)) if part.endswith((".yaml", ".yml")) else [_build(part)]
    return Chain(tuple(parts))


def split(text: str) -> list[str]:
    """The parts of a specification that are joined by `+`."""
    text = text.strip()
    # A file name may contain a +. `os.path.isfile`, because `Path.is_file` raises for long texts.
    if os.path.isfile(text):
        return [text]
    return [part.strip() for part in re.split(r"\+(?![^(]*\))", text)]


def write_calibration(path: Path, members: Sequence[Mapping[str, Any]], known: Calibration) -> None:
    """Writes a file that `mitigation` reads.

    Args:
        path: of the YAML file.
        members: mappings with `kind`, in order.
        known: where the numbers come from.
    """
    content = MitigationFile(
        format="longrnn-mitigation-1",
        fingerprint=known.fingerprint,
        length=known.length,
        text_sha256=list(known.text_sha256),
        mitigation=[
            with_files(member, lambda file: os.path.relpath(file, path.parent))
            for member in members
        ],
    ).model_dump()
    write_atomic(path, yaml_text(content, default_flow_style=None, width=100))


def _read(path: Path) -> list[Mitigation]:
    """Reads a file that `write_calibration` wrote."""
    remedy = "write one with `longrnn calibrate`"
    content = read_mapping(path, remedy, kind="mitigation file")
    try:
        file: MitigationFile = validated(MitigationFile, content, "its content")
    except UserError as error:
        raise UserError(f"{path} is not a mitigation file, {error}: {remedy}") from error
    known = Calibration(str(path), file.fingerprint, file.length, tuple(file.text_sha256))
    members = [
        with_files(member, lambda file: str(path.parent / file)) for member in file.mitigation
    ]
    return [MITIGATIONS.build(member).calibrated(known) for member in members]


def with_files(member: Mapping[str, Any], place: Callable[[str], str]) -> dict[str, Any]:
    """A mapping with other paths, from those that it has."""
    kind = MITIGATIONS.get(str(member.get("kind")))
    names = () if kind is None else kind.files
    paths = {name: member[name] for name in names if isinstance(member.get(name), str)}
    return {**member, **{name: place(path) for name, path in paths.items()}}


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Parses one `name(option=value, …)`.

    Raises:
        UserError: a text of another form.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    if match is None:
        raise UserError(
            f"{text.strip()!r} is not a valid mitigation: write name(option=value), "
            "for example sliding_window(window=8192)"
        )
    # As a mapping of YAML, whose values may be lists; `describe` writes None for null.
    mapping = _PARTS.sub(_in_yaml, match[2] or "")
    names = [part["name"] for part in _PARTS.finditer(match[2] or "") if part["name"]]
    try:
        options = parse_yaml("{" + mapping + "}")
    except ValueError:
        options = None
    if not isinstance(options, dict) or list(options) != names or "kind" in names:
        raise UserError(
            f"{match[2]!r} are not valid options of {match[1]}: write option=value, each once, "
            "where a value is a number, or a list as [1, 2]"
        )
    return match[1], options


def _in_yaml(part: re.Match[str]) -> str:
    """What a part of the options is in YAML."""
    if part["name"]:
        return f"{part['separator']} {part['name']}: "
    return part["quoted"] or "null"


def _build(text: str) -> Mitigation:
    """Builds one `name(option=value, …)`."""
    name, options = parse(text)
    if name in ELSEWHERE:
        raise UserError(f"{name} is not a mitigation: {ELSEWHERE[name]}")
    return MITIGATIONS.build({"kind": name, **options})

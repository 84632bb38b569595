"""The form that every `UserError` must have: what was given, why not, and what to do instead."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# What a remedy begins with.
VERBS = (
    "accept|add|ask|begin|build|calibrate|check|choose|connect|convert|copy|"
    "correct|download|drop|free|give|go|hold|install|keep|launch|leave|load|"
    "lower|make|measure|name|pass|pip|put|raise|read|remove|rename|repeat|reset|"
    "run|save|say|see|set|spell|start|take|train|tune|turn|update|use|wait|"
    "write"
)
REMEDY = re.compile(
    r"(?:[:;,.(] |^| or | and )(?:then |first |instead |either |please |`)?"
    rf"(?:{VERBS})\b"
    r"|\bdid you mean\b|\bknown: |\bone of: |`[a-z-]+ [^`]+` (?:says|lists)",
    re.IGNORECASE,
)
# Wording that a stranger does not understand, or that is not English.
BANNED = re.compile(
    r"\b(?:is|are|was|were|be) no (?!longer\b|more\b)"
    r"|\bmend(?:s|ed)?\b|\ba row a\b|\bof transformers\b|\bof the hub\b|\bof lm-eval\b"
    r"|\bcannot be had\b"
    r"|\bis gone\b|\bnobody\b|\btaken up\b|\bsurest\b|\bhad better\b"
)
SENTENCE = re.compile(r"[.!?] +(?=[A-Z])")
NO_REMEDY = "it does not say what to do"


def complaints(message: str) -> list[str]:
    """Returns what is wrong with a message; an empty list if it has the right form.

    Args:
        message: what the user reads.
    """
    found = []
    if "\n" in message.strip():
        found.append("it has several lines")
    if len(SENTENCE.split(message)) > 2:
        found.append("it has more than two sentences")
    if not REMEDY.search(message):
        found.append(NO_REMEDY)
    if match := BANNED.search(message):
        found.append(f"it says {match[0]!r}")
    return found


class Literal(NamedTuple):
    """The message of one `raise UserError(…)`, with `{expression}` for what is filled in."""

    path: Path
    line: int
    text: str


def literals(root: Path) -> Iterator[Literal]:
    """Yields every message that is written where it is raised."""
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "UserError":
                yield Literal(path, node.lineno, text_of(node.args[0]))


def text_of(node: ast.expr) -> str:
    """The text of a string or f-string; any other expression becomes one placeholder."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    return f"{{{ast.unparse(node)}}}"


# What a placeholder of these names holds ends in a remedy, or is checked when it is raised.
_FILLED = re.compile(
    r"\{[^{}]*(?:remedy|nearest|error|BUILD|LAUNCH|ELSEWHERE|NO_TASK|reason|advice|too_few|missing"
    r"|former|refusal|NO_BOS)[^{}]*\}"
)


def complaints_of_literal(literal: Literal) -> list[str]:
    """As `complaints`, for a message in the source, which no test may raise."""
    text = literal.text.replace("{{", "{").replace("}}", "}")
    found = complaints(re.sub(r"\{[^{}]*\}", "X", text))
    if _FILLED.search(text):
        found = [one for one in found if one != NO_REMEDY]
    return found

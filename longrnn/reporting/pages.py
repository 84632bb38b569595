"""Pages: one HTML file with all of its pictures, which are also written beside it."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import to_json

from longrnn.files import write_atomic

if TYPE_CHECKING:
    from markupsafe import Markup

REPORT = "report.html"


class Picture(NamedTuple):
    """One figure: the name of its file, what it shows, and the PNG."""

    name: str
    caption: str
    data: bytes

    def uri(self) -> str:
        """Return the picture as a data URI."""
        return f"data:image/png;base64,{base64.b64encode(self.data).decode()}"


def write_records(path: Path, records: Iterable[Any]) -> None:
    """Write records as lines of JSON, with null for numbers that are not finite."""
    lines = [to_json(record, inf_nan_mode="null") + b"\n" for record in records]
    write_atomic(path, b"".join(lines))


def breakable(name: str) -> Markup:
    """Return a name as HTML that a narrow page breaks at its signs, not inside its words."""
    from markupsafe import Markup, escape

    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[,/(])|(?=\+)", name))


def write_page(
    template: str, folder: Path, pictures: Sequence[Picture], values: Mapping[str, Any]
) -> list[Path]:
    """Write `report.html` and its pictures.

    Args:
        template: name of a file in `longrnn/reporting/templates`.
        folder: created if it does not exist.
        pictures: shown in this order, and also written as PNG files. Pictures of one name are
            numbered.
        values: variables of the template besides `pictures`.

    Returns:
        The files, the report first.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    numbered: dict[str, Picture] = {}
    for picture in pictures:
        same = sum(other.name == picture.name for other in numbered.values())
        numbered[f"{picture.name}-{same + 1}" if same else picture.name] = picture
    environment = Environment(
        loader=PackageLoader("longrnn.reporting"), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["breakable"] = breakable
    html = environment.get_template(template).render({**values, "pictures": pictures})
    files = {folder / f"{name}.png": picture.data for name, picture in numbered.items()}
    for path, content in (files | {folder / REPORT: html}).items():
        write_atomic(path, content)
    return [folder / REPORT, *files]

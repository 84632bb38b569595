"""Pages: one HTML file with all of its pictures, which are also written beside it."""

from __future__ import annotations

import base64
import re
from collections import Counter
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

    counts: Counter[str] = Counter()
    numbered = []
    for picture in pictures:
        counts[picture.name] += 1
        count = counts[picture.name]
        name = f"{picture.name}-{count}" if count > 1 else picture.name
        numbered.append(picture._replace(name=name))
    environment = Environment(
        loader=PackageLoader("longrnn.reporting"), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["breakable"] = breakable
    html = environment.get_template(template).render({**values, "pictures": numbered})
    for picture in numbered:
        write_atomic(folder / f"{picture.name}.png", picture.data)
    write_atomic(folder / REPORT, html)
    return [folder / REPORT, *(folder / f"{picture.name}.png" for picture in numbered)]

"""Writes reports: pictures as files, and one self-contained HTML file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longrnn.files import write_atomic


class Picture(NamedTuple):
    """One figure: the name of its file, what it shows, and the PNG."""

    name: str
    caption: str
    data: bytes

    def uri(self) -> str:
        """Return the picture as a data URI."""
        return f"data:image/png;base64,{base64.b64encode(self.data).decode()}"


def write_page(
    template: str, folder: Path, pictures: Sequence[Picture], values: Mapping[str, Any]
) -> list[Path]:
    """Write `report.html` and its pictures.

    Args:
        template: name of a file in `longrnn/diagnostics/templates`.
        folder: created if it does not exist.
        pictures: shown in this order, and also written as PNG files.
        values: variables of the template besides `pictures`.

    Returns:
        The files, the report first.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("longrnn.diagnostics"), autoescape=True, undefined=StrictUndefined
    )
    html = environment.get_template(template).render({**values, "pictures": pictures})
    for picture in pictures:
        write_atomic(folder / f"{picture.name}.png", picture.data)
    write_atomic(folder / "report.html", html)
    return [folder / "report.html", *(folder / f"{picture.name}.png" for picture in pictures)]

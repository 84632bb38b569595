"""What a reader finds in a report."""

import re
from base64 import b64decode
from html import unescape
from pathlib import Path


def text_of(html: str) -> str:
    """The text of an element, without spaces."""
    return "".join(unescape(re.sub(r"<[^>]*>", "", html)).split())


def read_tables(page: str) -> list[list[list[str]]]:
    """The texts of the cells of all tables of a page."""
    return [
        [
            list(map(text_of, re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL)))
            for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL)
        ]
        for table in re.findall(r"<table.*?</table>", page, re.DOTALL)
    ]


def read_alone(path: Path, *, pictures: int) -> str:
    """Reads a report, which has its pictures inside, no script, and asks for nothing."""
    page = path.read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    drawn = [
        b64decode(one) for one in re.findall(r"data:image/png;base64,(.*)", "\n".join(sources))
    ]
    assert len(drawn) == pictures
    assert all(png.startswith(b"\x89PNG") and len(png) > 5000 for png in drawn)
    assert [one for one in sources if not one.startswith("data:")] == []
    assert not re.search(r"<script|url\(|@import", page)
    return page

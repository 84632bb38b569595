"""A headless browser, and a check that a report is self-contained."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="package")
def page() -> Iterator[Any]:
    """Return a page of a headless Chromium, from playwright or the system."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    system = next(filter(None, map(shutil.which, names)), None)
    with playwright.sync_playwright() as running:
        options = {} if Path(running.chromium.executable_path).exists() else {
            "executable_path": system
        }  # fmt: skip
        if options and system is None:
            pytest.skip("no Chromium: playwright install chromium")
        browser = running.chromium.launch(args=["--no-sandbox"], **options)
        yield browser.new_page()
        browser.close()


def open_alone(page: Any, path: Path, *, pictures: int) -> None:
    """Open a report and check its pictures, and that it has no script error or request."""
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    address = path.as_uri()
    page.goto(address, wait_until="networkidle")
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [address]
    widths = page.evaluate("[...document.images].map(i => i.complete && i.naturalWidth)")
    assert (len(widths), min(widths) > 500) == (pictures, True)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")

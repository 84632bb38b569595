"""A headless browser, and the check that a report needs nothing but itself."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="package")
def page() -> Iterator[Any]:
    """A page of a headless Chromium: that of playwright, or that of the system."""
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


def open_alone(page: Any, path: Path) -> None:
    """Opens a report: no script error, nothing fetched from elsewhere."""
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    address = path.as_uri()
    page.goto(address, wait_until="networkidle")
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [address]

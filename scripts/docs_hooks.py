"""Adds pages to the documentation site that are generated from the code and the repository.

mkdocs calls `on_files` and `on_page_markdown`. README.md becomes the home page. The command
reference is generated from the typer app, the Python reference from the public names of `longrnn`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# Where the table of the options of a training run belongs.
OPTIONS = "<!-- training options -->"
# Files of the repository that are pages of the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "eval/README.md": "eval.md",
    "configs/train/README.md": "configs.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages to the files of docs/."""
    pages = {target: (ROOT / source).read_text() for source, target in PAGES.items()}
    pages["reference/commands.md"] = commands()
    pages["reference/python.md"] = public_names()
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the page with links to repository files replaced by links to site pages.

    The options of a training run are put where docs/train.md marks it.
    """
    if OPTIONS in markdown:
        from longrnn.training.config import config_keys

        lines = ["| key | default | meaning |", "| --- | --- | --- |"]
        for key, default, meaning in config_keys():
            cells = (f"`{key}`", f"`{default}`", meaning.replace("|", "\\|"))
            lines.append(f"| {' | '.join(cells)} |")
        markdown = markdown.replace(OPTIONS, "\n".join(lines) + "\n")
    source = next((s for s, t in PAGES.items() if t == page.file.src_uri), None)
    if source is None:
        source = f"docs/{page.file.src_uri}"
    depth = page.file.src_uri.count("/")

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = ((ROOT / source).parent / target).resolve()
        if not path.is_relative_to(ROOT):
            return match[0]
        place = path.relative_to(ROOT).as_posix()
        if place in PAGES:
            found = PAGES[place]
        elif place.startswith("docs/"):
            found = place.removeprefix("docs/")
        else:
            return f"`{place}`" if not match[0].startswith("!") else match[0]
        return f"{text}({'../' * depth}{found}{anchor})"

    return re.sub(r"(!?\[[^\]]*\])\(([^)#\s]+)(#[^)]*)?\)", link, markdown)


def commands() -> str:
    """Returns the command reference, which typer makes from the app."""
    import typer
    from typer.cli import get_docs_for_click

    from longrnn.cli.app import app

    program = typer.main.get_command(app)
    return get_docs_for_click(obj=program, ctx=typer.Context(program), name="longrnn")


def public_names() -> str:
    """Returns the reference page of the names that `longrnn` exports, and of `longrnn.state`."""
    import longrnn

    shown = ["# Python", ""]
    for name in longrnn.__all__:
        found = getattr(longrnn, name)
        # Name the defining module, because `longrnn.generate` is both a function and a module.
        home = getattr(found, "__module__", "longrnn") if callable(found) else "longrnn"
        if not name.startswith("_"):
            shown.append(f"::: {home}.{name}\n")
    return "\n".join([*shown, "::: longrnn.state", ""])

"""Adds pages to the documentation site that are generated from the code and the repository.

mkdocs calls `on_files` and `on_page_markdown`. README.md becomes the home page. The command
reference is generated from the typer app, the Python reference from the public names of `longrnn`
and from the docstrings of its packages.
"""

from __future__ import annotations

import ast
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
    pages["reference/packages.md"] = packages()
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the page with links to repository files replaced by links to site pages.

    The options of a training run are put where docs/train.md marks it.
    """
    if OPTIONS in markdown:
        from longrnn.training.config import help_config

        markdown = markdown.replace(OPTIONS, help_config())
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
    """Returns the command reference, read from the typer app."""
    import typer

    from longrnn.cli.app import app

    lines = ["# Commands", "", "Every command also prints this with `--help`.", ""]

    def add(command: Any, path: str) -> None:
        if not hasattr(command, "commands"):
            lines.extend([f"## {path}", "", *paragraphs(command.help), ""])
            options = [parameter for parameter in command.params if parameter.name != "help"]
            if options:
                lines.extend(["| option | default | meaning |", "| --- | --- | --- |"])
                lines.extend(row(parameter) for parameter in options)
            if command.epilog:
                lines.extend(["", *paragraphs(command.epilog)])
            lines.append("")
        else:
            context = typer.Context(command)
            for name in command.list_commands(context):
                add(command.get_command(context, name), f"{path} {name}")

    add(typer.main.get_command(app), "longrnn")
    return "\n".join(lines)


def paragraphs(text: str | None) -> list[str]:
    """Returns a help text as Markdown; indented paragraphs and examples become code blocks."""
    shown: list[str] = []
    for part in (text or "").strip().split("\n\n"):
        part = part.replace("\b\n", "").rstrip()
        if part.startswith("Example:"):
            examples = [line.strip() for line in part.removeprefix("Example:").splitlines()]
            shown += ["Example:", "", "```", *[line for line in examples if line], "```", ""]
        elif part.startswith("    "):
            shown += ["```", *[line.strip() for line in part.splitlines()], "```", ""]
        else:
            shown += [part, ""]
    return shown


def row(parameter: Any) -> str:
    """Returns one option or argument as a row of a Markdown table."""
    if parameter.param_type_name == "argument":
        name, default = f"`{(parameter.metavar or parameter.name).upper()}`", ""
    else:
        name = ", ".join(f"`{o}`" for o in [*parameter.opts, *parameter.secondary_opts])
        default = "" if parameter.default in (None, (), "") else f"`{parameter.default}`"
    if parameter.required:
        default = "required"
    about = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    return f"| {name} | {default} | {about} |"


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


def packages() -> str:
    """Returns a page with the first line of every module's docstring."""
    lines = ["# Packages", ""]
    root = ROOT / "longrnn"
    for path in sorted(root.iterdir()):
        init = path / "__init__.py" if path.is_dir() else path
        if init.is_file() and init.suffix == ".py" and not path.name.startswith("__"):
            lines += [f"## longrnn.{path.stem}", "", docstring(init), ""]
            modules = [one for one in sorted(path.rglob("*.py")) if not one.name.startswith("__")]
            for module in modules:
                name = ".".join(module.relative_to(ROOT).with_suffix("").parts)
                lines.append(f"- `{name}`: {docstring(module)}")
            lines.append("")
    return "\n".join(lines)


def docstring(path: Path) -> str:
    """Returns the first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]

"""Commands whose options are the fields of pydantic models."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, cleandoc
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import typer
from pydantic import BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from longrnn.errors import UserError
from longrnn.options import Options, explain

# The error for an invalid command line, of the click that typer contains or depends on.
UsageError: Any = typer.BadParameter.__bases__[0]
# What `--help` calls a value, by a part of its type; the first part that occurs counts.
METAVARS = {
    "Path": "PATH",
    "list[str]": "TEXT",
    "list": "LIST",
    "BeforeValidator": "LENGTH",
    "int": "NUMBER",
    "float": "NUMBER",
}


class Argument(NamedTuple):
    """Annotates a field that is an argument of the command; `metavar` is its name in the usage."""

    metavar: str


def command(
    app: typer.Typer,
    name: str,
    *,
    settings: dict[str, Any] | None = None,
    hidden: bool = False,
    **groups: type[Options],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: enter a function as a command.

    Every field with a description is an option, or an argument if it is annotated with `Argument`;
    an option without a value is left to the default of the model. A field of several texts or paths
    is an option that may be repeated, in the singular.

    Args:
        app: where the command is entered.
        name: of the command.
        settings: of the parser, as typer's `context_settings`.
        hidden: whether help texts leave it out.
        groups: by the name of the function's argument, the model of its options; by default the
            annotations of the function.
    """

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function)
        hints.pop("return", None)
        models: dict[str, type[Options]] = groups or hints

        @wraps(function)
        def run(**values: Any) -> None:
            function(**{name: _built(kind, values) for name, kind in models.items()})

        parameters = [
            _parameter(name, field)
            for kind in models.values()
            for name, field in kind.model_fields.items()
            if field.description
        ]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        paragraphs = cleandoc(function.__doc__ or "").split("\n\n")
        run.__doc__ = "\n\n".join(one.replace("\n", " ") for one in paragraphs)
        app.command(name, context_settings=settings, hidden=hidden)(run)
        return function

    return enter


def invoke(app: typer.Typer, words: list[str]) -> None:
    """Run a command line; errors of typer and of the command reach the caller.

    Raises:
        UserError: the command line is not valid.
        SystemExit: the command ended with an exit code of its own.
    """
    program = typer.main.get_command(app)
    try:
        with program.make_context("longrnn", words) as context:
            program.invoke(context)
    except typer.Exit as leaving:
        raise SystemExit(leaving.exit_code) from None
    except UsageError as error:
        path = error.ctx.command_path
        raise UserError(f"{error.format_message().rstrip('.')}: see `{path} --help`") from error


def _built(kind: type[Options], values: dict[str, Any]) -> Options:
    """Return the options of a group, with errors that name them as the user writes them."""
    given = {name: values.get(name) for name in kind.model_fields}
    try:
        return kind(**{n: v for n, v in given.items() if v is not None and v not in (False, [])})
    except UserError as error:
        if not isinstance(error.__cause__, ValidationError):
            raise
        flags = {name: flag(name, field) for name, field in kind.model_fields.items()}
        raise explain(error.__cause__, flags) from error


def flag(name: str, field: FieldInfo) -> str:
    """Return the option of a field, `--batch-size`; `--text` for a field `texts`."""
    if _is_repeated(field):
        name = name.removesuffix("s")
    return f"--{name.replace('_', '-')}"


def _is_repeated(field: FieldInfo) -> bool:
    is_parsed = any(isinstance(one, BeforeValidator) for one in field.metadata)
    return field.annotation in (list[str], list[Path]) and not is_parsed


def _parameter(name: str, field: FieldInfo) -> Parameter:
    """Return a field as a parameter from which typer makes an argument or an option."""
    is_flag = bool in (field.annotation, *get_args(field.annotation))
    given: Any = bool if is_flag else list[str] if _is_repeated(field) else str
    if not (is_flag or field.is_required()):
        given = given | None
    argument = next((one for one in field.metadata if isinstance(one, Argument)), None)
    if argument is not None:
        about: Any = typer.Argument(
            help=field.description, metavar=argument.metavar, show_default=False
        )
    else:
        kind = f"{field.annotation} {field.metadata}"
        metavar = next((word for part, word in METAVARS.items() if part in kind), "TEXT")
        value = field.default
        if isinstance(value, list):
            value = ",".join(map(str, value))
        about = typer.Option(
            flag(name, field),
            help=field.description,
            show_default=False if is_flag or value in (None, "", PydanticUndefined) else str(value),
            metavar=None if is_flag else metavar,
        )
    default: Any = Parameter.empty if field.is_required() else False if is_flag else None
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[given, about]
    )

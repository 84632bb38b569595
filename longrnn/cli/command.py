"""Commands whose options are the fields of pydantic models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, Signature, cleandoc
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from typer.core import TyperGroup

from longrnn.errors import UserError
from longrnn.options import Options, explain
from longrnn.units import format_length

# The error for an invalid command line, of the click that typer contains or depends on.
UsageError: Any = typer.BadParameter.__bases__[0]
QUIET = "--quiet"


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
    is an option that may be repeated, in the singular. A field `quiet` has the value of `--quiet`.

    Args:
        app: where the command is entered.
        name: of the command.
        settings: of the parser, as typer's `context_settings`.
        hidden: whether lists of the commands leave it out.
        groups: by the name of the function's argument, the model of its options; by default the
            annotations of the function.
    """

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        hints = groups or get_type_hints(function)
        models = {name: kind for name, kind in hints.items() if kind is not NoneType}

        @wraps(function)
        def run(parser: typer.Context, **values: Any) -> None:
            values["quiet"] = parser.find_root().params.get("quiet")
            function(**{name: _built(kind, values) for name, kind in models.items()})

        parameters = [
            _parameter(name, field)
            for kind in models.values()
            for name, field in kind.model_fields.items()
            if field.description
        ]
        kind = Parameter.POSITIONAL_OR_KEYWORD
        parameters.insert(0, Parameter("parser", kind, annotation=typer.Context))
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        paragraphs = cleandoc(function.__doc__ or "").split("\n\n")
        run.__doc__ = "\n\n".join(one.replace("\n", " ") for one in paragraphs)
        app.command(name, context_settings=settings, hidden=hidden)(run)
        return function

    return enter


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


def _parameter(name: str, field: FieldInfo) -> Parameter:
    """Return a field as a parameter from which typer makes an argument or an option."""
    kind, is_list = _value(field), _is_repeated(field)
    given: Any = list[kind] if is_list else kind
    if kind is not bool and not field.is_required():
        given = given | None
    argument = next((one for one in field.metadata if isinstance(one, Argument)), None)
    if argument is not None:
        about: Any = typer.Argument(
            help=field.description, metavar=argument.metavar, show_default=False
        )
    else:
        about = typer.Option(
            flag(name, field),
            help=field.description,
            show_default=_default(field.default) or False,
            metavar=_metavar(field) if kind is str and not is_list else None,
        )
    default: Any = Parameter.empty if field.is_required() else False if kind is bool else None
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[given, about]
    )


def _default(value: Any) -> str | None:
    """Return a default as it is written on the command line; None for one that is not shown."""
    if isinstance(value, list) and value:
        return ",".join(
            format_length(v) if isinstance(v, int) else str(v).removesuffix(".0") for v in value
        )
    is_shown = isinstance(value, int | float | str) and not isinstance(value, bool)
    return str(value) if is_shown else None


def _inner(field: FieldInfo) -> tuple[Any, bool]:
    """Return the type of a field, without None, and whether texts are parsed into it."""
    kind, extras = field.annotation, list(field.metadata)
    while True:
        if get_origin(kind) is Annotated:
            kind, *more = get_args(kind)
            extras += more
        elif get_origin(kind) in (Union, UnionType):
            kind = next(one for one in get_args(kind) if one is not NoneType)
        else:
            return kind, any(isinstance(extra, BeforeValidator) for extra in extras)


def _is_repeated(field: FieldInfo) -> bool:
    kind, is_parsed = _inner(field)
    return get_origin(kind) is list and not is_parsed


def _value(field: FieldInfo) -> type:
    """Return the type of one value: a path, a flag, or a text that pydantic reads."""
    kind, _ = _inner(field)
    if _is_repeated(field):
        (kind,) = get_args(kind)
    return kind if kind in (bool, Path) else str


def _metavar(field: FieldInfo) -> str:
    kind, is_parsed = _inner(field)
    if is_parsed:
        return "LIST" if get_origin(kind) is list else "LENGTH"
    return {int: "NUMBER", float: "NUMBER"}.get(kind, "TEXT")


class Group(TyperGroup):
    """A group whose lists leave hidden commands out."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in super().list_commands(ctx) if not self.commands[name].hidden]


class Program(Group):
    """The whole program: `--quiet` may stand anywhere, and a wrong option is one sentence."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # `launch` hands its words on to the processes that it starts.
        if args[:1] != ["launch"] and QUIET in args:
            args = [QUIET, *(word for word in args if word != QUIET)]
        with _one_sentence():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _one_sentence():
            return super().invoke(ctx)


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Turn an error of the parser into one of the user, which is reported as all others are."""
    try:
        yield
    except UsageError as error:
        if error.ctx is None or type(error).__name__ == "NoArgsIsHelpError":  # which prints help
            raise
        message = error.format_message().rstrip(".")
        raise UserError(f"{message}: see `{error.ctx.command_path} --help`") from error

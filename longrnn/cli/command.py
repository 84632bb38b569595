"""Commands whose options are the fields of pydantic models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature, cleandoc
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from typer.core import TyperGroup

from longrnn.errors import UserError
from longrnn.options import Options, explain
from longrnn.units import format_length


def command(
    app: typer.Typer,
    name: str,
    *,
    context_settings: dict[str, Any] | None = None,
    **groups: type[Options],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: enter a function as a command.

    Every field with a description is an option, or an argument if its name is in `ARGUMENTS`; an
    option without a value is left to the default of the model. A field of several texts or paths
    is an option that may be repeated, in the singular.

    Args:
        app: where the command is entered.
        name: of the command.
        context_settings: of typer, which is then the function's argument `context`.
        groups: by the name of the function's argument, the model of its options; by default the
            annotations of the function.
    """

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        models = groups or {
            argument: kind
            for argument, kind in get_type_hints(function).items()
            if isinstance(kind, type) and issubclass(kind, Options)
        }

        @wraps(function)
        def run(**values: Any) -> None:
            built: dict[str, Any] = {"context": values["context"]} if context_settings else {}
            for argument, kind in models.items():
                given = {name: values.get(name) for name in kind.model_fields}
                given = {n: v for n, v in given.items() if v is not None and v not in (False, [])}
                try:
                    built[argument] = kind(**given)
                except UserError as error:
                    if not isinstance(error.__cause__, ValidationError):
                        raise
                    flags = {name: flag(name, one) for name, one in kind.model_fields.items()}
                    raise UserError(explain(error.__cause__, flags)) from error
            function(**built)

        parameters = [
            _parameter(name, field)
            for kind in models.values()
            for name, field in kind.model_fields.items()
            if field.description
        ]
        if context_settings:
            kind = Parameter.POSITIONAL_OR_KEYWORD
            parameters.insert(0, Parameter("context", kind, annotation=typer.Context))
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__doc__ = cleandoc(function.__doc__ or "")
        app.command(name, context_settings=context_settings)(run)
        return function

    return enter


# Fields that are arguments instead of options.
ARGUMENTS = ("checkpoints", "checkpoint", "source", "destination", "data")


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
    shown = _default(field.default)
    if name in ARGUMENTS:
        about: Any = typer.Argument(help=field.description, show_default=False)
    else:
        about = typer.Option(
            flag(name, field),
            help=field.description,
            show_default=shown if shown is not None else False,
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


def on_use(commands: Mapping[str, Callable[[typer.Typer], object]]) -> type[TyperGroup]:
    """Return a group with commands that are built when they are used.

    Their options are those of evaluations, whose modules import torch.

    Args:
        commands: by name, a function that enters the command into an app.
    """

    class Group(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return [*commands, *super().list_commands(ctx)]

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name not in commands:
                return super().get_command(ctx, cmd_name)
            app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            commands[cmd_name](app)
            return typer.main.get_command(app)

    return Group

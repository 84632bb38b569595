"""Commands whose options are the fields of pydantic models."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature
from typing import Annotated, Any, NamedTuple, cast, get_args, get_origin, get_type_hints

import typer
from pydantic import BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.core import TyperArgument, TyperCommand, TyperGroup

from longrnn.errors import UserError
from longrnn.imports import OPTION
from longrnn.options import Options, explain

# The error for an invalid command line, of the click that typer contains or depends on.
UsageError: Any = typer.BadParameter.__bases__[0]


# `longrnn.imports` reads this option before the command line is parsed; this is for the help.
IMPORT = Parameter(
    "imports",
    Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        list[str],
        typer.Option(
            OPTION,
            help="A module or .py file to import, which registers cells, tasks, mitigations, "
            "encodings or evaluations of your own; may be given several times.",
            metavar="MODULE",
        ),
    ],
)


class Argument(NamedTuple):
    """Annotates a field that is an argument of the command; `metavar` is its name in the usage."""

    metavar: str


def enter(app: typer.Typer, name: str, function: Callable[..., None], **how: Any) -> None:
    """Enter a function as a command; its parameters are annotated with models of options.

    Every field with a description is an option, or an argument if it is annotated with `Argument`;
    an option without a value is left to the default of the model. A field of several texts or paths
    is an option that may be repeated, in the singular.

    Args:
        app: where the command is entered.
        name: of the command.
        function: what runs; its docstring is the help.
        how: as of `typer.Typer.command`.
    """
    models: dict[str, type[Options]] = get_type_hints(function)
    models.pop("return", None)

    @wraps(function)
    def run(**values: Any) -> None:
        function(**{name: _built(kind, values) for name, kind in models.items()})

    parameters = [
        _parameter(name, field)
        for kind in models.values()
        for name, field in kind.model_fields.items()
        if field.description
    ]
    parameters.append(IMPORT)
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    app.command(name, cls=Command, **how)(run)


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
        # An option without its value is reported without the command.
        path = error.ctx.command_path if error.ctx else "longrnn COMMAND"
        raise UserError(f"{error.format_message().rstrip('.')}: see `{path} --help`") from error


class PlainHelp:
    """Shows arguments and flags in the help without the types that typer writes."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if isinstance(parameter, TyperArgument) or parameter.is_flag:
                parameter.display_type_rich = lambda ctx: None
        return parameters


class Command(PlainHelp, TyperCommand):
    """A command."""


class Group(PlainHelp, TyperGroup):
    """A group of commands."""


def _built(kind: type[Options], values: dict[str, Any]) -> Options:
    """Return the options of a group, with errors that name them as the user writes them."""
    given = {name: values.get(name) for name in kind.model_fields}
    try:
        return kind(**{n: v for n, v in given.items() if v not in (None, []) and v is not False})
    except UserError as error:
        flags = {name: flag(name, field) for name, field in kind.model_fields.items()}
        raise explain(cast(ValidationError, error.__cause__), flags) from error


def flag(name: str, field: FieldInfo) -> str:
    """Return the option of a field, `--text` for a field `texts`, or the name of an argument."""
    if argument := _argument(field):
        return argument.metavar
    if _is_repeated(field):
        name = name.removesuffix("s")
    return f"--{name.strip('_').replace('_', '-')}"


def _argument(field: FieldInfo) -> Argument | None:
    return next((part for part in field.metadata if isinstance(part, Argument)), None)


def _is_repeated(field: FieldInfo) -> bool:
    """Return whether a field has one value for each time that its option is given."""
    parses_itself = any(isinstance(part, BeforeValidator) for part in field.metadata)
    return get_origin(field.annotation) is list and not parses_itself


def _kind(field: FieldInfo) -> Any:
    """Return what typer takes a value as: texts, which the model parses, or a flag."""
    if bool in (field.annotation, *get_args(field.annotation)):
        return bool
    return list[str] if _is_repeated(field) else str


def _metavar(field: FieldInfo) -> str | None:
    """Return what the help shows as the value of an option."""
    described, kind = f"{field.annotation} {field.metadata}", _kind(field)
    if kind is bool:
        return None
    if "Path" in described:
        return "PATH"
    number = "INTEGER" if "int" in described else "NUMBER" if "float" in described else "TEXT"
    return f"{number},…" if "list[" in described and not _is_repeated(field) else number


def _parameter(name: str, field: FieldInfo) -> Parameter:
    """Return a field as a parameter from which typer makes an argument or an option."""
    kind, value = _kind(field), field.default
    if argument := _argument(field):
        about: Any = typer.Argument(
            help=field.description, metavar=argument.metavar, show_default=False
        )
    else:
        if isinstance(value, list):
            value = ",".join(map(str, value))
        hidden = kind is bool or value in (None, "", PydanticUndefined)
        about = typer.Option(
            flag(name, field),
            help=field.description,
            show_default=False if hidden else str(value),
            metavar=_metavar(field),
        )
    default: Any = Parameter.empty if field.is_required() else None
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about]
    )

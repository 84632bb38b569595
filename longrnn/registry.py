"""Registries: a family's members by name, built from a mapping such as `{"kind": "lstm", …}`.

A member's options are the keyword-only parameters of its constructor, so a new member states its
options once, in its signature; a member that is a pydantic model states them as its fields. They
are checked and converted by pydantic: a range is an annotation of the type, as in
`Annotated[int, Field(ge=1)]`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, ClassVar, Generic, TypeVar, get_type_hints

from pydantic import create_model

from longrnn.errors import UserError, nearest
from longrnn.options import Options, validated

T = TypeVar("T")
M = TypeVar("M", bound=type)


class Registry(dict[str, "type[T]"], Generic[T]):
    """The members of one family (`family` names it in errors), by their registered names."""

    every: ClassVar[list[Registry[Any]]] = []

    def __init__(self, family: str) -> None:
        self.family = family
        self.every.append(self)

    def register(self, name: str) -> Callable[[M], M]:
        """Class decorator that enters a member under `name`.

        The same class of a module, or of a notebook's cell, that runs again replaces itself.

        Raises:
            UserError: another class has that name.
        """

        def enter(member: M) -> M:
            known = self.get(name, member)
            if (known.__module__, known.__qualname__) != (member.__module__, member.__qualname__):
                raise UserError(
                    f"{self.family} {name!r} is registered already, by {known.__qualname__} of "
                    f"{known.__module__}: register {member.__qualname__} under another name"
                )
            self[name] = member  # type: ignore[assignment]
            return member

        return enter

    def __missing__(self, name: str) -> type[T]:
        raise UserError(
            f"unknown {self.family} {name!r}: {nearest(name, self)}, or name the file that "
            "registers it by --import"
        )

    def build(self, spec: Mapping[str, Any], *context: Any) -> T:
        """Builds the member that `spec` describes.

        Args:
            spec: `{"kind": name, option: value, …}`.
            context: positional arguments that the family's contract gives to every member.

        Raises:
            UserError: unknown kind, unknown option, a value of the wrong type, or no value where
                there is no default.
        """
        member, options = self._checked(spec)
        return options if isinstance(options, member) else member(*context, **dict(iter(options)))

    def complete(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """`spec` with the default of every option that it leaves out.

        Raises:
            UserError: as `build`.
        """
        _, options = self._checked(spec)
        return {"kind": spec["kind"], **dict(iter(options))}

    def _checked(self, spec: Mapping[str, Any]) -> tuple[type[T], Any]:
        """The member, and its options as the types that its constructor states."""
        kind = spec.get("kind")
        if not isinstance(kind, str):
            raise UserError(
                f"the {self.family} is described by a mapping with 'kind', "
                f"one of: {', '.join(sorted(self))}"
            )
        options = {str(name): value for name, value in spec.items() if name != "kind"}
        return self[kind], validated(_options_of(self[kind]), options, f"{self.family} {kind!r}")


class MemberOptions(Options, coerce_numbers_to_str=True):
    """The options of a member, a subclass for each."""


@lru_cache(256)
def _options_of(member: type) -> type[Options]:
    if issubclass(member, Options):
        return member
    defaults = getattr(member.__init__, "__kwdefaults__", None) or {}
    fields: dict[str, Any] = {
        name: (kind, defaults.get(name, ...)) for name, kind in keyword_options(member).items()
    }
    return create_model(member.__name__, __base__=MemberOptions, **fields)


def keyword_options(member: type) -> dict[str, Any]:
    """Name and type, with its annotations, of every keyword-only parameter of a constructor."""
    source = member if issubclass(member, Options) else member.__init__
    hints = get_type_hints(source, include_extras=True)
    parameters = inspect.signature(source).parameters.values()
    return {p.name: hints[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY}

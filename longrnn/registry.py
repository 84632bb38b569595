"""Registries: a family's members by name, built from a mapping such as `{"kind": "lstm", …}`.

A member's options are the keyword-only parameters of its constructor, so a new member states its
options once, in its signature. They are checked and converted by pydantic: a range is an annotation
of the type, as in `Annotated[int, Field(ge=1)]`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, Generic, TypeVar, get_type_hints

from longrnn.config import validated
from longrnn.errors import UserError, nearest

T = TypeVar("T")
M = TypeVar("M", bound=type)


class Registry(dict[str, "type[T]"], Generic[T]):
    """The members of one family (`family` names it in errors), by their registered names."""

    def __init__(self, family: str) -> None:
        self.family = family

    def register(self, name: str) -> Callable[[M], M]:
        """Class decorator that enters a member under `name`."""

        def enter(member: M) -> M:
            if name in self:
                raise ValueError(f"{self.family} {name!r} is registered twice")
            self[name] = member  # type: ignore[assignment]
            return member

        return enter

    def __missing__(self, name: str) -> type[T]:
        raise UserError(f"unknown {self.family} {name!r}: {nearest(name, self)}")

    def build(self, spec: Mapping[str, Any], *context: Any) -> T:
        """Builds the member that `spec` describes.

        Args:
            spec: `{"kind": name, option: value, …}`.
            context: positional arguments that the family's contract gives to every member.

        Raises:
            UserError: unknown kind, unknown option, a value of the wrong type, or no value where
                there is no default.
        """
        kind, options = self._checked(spec)
        return self[kind](*context, **options)

    def complete(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """`spec` with the default of every option that it leaves out.

        Raises:
            UserError: as `build`.
        """
        kind, options = self._checked(spec)
        return {"kind": kind, **_defaults(self[kind]), **options}

    def _checked(self, spec: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The kind, and the given options as the types that the member's constructor states."""
        kind = spec.get("kind")
        if not isinstance(kind, str):
            raise UserError(
                f"the {self.family} is described by a mapping with 'kind', "
                f"one of: {', '.join(sorted(self))}"
            )
        options = {name: value for name, value in spec.items() if name != "kind"}
        known, which = keyword_options(self[kind], annotated=True), f"{self.family} {kind!r}"
        for name in options.keys() - known.keys():
            remedy = nearest(str(name), known) if known else "leave it out, as it takes none"
            raise UserError(f"{which} has no option {name!r}: {remedy}")
        for name in known.keys() - options.keys() - _defaults(self[kind]).keys():
            raise UserError(f"{which} needs its option {name!r}: give it")
        for name, value in options.items():
            where = f"{which}, option {name!r}"
            options[name] = made = validated(known[name], value, where)
            if any(one != one for one in (made if isinstance(made, list) else [made])):
                raise UserError(f"{where} is not a number: give one, or leave it out")
        return kind, options


def _defaults(member: type) -> dict[str, Any]:
    return getattr(member.__init__, "__kwdefaults__", None) or {}


def keyword_options(member: type, *, annotated: bool = False) -> dict[str, Any]:
    """Name and type of every keyword-only parameter of a class's constructor.

    Args:
        member: the class.
        annotated: whether a type keeps its annotations, such as that of `TokenCount`.
    """
    # The fields of a dataclass may come from another module, with its names for their types.
    source = member if is_dataclass(member) else member.__init__
    hints = get_type_hints(source, include_extras=annotated)
    parameters = inspect.signature(member.__init__).parameters.values()
    return {p.name: hints[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY}

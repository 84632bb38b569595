"""Registries: a family's members by name, built from a mapping such as `{"kind": "lstm", …}`.

A member's options are the keyword-only parameters of its constructor, so a new member states its
options once, in its signature. They are checked and converted by pydantic: a range is an annotation
of the type, as in `Annotated[int, Field(ge=1)]`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Generic, TypeVar, get_type_hints

from longrnn.config import validated
from longrnn.errors import UserError, nearest

T = TypeVar("T")
M = TypeVar("M", bound=type)


class Registry(Mapping[str, "type[T]"], Generic[T]):
    """The members of one family (`family` names it in errors), by their registered names."""

    def __init__(self, family: str) -> None:
        self.family = family
        self._members: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[M], M]:
        """Class decorator that enters a member under `name`."""

        def enter(member: M) -> M:
            if name in self._members:
                raise ValueError(f"{self.family} {name!r} is registered twice")
            self._members[name] = member  # type: ignore[assignment]
            return member

        return enter

    def __getitem__(self, name: str) -> type[T]:
        if name not in self._members:
            raise UserError(f"unknown {self.family} {name!r}: {nearest(name, self._members)}")
        return self._members[name]

    def get(self, name: str, default: Any = None) -> type[T] | Any:
        """The member called `name`, or `default`, as any mapping has it."""
        return self._members.get(name, default)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def build(self, spec: Mapping[str, Any], *context: Any) -> T:
        """Builds the member that `spec` describes.

        Args:
            spec: `{"kind": name, option: value, …}`.
            context: positional arguments that the family's contract gives to every member.

        Raises:
            UserError: unknown kind, unknown option, a value of the wrong type, or no value where
                there is no default.
        """
        kind = self._kind(spec)
        return self[kind](*context, **self.check(kind, _options(spec)))

    def complete(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """`spec` with the default of every option that it leaves out.

        Raises:
            UserError: as `build`.
        """
        kind = self._kind(spec)
        defaults = getattr(self[kind].__init__, "__kwdefaults__", None) or {}
        return {"kind": kind, **defaults, **self.check(kind, _options(spec))}

    def check(self, kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """`options` converted to the types that the member's constructor states, none missing."""
        known = keyword_options(self[kind], annotated=True)
        where = f"{self.family} {kind!r}, option"
        for name in options:
            if name not in known:
                remedy = nearest(str(name), known) if known else "leave it out, as it takes none"
                raise UserError(f"{self.family} {kind!r} has no option {name!r}: {remedy}")
        optional = getattr(self[kind].__init__, "__kwdefaults__", None) or {}
        missing = [name for name in known if name not in options and name not in optional]
        if missing:
            raise UserError(f"{self.family} {kind!r} needs its option {missing[0]!r}: give it")
        typed = {
            name: validated(known[name], value, f"{where} {name!r}")
            for name, value in options.items()
        }
        for name, value in typed.items():
            entries = value if isinstance(value, list) else [value]
            if any(isinstance(one, float) and math.isnan(one) for one in entries):
                raise UserError(f"{where} {name!r} is not a number: give one, or leave it out")
        return typed

    def _kind(self, spec: Mapping[str, Any]) -> str:
        kind = spec.get("kind")
        if not isinstance(kind, str):
            raise UserError(
                f"a {self.family} is described by a mapping with 'kind', "
                f"one of: {', '.join(sorted(self))}"
            )
        return kind


def _options(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in spec.items() if name != "kind"}


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

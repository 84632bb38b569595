"""Registries: a family's members by name, built from a mapping such as `{"kind": "lstm", …}`.

A member's options are the keyword-only parameters of its constructor, so a new member states its
options once, in its signature, and unknown or ill-typed ones are refused here for all families.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, is_dataclass, make_dataclass
from typing import Any, Generic, TypeVar, get_type_hints

from longrnn.config import refuse_booleans, takes_text
from longrnn.errors import UserError, nearest
from longrnn.units import with_counts

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
        options = dict(spec)
        kind = options.pop("kind", None)
        if not isinstance(kind, str):
            raise UserError(
                f"a {self.family} is described by a mapping with 'kind', "
                f"one of: {', '.join(sorted(self))}"
            )
        member = self[kind]
        return member(*context, **self.check(kind, options))

    def complete(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """`spec` with the default of every option that it leaves out and that has one.

        A default that depends on other options is that of the member's `derived_options`.

        Args:
            spec: see `build`.

        Raises:
            UserError: unknown kind, unknown option, or a value of the wrong type.
        """
        kind = spec.get("kind")
        if not isinstance(kind, str):
            return dict(spec)
        member = self[kind]
        given = {name: value for name, value in spec.items() if name != "kind"}
        defaults = getattr(member.__init__, "__kwdefaults__", None) or {}
        options = {**defaults, **self._typed(kind, given)}
        derived = getattr(member, "derived_options", dict)(options)
        return {"kind": kind, **options, **derived}

    def check(self, kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """`options` converted to the types that the member's constructor states, none missing."""
        typed = self._typed(kind, options)
        optional = getattr(self[kind].__init__, "__kwdefaults__", None) or {}
        for name in keyword_options(self[kind]):
            if name not in options and name not in optional:
                raise UserError(f"{self.family} {kind!r} needs its option {name!r}: give it")
        return typed

    def _typed(self, kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """`options` converted to the types that the member's constructor states."""
        # omegaconf is imported here so that `import longrnn` and `--help` stay fast.
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        known = keyword_options(self[kind])
        for name in options:
            if name not in known:
                remedy = nearest(str(name), known) if known else "leave it out, as it takes none"
                raise UserError(f"{self.family} {kind!r} has no option {name!r}: {remedy}")
            if takes_text(known[name]):
                refuse_booleans(options[name], f"{self.family} {kind!r}, option {name!r}")
        options = with_counts(
            options, keyword_options(self[kind], annotated=True), f"{self.family} {kind!r}, option"
        )
        given = [(name, known[name], field()) for name in options]
        schema = OmegaConf.structured(make_dataclass(f"{kind}_options", given))
        try:
            merged = OmegaConf.merge(schema, options)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"{self.family} {kind!r}, option {error.full_key!r}: {reason}; write a value of "
                "the "
                "right type"
            ) from error
        except TypeError as error:  # a mapping where a list is wanted
            raise UserError(
                f"{self.family} {kind!r}, options {dict(options)}: {error}; write values of the "
                "right "
                "types"
            ) from error
        except RecursionError as error:  # an anchor of YAML that contains itself
            raise UserError(
                f"{self.family} {kind!r}, options {dict(options)}: they contain themselves or are "
                "nested too deeply; write numbers, texts and lists"
            ) from error
        plain = OmegaConf.to_container(merged)
        assert isinstance(plain, dict)
        for name, value in plain.items():
            if any(isinstance(x, float) and math.isnan(x) for x in _entries(value)):
                raise UserError(
                    f"{self.family} {kind!r}, option {name!r} is not a number: give one, or leave "
                    "the option out"
                )
        return {str(name): value for name, value in plain.items()}


def _entries(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


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

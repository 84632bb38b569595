"""Registries: members by name, options checked against the constructor's signature."""

from __future__ import annotations

from typing import Any

import pytest

from longrnn.cells import MIXERS
from longrnn.errors import UserError
from longrnn.positions import POSITIONS
from longrnn.registry import Registry, keyword_options
from tests.refusals import naming


class Shape:
    """The family of the registry below; `given` holds the arguments of the constructor."""

    given: tuple[Any, ...]


@pytest.fixture
def shapes() -> Registry[Shape]:
    registry: Registry[Shape] = Registry("shape")

    @registry.register("circle")
    class Circle(Shape):
        def __init__(
            self,
            scale: float,
            *,
            radius: float = 1.0,
            corners: int = 0,
            filled: bool = False,
            colour: str = "red",
            limits: list[float] | None = None,
        ) -> None:
            self.given = (scale, radius, corners, filled, colour, limits)

    @registry.register("point")
    class Point(Shape):
        def __init__(self, scale: float) -> None:
            self.given = (scale,)

    @registry.register("polygon")
    class Polygon(Shape):
        def __init__(self, scale: float, *, corners: int, filled: bool = False) -> None:
            self.given = (scale, corners, filled)

    return registry


def test_build(shapes: Registry[Shape]) -> None:
    """Context is passed by position, options by name; missing options have their default."""
    assert shapes.build({"kind": "circle"}, 2.0).given == (2.0, 1.0, 0, False, "red", None)
    spec = {"kind": "circle", "radius": 3, "limits": [0, 1], "filled": True}
    built = shapes.build(spec, 2.0)
    assert built.given == (2.0, 3.0, 0, True, "red", [0.0, 1.0])
    assert isinstance(built.given[1], float)
    assert spec == {"kind": "circle", "radius": 3, "limits": [0, 1], "filled": True}


def test_a_registry_is_a_mapping(shapes: Registry[Shape]) -> None:
    """In order of registration; a name is registered once."""
    assert list(shapes) == ["circle", "point", "polygon"]
    assert shapes.get("square") is None
    with pytest.raises(ValueError, match="'circle' is registered twice"):
        shapes.register("circle")(Shape)
    assert shapes["circle"] is not Shape


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ({"kind": "circel"}, ["circel", "circle"]),
        ({"kind": "zzz"}, ["zzz", "circle", "point", "polygon"]),
        ({"radius": 1.0}, ["kind", "circle", "point", "polygon"]),
        ({"kind": 3}, ["kind", "circle"]),
        ({"kind": "polygon", "filled": True}, ["polygon", "corners"]),
        ({"kind": "circle", "radios": 1.0}, ["circle", "radios", "radius"]),
        ({"kind": "point", "radius": 1.0}, ["point", "radius", "leave it out"]),
        ({"kind": "circle", "scale": 1.0}, ["scale", "colour", "corners"]),
        ({"kind": "circle", "radius": None}, ["circle", "radius"]),
        ({"kind": "circle", "corners": 1.5}, ["corners", 1.5]),
        ({"kind": "circle", "filled": "perhaps"}, ["filled", "perhaps"]),
        ({"kind": "circle", "limits": ["low"]}, ["limits"]),
        ({"kind": "circle", "colour": {"name": "red"}}, ["colour"]),
    ],
)
def test_refusals(shapes: Registry[Shape], spec: dict[str, object], names: list[object]) -> None:
    """One sentence names the member, the option and what is known."""
    with pytest.raises(UserError, match=naming(*names)) as caught:
        shapes.build(spec, 1.0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("registry", [MIXERS, POSITIONS], ids=lambda registry: registry.family)
def test_options_of_the_members(registry: Registry) -> None:
    """Every option of every member states a type and a default, and accepts that default."""
    for kind, member in registry.items():
        defaults = member.__init__.__kwdefaults__ or {}
        assert defaults.keys() == keyword_options(member).keys(), kind
        assert registry.complete({"kind": kind, **defaults}) == {"kind": kind, **defaults}

"""Where transformers' own tests come from: a folder of the installed version, or a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hf import transformers_source as source


def checkout(folder: Path, version: str | None) -> Path:
    """A folder that looks like the source of transformers; without a version if it is None."""
    for name in ("tests", "src/transformers"):
        (folder / name).mkdir(parents=True)
    (folder / "tests" / "test_modeling_common.py").write_text("@mark.slow_test\n@pytest.mark.odd\n")
    if version is not None:
        code = f'"""transformers"""\n__version__ = "{version}"\n'
        (folder / "src" / "transformers" / "__init__.py").write_text(code)
    return folder


def test_the_reason_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(source.VARIABLE, raising=False)
    with pytest.raises(source.Unavailable, match=f"transformers=={source.INSTALLED}"):
        source.folder()
    assert source.markers() == []


@pytest.mark.parametrize(("version", "known"), [("5.0.0rc0", "5.0.0rc0"), (None, "unknown")])
def test_another_version_is_refused(
    version: str | None, known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(source.VARIABLE, str(checkout(tmp_path / "source", version)))
    with pytest.raises(source.Unavailable, match=f"{known}.* not {source.INSTALLED}"):
        source.folder()


def test_a_folder_without_tests_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(source.VARIABLE, str(tmp_path))
    with pytest.raises(source.Unavailable, match="has no tests/"):
        source.folder()


def test_the_installed_version_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its markers are known to pytest, which would refuse them."""
    folder = checkout(tmp_path / "source", source.INSTALLED)
    monkeypatch.setenv(source.VARIABLE, str(folder))
    assert source.folder() == folder
    assert {"slow_test", "odd"} <= set(source.markers())

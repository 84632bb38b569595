"""Configurations: YAML and dotted overrides onto dataclasses, nothing unknown."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from longrnn.sweep.grid import FAMILIES

from longrnn.cells import MIXERS
from longrnn.config import build_config, dump_config, load_config
from longrnn.errors import UserError, nearest
from longrnn.models.recurrent import RecurrentConfig
from longrnn.ranges import RANGE
from longrnn.registry import keyword_options
from longrnn.state import LMState
from longrnn.training.config import LengthConfig, TrainConfig
from longrnn.training.initial_states import Context

CONFIGS = sorted((Path(__file__).parents[1] / "configs/train").glob("*.yaml"))
# Values for keys that a configuration leaves open (???).
OPEN = {
    "finetune_mamba2": ["init_from=base", "task.data=docs"],
    "finetune_passkey": ["init_from=base", "task.filler=[a.txt]"],
}


@dataclass
class Inner:
    width: int = 3
    names: list[str] = field(default_factory=lambda: ["a"])


@dataclass
class Outer:
    rate: float = 0.1
    steps: int = 5
    label: str | None = None
    inner: Inner = field(default_factory=Inner)
    free: dict[str, Any] = field(default_factory=dict)


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_values_and_overrides(tmp_path: Path) -> None:
    """Overrides win over the file, and the file over the defaults."""
    path = write(tmp_path, "rate: 1e-3\ninner: {width: 7}\nfree: {kind: x, deep: {a: 1}}\n")
    config = load_config(Outer, path, ["inner.width=9", "free.deep.b=[1, 2]", "label=it = this"])
    assert config == Outer(
        rate=1e-3,
        label="it = this",
        inner=Inner(width=9),
        free={"kind": "x", "deep": {"a": 1, "b": [1, 2]}},
    )
    assert type(config.inner) is Inner
    assert type(config.free["deep"]) is dict


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "---\n"])
def test_an_empty_file_is_refused(text: str, tmp_path: Path) -> None:
    """A file without any key is refused: it was probably cut off."""
    with pytest.raises(UserError, match=r"config.yaml is empty: see .*configs/train"):
        load_config(Outer, write(tmp_path, text))
    with pytest.raises(UserError, match="config.yaml"):
        load_config(Outer, write(tmp_path, text), ["steps=3"])


@pytest.mark.parametrize("how", ["file", "override"])
def test_an_empty_mapping_is_no_default(tmp_path: Path, how: str) -> None:
    """An empty `task: {}` is refused, and never means the default task."""
    text, overrides = ("task: {}", []) if how == "file" else ("task: {kind: reverse}", ["task={}"])
    assert load_config(TrainConfig, write(tmp_path, text), overrides).task == {}
    nested = load_config(TrainConfig, write(tmp_path, "model: {mixer: {}}"), ["seed=1"])
    assert nested.model is not None
    assert nested.model.mixer == {}
    assert nested.task == {"kind": "passkey"}
    added = load_config(TrainConfig, write(tmp_path, "seed: 1"), ["task.max_segments=3"])
    assert added.task == {"kind": "passkey", "max_segments": 3}


def test_dump_reads_back_equal(tmp_path: Path) -> None:
    """Every value keeps its type through the file."""
    config = Outer(rate=1e-9, steps=10**6, label="1e-9", inner=Inner(names=["yes", "null"]))
    config.free = {"a": None, "b": 2.0, "c": "2.0", "d": [1e-3, 16.0]}
    assert load_config(Outer, write(tmp_path, dump_config(config))) == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configurations_of_the_repository(path: Path, tmp_path: Path) -> None:
    """Every file in configs/ loads, with values for what it leaves open."""
    config = load_config(TrainConfig, path, OPEN.get(path.stem, []))
    assert load_config(TrainConfig, write(tmp_path, dump_config(config))) == config
    assert asdict(config)["task"]["kind"]


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("rat: 1", [], "rate"),
        ("inner: {widht: 1}", [], "width"),
        ("", ["inner.nmaes=x"], "names"),
        ("", ["zzz=1"], "steps"),
        ("1: 2", [], "key"),
        ("steps: many", [], "steps"),
        ("steps: 1.5", [], "steps"),
        ("inner: {width: [1]}", [], "inner.width"),
        ("inner: 3", [], "inner"),
        ("free: [1]", [], "free"),
        ("rate: null", [], "rate"),
        ("", ["steps=ten"], "steps"),
        ("", ["inner=3"], "inner"),
        ("", ["steps"], "steps"),
        ("", ["=3"], "'=3'"),
        ("", ["free={a: 1"], "YAML"),
        ("", ["steps.a=1"], "steps"),
        ("label: ${nowhere}", [], "nowhere"),
        ("- a\n- b", [], ""),
        ("3", [], ""),
        ("just words", [], "key"),
        ("a: [1", [], "YAML"),
        ("a: b: c", [], "YAML"),
        ("a: \x00", [], "YAML"),
    ],
)
def test_errors_name_the_key(tmp_path: Path, text: str, overrides: list[str], message: str) -> None:
    """An unknown or ill-typed key is refused in one sentence that names it."""
    path = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        load_config(Outer, path, overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_bundled_configuration_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name stands for a bundled file, unless a file of that name is here."""
    monkeypatch.chdir(tmp_path)
    Path("reverse_small").mkdir()
    assert load_config(TrainConfig, "reverse_small").output_dir == "runs/reverse-small"
    Path("reverse_small").rmdir()
    Path("reverse_small").write_text("output_dir: mine")
    assert load_config(TrainConfig, "reverse_small").output_dir == "mine"
    with pytest.raises(UserError, match="did you mean 'reverse_small'"):
        load_config(TrainConfig, "reverse_smal")


def test_a_file_that_is_missing_or_no_text(tmp_path: Path) -> None:
    """A path without a readable text file is refused in one sentence."""
    with pytest.raises(UserError, match="neither a file nor the name of a bundled one"):
        load_config(Outer, tmp_path / "none.yaml")
    with pytest.raises(UserError, match="configs/train"):
        load_config(Outer, tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="YAML"):
        load_config(Outer, tmp_path / "bytes.yaml")


def test_a_key_that_is_left_open_is_named(tmp_path: Path) -> None:
    """`???` in a configuration stands for a value that the user must give."""
    path = write(tmp_path, 'name: "???"')
    message = r"leaves name open, as \?\?\?: give it a value, name=VALUE"
    with pytest.raises(UserError, match=message):
        load_config(Open, path)
    assert load_config(Open, path, ["name=a"]).name == "a"


@dataclass
class Open:
    name: str = "b"


def test_a_mapping_is_required() -> None:
    """Anything but a mapping is refused."""
    with pytest.raises(UserError, match="somewhere"):
        build_config(Outer, None, source="somewhere")


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder named `~` appears beside a configuration."""
    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "run.yaml"
    path.write_text("output_dir: ~/runs/x\ntask: {kind: text, files: [~/a.txt, b~/c.txt]}\n")
    config = load_config(TrainConfig, path, ["init_from=~/base"])
    assert (config.output_dir, config.init_from) == ("/home/me/runs/x", "/home/me/base")
    assert config.task["files"] == ["/home/me/a.txt", "b~/c.txt"]


def test_the_nearest_name() -> None:
    """The nearest name is suggested, or all names if none is near."""
    assert "mamba2" in nearest("mamba", ["lstm", "mamba2"])
    assert nearest("zzz", ["lstm", "gru"]) == "known: gru, lstm"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_steps=0", "max_steps"),
        ("save_steps=-1", "save_steps"),
        ("learning_rate=0", ""),
        ("length.sampling=log_unifrm", "log_uniform"),
        ("length.min=300", "length.max"),
        ("mixed_precision=int8", "int8"),
    ],
)
def test_training_values_out_of_range(override: str, message: str) -> None:
    """A value out of range is refused before the run starts."""
    with pytest.raises(UserError, match=message):
        build_config(TrainConfig, {}, [override])


def numeric_keys(kind: Any, prefix: str = "") -> dict[str, Any]:
    """The keys of a dataclass that hold numbers, with their fields."""
    found = {}
    for declared in fields(kind):
        text = str(declared.type)
        if text.startswith("RecurrentConfig") or text == "LengthConfig":
            inner = RecurrentConfig if text.startswith("R") else LengthConfig
            found |= numeric_keys(inner, f"{prefix}{declared.name}.")
        elif {"int", "float", "TokenCount"} & set(re.findall(r"\w+", text)):
            found[f"{prefix}{declared.name}"] = declared
    return found


NUMBERS = numeric_keys(TrainConfig)


def given(key: str, value: str) -> str:
    """An override that gives a number to a key, or to an entry of the mapping there."""
    return f"{key}={{x: {value}}}" if "dict" in str(NUMBERS[key].type) else f"{key}={value}"


def test_every_number_declares_its_range() -> None:
    """Every numeric key of the configuration declares a range."""
    assert {"max_steps", "fill", "length.max", "model.norm_eps"} <= NUMBERS.keys()
    for key, declared in NUMBERS.items():
        assert RANGE in declared.metadata, key


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", ["-1", "nan", "-.inf", ".inf", "1e400", "2", "1" + "0" * 400])
def test_numbers_out_of_range_are_one_sentence(key: str, value: str, tmp_path: Path) -> None:
    """Every number is accepted, or refused in one sentence with key and remedy."""
    path = write(tmp_path, "max_steps: 500")
    negative_is_fine = key in ("seed", "fill")
    infinite_is_fine = key in ("max_grad_norm", "max_grad_value")
    two_is_fine = key not in ("adam_beta1", "adam_beta2", "min_lr_rate")
    fine = (
        (value == "-1" and negative_is_fine)
        or (value in (".inf", "1e400") and infinite_is_fine)
        or (value == "2" and two_is_fine)
    )
    overrides = [given(key, value)]
    if value == "2" and key in ("max_steps", "batch_tokens"):
        overrides += ["warmup_steps=0", "length.max=2"]
    if value == "2" and key == "decay_steps":
        overrides += ["lr_scheduler_type=warmup_stable_decay"]
    if value == "2" and key == "min_lr":
        overrides += ["lr_scheduler_type=cosine_with_min_lr", "learning_rate=3"]
    if value == "2" and key == "early_stopping_patience":
        overrides += ["validation={kind: text, files: [held_out.txt]}"]
    if value == "2" and key == "segments_per_step":
        overrides += ["initial_state={kind: carry}"]
    if fine:
        load_config(TrainConfig, path, overrides)
        return
    with pytest.raises(UserError) as refusal:
        load_config(TrainConfig, path, overrides)
    message = str(refusal.value)
    assert "\n" not in message
    assert key in message or "too large" in message or "could not be converted" in message
    assert ":" in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["warmup_steps=11"], "warmup_steps=11"),
        (["decay_steps=3"], "lr_scheduler_type=cosine"),
        (["lr_scheduler_type=warmup_stable_decay", "decay_steps=11"], "decay_steps=8"),
        (["lr_scheduler_type=warmup_stable_decay", "decay_steps=9"], "decay_steps=8"),
        (["batch_tokens=255"], "length.max=256"),
        (["learning_rate=nan"], "learning_rate"),
        (["adam_beta2=2"], "adam_beta2"),
        (["max_steps=100000000"], "max_steps"),
        (["tokenizer=no"], "tokenizer"),
        (["freeze=[on]"], "freeze"),
        (["nonfinite=no"], "nonfinite"),
        (["mixed_precision=yes"], "mixed_precision"),
    ],
)
def test_keys_that_contradict_one_another(
    overrides: list[str], message: str, tmp_path: Path
) -> None:
    """Contradicting keys are refused in one sentence before anything is built."""
    path = write(tmp_path, "max_steps: 10\nwarmup_steps: 2")
    with pytest.raises(UserError) as refusal:
        load_config(TrainConfig, path, overrides)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("word", ["no", "'no'", "No", "off", "false"])
def test_the_word_no_is_a_mixed_precision(word: str, tmp_path: Path) -> None:
    """`no`, which YAML reads as false, is accepted in a file and on the command line."""
    path = write(tmp_path, f"mixed_precision: {word}")
    assert load_config(TrainConfig, path).mixed_precision == "no"
    path = write(tmp_path, "mixed_precision: bf16")
    config = load_config(TrainConfig, path, [f"mixed_precision={word}"])
    assert config.mixed_precision == "no"
    assert load_config(TrainConfig, write(tmp_path, dump_config(config))) == config


def test_options_of_a_kind_are_numbers_and_words(tmp_path: Path) -> None:
    """A NaN or a boolean for an option of a mixer, task or initial state is refused."""
    for options in ({"dt_min": "nan"}, {"A_init": [1, float("nan")]}):
        with pytest.raises(UserError, match="option '(dt_min|A_init)'"):
            MIXERS.check("mamba2", options)
    with pytest.raises(UserError, match="init"):
        MIXERS.check("lstm", {"init": False})
    assert MIXERS.check("mamba2", {"bias": False}) == {"bias": False}


LISTS = [[-1.0, 2.0], [2.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"validation"}))  # tasks, too
def test_numeric_options_of_every_kind(family: str) -> None:
    """An option is refused in one sentence, or builds a member whose weights are finite."""
    zero = LMState(torch.zeros(1, dtype=torch.long), ())
    context = Context(lambda rows: zero, 0, 0, 1, lambda part: part)
    arguments = {"model.mixer": (8, 8), "model.position": (8,), "task": (None,)}
    small = {"mamba2": {"d_state": 4, "head_dim": 4}}
    sentences, members = [], []
    for kind, member in FAMILIES[family].items():
        for name, hint in keyword_options(member).items():
            known = re.findall(r"\w+", str(hint))
            if not {"int", "float"} & set(known):
                continue
            for value in LISTS if "list" in known else [-1, 0, float("inf"), -0.5]:
                spec = {"kind": kind, **small.get(kind, {}), name: value}
                try:
                    built = FAMILIES[family].build(spec, *arguments.get(family, (context,)))
                except UserError as error:
                    sentences.append(str(error))
                    continue
                members.append(built)
                if isinstance(built, torch.nn.Module):
                    assert all(weight.isfinite().all() for weight in built.parameters()), spec
    assert sentences
    assert members
    assert not any("\n" in sentence for sentence in sentences)

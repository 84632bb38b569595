"""Mamba checkpoints in three layouts: they load, convert bit for bit, or are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longrnn import load, load_tokenizer, mitigation
from longrnn.checkpoints.convert import convert
from longrnn.checkpoints.folder import read_weights
from longrnn.checkpoints.layouts import save_model
from longrnn.errors import UserError
from longrnn.hf.foreign import ForeignLM
from longrnn.models import RecurrentLM
from tests.cli.test_errors import small_files
from tests.contracts.builders import assert_near, build_model
from tests.hf.foreign import (
    MAMBA,
    MAMBA2,
    VOCAB,
    assert_continues,
    causal,
    native,
    tokens,
    with_bytes,
)
from tests.refusals import naming
from tests.texts import trained_bpe

TEXT = tokens(2, 20) % 19
SHORT = {"conv_kernel": 2}


def bits(folder: Path) -> dict[str, Tensor]:
    """Return every weight as bytes, by name and dtype."""
    return {
        f"{name} {tensor.dtype}": tensor.contiguous().view(torch.uint8)
        for name, tensor in read_weights(folder).items()
    }


def assert_same_bits(one: Path, other: Path) -> None:
    first, second = bits(one), bits(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("mixer", [MAMBA, MAMBA2], ids=["mamba", "mamba2"])
def test_round_trips_are_bit_exact(
    mixer: dict[str, Any], dtype: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    native(tmp_path / "native", dtype, mixer, tie_embeddings=tied)
    convert(tmp_path / "native", tmp_path / "ours", to="ours")
    convert(tmp_path / "ours", tmp_path / "hf", to="hf")
    convert(tmp_path / "hf", tmp_path / "back", to="native")
    assert_same_bits(tmp_path / "native", tmp_path / "back")
    convert(tmp_path / "hf", tmp_path / "again", to="ours")
    assert_same_bits(tmp_path / "ours", tmp_path / "again")
    convert(tmp_path / "again", tmp_path / "hf2", to="hf")
    assert_same_bits(tmp_path / "hf", tmp_path / "hf2")
    names = ("native", "ours", "hf", "back", "again", "hf2")
    assert len({load(tmp_path / name).fingerprint() for name in names}) == 1
    assert not list(tmp_path.glob(".*"))


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mamba2", {"n_groups": 1, "tie_word_embeddings": True}),
        ("mamba2", {"use_bias": True, "use_conv_bias": False, **SHORT, "layer_norm_epsilon": 1e-3}),
        ("mamba2", {"time_step_limit": [0.0, 0.02], "residual_in_fp32": False}),
        ("mamba", {"tie_word_embeddings": True}),
        ("mamba", {"use_bias": True, "use_conv_bias": False, **SHORT, "time_step_rank": 5}),
        ("falcon_mamba", {"residual_in_fp32": False, "expand": 16}),
        ("falcon_mamba", {"mixer_rms_eps": 1e-2, "intermediate_size": 96}),
    ],
)
def test_a_mamba_of_transformers_gives_the_same_logits(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    theirs = causal(kind, **options)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    assert isinstance(ours, RecurrentLM)
    text = tokens(2, 70)
    expected = theirs(text, use_cache=False).logits
    assert_continues(ours, text, expected, 1e-5)
    convert(tmp_path / "theirs", tmp_path / "written", to="hf")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "written")
    assert torch.equal(again(text, use_cache=False).logits, expected)
    assert_same_bits(tmp_path / "theirs", tmp_path / "written")
    found = read_weights(tmp_path / "theirs").items()
    old = {name.replace("embeddings", "embedding"): weight for name, weight in found}
    save_file(old, tmp_path / "theirs/model.safetensors", {"format": "pt"})
    assert torch.equal(load(tmp_path / "theirs")(text).logits, ours(text).logits)
    # It is a RecurrentLM, to which mitigations apply.
    ours.under(mitigation("sliding_window(window=8)"))(text)


@pytest.mark.parametrize("ending", ["bin", "safetensors"])
def test_native_checkpoints_load_from_one_file_or_from_shards(ending: str, tmp_path: Path) -> None:
    """Also with a padded vocabulary and a tied head; where mamba-ssm computes has no effect."""
    folder = tmp_path / "native"
    model, text = native(folder), torch.randint(19, (2, 20))
    option(device="cuda", dtype="bfloat16", sequence_parallel=True, process_group=None)(folder)
    assert load(folder).vocab_size == 24
    assert load(folder).config.residual_in_fp32
    assert torch.equal(load(folder)(text).logits, model(text).logits)
    weights = list(read_weights(folder).items())
    (folder / "pytorch_model.bin").unlink()
    stem, write = ("model", save_file) if ending == "safetensors" else ("pytorch_model", torch.save)
    shards = [folder / f"{stem}-0000{number}-of-00002.{ending}" for number in (1, 2)]
    for shard, part in zip(shards, (weights[::2], weights[1::2]), strict=True):
        write({name: tensor.clone() for name, tensor in part}, shard)
    assert torch.equal(load(folder)(text).logits, model(text).logits)
    shards[0].unlink()
    with pytest.raises(UserError, match="embedding.weight"):
        load(folder)


def test_shards_that_repeat_a_weight_are_refused(tmp_path: Path) -> None:
    """As where the shards of two checkpoints lie in one folder."""
    native(tmp_path / "native")
    path = tmp_path / "native/pytorch_model.bin"
    for number in (1, 2):
        shutil.copy(path, path.with_name(f"pytorch_model-0000{number}-of-00002.bin"))
    path.unlink()
    with pytest.raises(UserError, match=naming("00002-of-00002", "backbone.embedding.weight")):
        load(tmp_path / "native")


@torch.no_grad()
@pytest.mark.parametrize("kind", ["mamba2", "falcon_h1", "longrnn"])
def test_a_stored_head_is_used_where_the_configuration_says_tied(kind: str, tmp_path: Path) -> None:
    """As transformers does; the model is then saved and loaded as one without a tied head."""
    from longrnn.hf.auto import LongRNNForCausalLM

    theirs: Any
    if kind == "longrnn":
        theirs = LongRNNForCausalLM.of(build_model(dtype=torch.float32, vocab_size=VOCAB))
    else:
        theirs = causal(kind, tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path / "model")
    edit(tie_word_embeddings=True, tie_embeddings=True)(tmp_path / "model")
    expected = theirs(TEXT, use_cache=False).logits
    model = load(tmp_path / "model")
    assert_near(model(TEXT).logits, expected, 1e-5)
    if isinstance(model, RecurrentLM):
        save_model(model, tmp_path / "saved")
        assert_near(load(tmp_path / "saved")(TEXT).logits, expected, 1e-5)
    if kind == "longrnn":
        again: Any = LongRNNForCausalLM.from_pretrained(tmp_path / "model")
        again.save_pretrained(tmp_path / "again")
        assert_near(load(tmp_path / "again")(TEXT).logits, expected, 1e-5)


def test_conversion_keeps_the_tokenizer(tmp_path: Path) -> None:
    model, bpe = build_model("mamba2", vocab_size=600, dtype=torch.float32), trained_bpe()
    save_model(model, tmp_path / "bytes")
    bpe.tokenizer.save_pretrained(tmp_path / "bpe")
    (tmp_path / "below").mkdir()
    save_model(model, tmp_path / "below/bpe", tokenizer="../../bpe")
    text = "The naïve reader's 你好\n\n 1,024\t!"
    for kind, ids in (("bytes", list(text.encode())), ("below/bpe", bpe.encode(text))):
        before = tmp_path / kind
        for to in ("ours", "hf", "native", "ours"):
            after = tmp_path / f"{before.name}-{to}"
            convert(before, after, to=to)
            tokenizer = load_tokenizer(after)
            assert tokenizer.encode(text) == ids, after
            assert tokenizer.decode(ids) == text
            before = after
    native(tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "new", to="ours")
    with pytest.raises(UserError, match="tokenizer"):
        load_tokenizer(tmp_path / "new")


@pytest.mark.parametrize(
    ("model", "to", "reason"),
    [
        ({"mixer": "lstm"}, "hf", "lstm"),
        ({"block": "plain"}, "native", "'plain'"),
        ({"position": "sinusoidal"}, "hf", "position.*sinusoidal"),
        ({"norm_eps": 1e-3}, "native", "norm_eps"),
        ({"norm_eps": 1e-3}, "hf", "norm_eps"),
        ({"mixer": {"kind": "mamba", "select_norm_eps": 1e-6}}, "native", "select_norm_eps"),
        ({}, "mamba", "mamba"),
    ],
)
def test_what_a_layout_does_not_support_is_refused(
    model: dict[str, Any], to: str, reason: str, tmp_path: Path
) -> None:
    save_model(build_model(dtype=torch.float32, **model), tmp_path / "ours")
    with pytest.raises(UserError, match=reason):
        convert(tmp_path / "ours", tmp_path / "new", to=to)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours"]


def test_conversion_overwrites_nothing(tmp_path: Path) -> None:
    native(tmp_path / "native")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError):
        convert(tmp_path / "native", tmp_path / "full", to="hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "native"]
    (tmp_path / ".new.partial").mkdir()  # of a conversion that was killed
    (tmp_path / ".new.partial/config.json").write_text("{")
    convert(tmp_path / "native", tmp_path / "new", to="hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "native", "new"]


@pytest.mark.parametrize("to", ["ours", "native", "hf"])
def test_a_limit_on_the_size_of_files_is_reported(to: str, tmp_path: Path) -> None:
    """Whichever library writes the file that is too large."""
    with small_files(1024), pytest.raises(OSError, match="File too large"):
        convert("passkey-tiny", tmp_path / "new", to=to)
    assert not list(tmp_path.iterdir())


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("pwned"),))


def edit(**change: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))

    return apply


def option(**change: Any) -> Callable[[Path], None]:
    return edit(ssm_cfg={"layer": "Mamba2", "d_state": 6, "headdim": 4, **change})


def weights(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = read_weights(folder)
        torch.save(change(dict(content)) or content, folder / "pytorch_model.bin")

    return apply


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "mamba 3": (edit(ssm_cfg={"layer": "Mamba3"}), "Mamba3"),
    "mamba 1": (edit(ssm_cfg={}), "mixer.A_log"),
    "attention": (edit(attn_layer_idx=[1]), "attn_layer_idx"),
    "norm first": (option(norm_before_gate=True), "norm_before_gate"),
    "wide D": (option(D_has_hdim=True), "D_has_hdim"),
    "odd option": (option(d_stat=4), "d_stat"),
    "other state": (option(d_state=5), "in_proj.weight"),
    "no padding": (edit(pad_vocab_size_multiple=0), "pad_vocab_size_multiple"),
    "no size": (edit(vocab_size=None), "vocab_size"),
    "no layer": (
        weights(lambda w: {k: v for k, v in w.items() if k != "backbone.layers.1.mixer.D"}),
        "1.mixer.D",
    ),
    "two names": (weights(lambda w: {**w, "embedding.weight": torch.ones(24, 8)}), "embedding"),
    "two heads": (
        weights(lambda w: {**w, "lm_head.weight": w["lm_head.weight"] + 1}),
        naming("tie_embeddings", "lm_head.weight"),
    ),
    "no values": (weights(lambda w: {k: v.to("meta") for k, v in w.items()}), "values"),
    "one too many": (weights(lambda w: {**w, "backbone.layers.9.D": torch.ones(4)}), "9.D"),
    "no weights": (lambda f: (f / "pytorch_model.bin").unlink(), "model.safetensors"),
    "truncated": (
        lambda f: (f / "pytorch_model.bin").write_bytes(
            (f / "pytorch_model.bin").read_bytes()[:900]
        ),
        "damaged",
    ),
    "evil": (lambda f: torch.save(Evil(), f / "pytorch_model.bin"), "safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    native(tmp_path / "native")
    apply, message = DAMAGES[damage]
    apply(tmp_path / "native")
    with pytest.raises(UserError, match=message) as error:
        load(tmp_path / "native")
    assert "\n" not in str(error.value)
    assert str(tmp_path / "native") in str(error.value)
    assert not (tmp_path / "pwned").exists()


def test_damage_of_a_hugging_face_model_is_named(tmp_path: Path) -> None:
    """Missing and misshaped weights are refused, which transformers only warns about."""
    folder = with_bytes(causal("llama", vocab_size=256), tmp_path / "llama")
    path = folder / "model.safetensors"
    whole = load_file(path)
    assert isinstance(load(folder), ForeignLM)
    with pytest.raises(UserError, match="backend"):
        load(folder, backend="torch")
    save_file({k: v for k, v in whole.items() if k != "model.norm.weight"}, path, {"format": "pt"})
    with pytest.raises(UserError, match=naming("model.norm.weight", "(32,)")):
        load(folder)
    save_file({**whole, "model.norm.weight": torch.ones(9)}, path, {"format": "pt"})
    with pytest.raises(UserError, match=naming("model.norm.weight", "(9,)", "(32,)")):
        load(folder)


def test_a_pickle_of_a_hugging_face_model_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = causal("llama")
    theirs.config.save_pretrained(tmp_path / "llama")
    file = tmp_path / "llama" / "pytorch_model.bin"
    torch.save(theirs.state_dict(), file)
    text = tokens(1, 9)
    with torch.no_grad():
        assert_near(load(tmp_path / "llama")(text).logits, theirs(text).logits, 1e-6)
    torch.save(Evil(), file)
    with pytest.raises(UserError):
        load(tmp_path / "llama")
    assert not (tmp_path / "pwned").exists()


def test_a_hub_name_without_network_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=naming("state-spaces/mamba2-130m", "HF_HOME")) as error:
        load("state-spaces/mamba2-130m", revision="main")
    assert "\n" not in str(error.value)
    with pytest.raises(UserError):
        load_tokenizer("state-spaces/mamba2-130m")


def test_a_downloaded_model_loads_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    commit = "0" * 39 + "1"
    store = tmp_path / "models--org--tiny"
    (store / "snapshots").mkdir(parents=True)
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text(commit)
    causal("llama").save_pretrained(store / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert load("org/tiny").vocab_size == VOCAB
    assert load("org/tiny", revision=commit).fingerprint() == load("org/tiny").fingerprint()
    with pytest.raises(UserError, match="org/tiny"):
        load("org/tiny", revision="other")

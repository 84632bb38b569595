"""`LongRNNForCausalLM` computes what `RecurrentLM` computes, and refuses what it cannot follow."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from longrnn import load, mitigation
from longrnn.cells import MIXERS
from longrnn.checkpoints.convert import convert
from longrnn.checkpoints.layouts import save_model
from longrnn.errors import UserError
from longrnn.hf.auto import LongRNNForCausalLM
from longrnn.hf.foreign_load import open_hugging_face
from longrnn.positions import POSITIONS
from longrnn.state import leaves
from tests.contracts.builders import (
    DEFINED_FEW,
    assert_near,
    assert_trees_equal,
    build_model,
    mitigation_spec,
    random_state,
    random_tokens,
    spec_id,
)
from tests.hf.foreign import architecture, build_auto
from tests.refusals import naming

MASK = torch.tensor([[1, 1, 0, 1, 0, 1, 1], [0, 0, 0, 1, 1, 1, 0]])
EVERY_PART = pytest.mark.parametrize(
    ("mixer", "position"),
    [(mixer, "none") for mixer in MIXERS] + [("gru", kind) for kind in POSITIONS if kind != "none"],
)


@EVERY_PART
def test_logits_states_and_loss_are_those_of_the_recurrent_model(mixer: str, position: str) -> None:
    model = build_auto(mixer, position=position)
    tokens, begin = random_tokens(2, 13), random_state(model.model, 2)
    output = model(tokens, state=begin, labels=tokens)
    logits, after = model.model(tokens, begin)
    assert torch.equal(output.logits, logits)
    assert_trees_equal(output.past_key_values.state, after)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(output.loss, loss)


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_a_saved_model_is_the_same_in_transformers_and_in_longrnn(
    mixer: str, tmp_path: Path
) -> None:
    own = build_model(mixer, block="plain", dtype=torch.float32).eval()
    tokens = random_tokens(2, 9)
    wanted = own(tokens).logits
    save_model(own, tmp_path / "own")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    assert isinstance(model, LongRNNForCausalLM)
    assert not model.training
    assert torch.equal(model(tokens).logits, wanted)
    for name, size in (("whole", "1GB"), ("shards", "1KB")):
        folder = tmp_path / name
        model.save_pretrained(folder, max_shard_size=size)
        assert (folder / "model.safetensors").exists() == (name == "whole")
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(tokens).logits, wanted)
        assert torch.equal(load(folder)(tokens).logits, wanted)
        assert load(folder).fingerprint() == own.fingerprint()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=spec_id)
def test_rates_are_never_rounded(dtype: torch.dtype, tmp_path: Path) -> None:
    """`dtype=` leaves A_log, dt_bias and D in float32, as `load` does, and results are equal."""
    save_model(build_model("mamba2", dtype=torch.float32), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    wide = {n.rsplit(".", 1)[-1] for n, w in model.named_parameters() if w.dtype != dtype}
    assert wide == {"A_log", "dt_bias", "D"}
    tokens = random_tokens(2, 9)
    assert torch.equal(model(tokens).logits, load(tmp_path, dtype=dtype)(tokens).logits)


@pytest.mark.parametrize(("spec", "mixer"), DEFINED_FEW, ids=spec_id)
def test_a_mitigation_in_the_configuration_applies(
    spec: dict[str, Any], mixer: dict[str, Any], tmp_path: Path
) -> None:
    model = build_auto(mixer, auto={"mitigation": spec})
    assert not any("_mitigated" in name for name in model.state_dict())
    tokens = random_tokens(2, 17)
    wanted = model.model.under(mitigation(spec))(tokens).logits
    torch.testing.assert_close(model(tokens).logits, wanted)
    cache = model(tokens[:, :6]).past_key_values
    torch.testing.assert_close(model(tokens[:, 6:], past_key_values=cache).logits, wanted[:, 6:])
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(tokens).logits, wanted)


def test_the_tokens_of_a_model_of_transformers_are_kept(tmp_path: Path) -> None:
    theirs = architecture("mamba2", eos_token_id=5, bos_token_id=3, pad_token_id=4)
    theirs.generation_config.max_new_tokens = 7
    theirs.save_pretrained(tmp_path / "theirs")
    model: Any = LongRNNForCausalLM.from_pretrained(tmp_path / "theirs", use_cache=False)
    model.save_pretrained(tmp_path / "ours")
    for one in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "ours")):
        for config in (one.config, one.generation_config):
            known = (config.eos_token_id, config.bos_token_id, config.pad_token_id)
            assert known == (5, 3, 4)
        assert one.generation_config.max_new_tokens == 7
        assert not one.config.use_cache
    (tmp_path / "theirs/generation_config.json").unlink()
    convert(tmp_path / "theirs", tmp_path / "converted", to="ours")
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    assert again.generation_config.eos_token_id == 5


def test_a_folder_keeps_no_state_of_an_earlier_save(tmp_path: Path) -> None:
    plain, tokens = build_model("gru", dtype=torch.float32), random_tokens(1, 5)
    for model in (plain.starting_from(plain(tokens).state), plain):
        LongRNNForCausalLM.of(model).save_pretrained(tmp_path)
        assert torch.equal(load(tmp_path)(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_the_vocabulary_can_be_resized(tie: bool, tmp_path: Path) -> None:
    model = build_auto("mamba2", tie_embeddings=tie, auto={"mitigation": "forget_more"})
    tokens = random_tokens(1, 5)
    before = model(tokens).logits
    model.resize_token_embeddings(19)
    after = model(tokens).logits
    assert after.shape[-1] == model.vocab_size == model.config.vocab_size == 19
    torch.testing.assert_close(after[..., :11], before)
    assert (model.model.head.weight is model.model.embedding.weight) == tie
    assert model(torch.full((1, 3), 18)).logits.isfinite().all()
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(tokens).logits, after)


@pytest.mark.parametrize("spec", [None, mitigation_spec("state_norm")], ids=["plain", "mitigated"])
@pytest.mark.parametrize("mixer", ["lstm", "mamba2"])
def test_replicas_of_data_parallel_compute_with_their_own_weights(
    mixer: str, spec: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica has attributes in place of parameters; Trainer makes some on several GPUs."""
    model, tokens = build_auto(mixer, auto={"mitigation": spec}).train(), random_tokens(2, 7)
    expected = model(tokens, labels=tokens).loss
    expected.backward()
    wanted = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()

    def copies(tensors: list[torch.Tensor], devices: Any, detach: bool = False) -> Any:
        return [[tensor * 1.0 for tensor in tensors] for _ in devices]

    replication = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(replication, "_broadcast_coalesced_reshape", copies)
    _, replica = replication.replicate(model, [0, 1])
    # Several GPUs would refuse weights of the first one.
    assert getattr(replica.language_model, "model", replica.model) is replica.model
    loss = replica(tokens, labels=tokens).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, wanted[name])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs_embeds": torch.zeros(1, 3, 8)}, "inputs_embeds"),
        ({"input_ids": None}, "input_ids"),
        ({"output_attentions": True}, "attentions"),
        ({"attention_masks": torch.ones(1, 3)}, "mean 'attention_mask'"),
        ({"attention_mask": torch.ones(1, 2)}, "attention_mask"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "attention_mask"),
        ({"attention_mask": torch.tensor([[0.0, 0.0, -1e9]])}, "attention_mask"),
        ({"attention_mask": torch.tensor([[0.5, 1.0, 1.0]])}, "attention_mask"),
        ({"position_ids": torch.tensor([[0, 2, 3]])}, "position_ids"),
        ({"position_ids": torch.tensor([[4, 4, 5]])}, "position_ids"),
        ({"position_ids": torch.tensor([[-1, 0, 1]])}, "position_ids"),
        ({"position_ids": torch.tensor([[0, 1]])}, "position_ids"),
        ({"cu_seq_lens_q": torch.tensor([0, 2])}, "cu_seq_lens_q.*position_ids"),
        ({"seq_idx": torch.tensor([[0, 0, 1]])}, "seq_idx.*position_ids"),
        ({"attention_mask": torch.tensor([[1, 2, 2]])}, "attention_mask"),
        ({"cache_params": 1}, "past_key_values"),
        ({"output_router_logits": True}, "router_aux_loss_coef"),
        ({"cache_position": torch.arange(3)}, "leave it out"),
        ({"token_type_ids": torch.zeros(1, 3)}, "leave it out"),
        ({"labels": torch.zeros(1, 3).long(), "logits_to_keep": 1}, "logits_to_keep"),
        ({"past_key_values": ((),)}, "StateCache"),
        ({"state": build_model("lstm").init_state(1), "output_hidden_states": True}, "init_state"),
    ],
)
def test_arguments_that_cannot_be_followed_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_auto()(**{"input_ids": random_tokens(1, 3), **given})


def test_positions_must_go_on_where_the_state_ended() -> None:
    """A model that computes with positions takes them from its state."""
    model, tokens = build_auto("gru", position="sinusoidal"), random_tokens(2, 7)
    wanted = model(tokens).logits
    cache = model(tokens[:, :3]).past_key_values
    positions = torch.arange(3, 7)[None]
    with pytest.raises(UserError, match="position_ids"):
        model(tokens[:, 3:], position_ids=positions)
    given = {"position_ids": positions, "past_key_values": cache}
    torch.testing.assert_close(model(tokens[:, 3:], **given).logits, wanted[:, 3:])


def test_shifted_labels_and_an_ignored_index_are_used() -> None:
    model, tokens = build_auto(), random_tokens(2, 7)
    wanted = model(tokens, attention_mask=MASK, labels=tokens).loss
    shifted = F.pad(tokens[:, 1:], (0, 1), value=-1)
    given = {"attention_mask": MASK, "ignore_index": -1}
    torch.testing.assert_close(model(tokens, shift_labels=shifted, **given).loss, wanted)
    torch.testing.assert_close(model(tokens, labels=tokens, **given).loss, wanted)


@pytest.mark.parametrize("how", ["device_map", "max_memory", "cpu_offload", "disk_offload"])
def test_offloaded_weights_are_refused(how: str, tmp_path: Path) -> None:
    import accelerate

    build_auto().save_pretrained(tmp_path)
    kwargs: dict[str, Any] = {}
    if how == "device_map":
        kwargs = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "offload"}
    if how == "max_memory":
        kwargs = {"device_map": "auto", "max_memory": {"cpu": "1KB"}}
        kwargs |= {"offload_folder": tmp_path / "offload"}
    model = LongRNNForCausalLM.from_pretrained(tmp_path, **kwargs)
    if how == "cpu_offload":
        accelerate.cpu_offload(model, torch.device("cpu"))
        with pytest.raises(UserError, match="offload"):
            model.model(random_tokens(1, 3))
    if how == "disk_offload":
        accelerate.disk_offload(model, str(tmp_path / "offload"), torch.device("cpu"))
    with pytest.raises(UserError, match="offload"):
        model(random_tokens(1, 3))
    with pytest.raises(UserError, match="offload"):
        model.generate(random_tokens(1, 3), max_new_tokens=2)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization")
def test_dynamic_quantization_is_refused() -> None:
    """It would change nothing of ours, and what the cells of a hybrid read."""
    auto, hybrid = build_auto(), open_hugging_face(architecture("falcon_h1"))
    for model in (auto.model, auto, hybrid, LongRNNForCausalLM.of(hybrid)):
        with pytest.raises(UserError, match="bfloat16"):
            torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})


def test_an_embedded_checkpoint_opens_by_its_name() -> None:
    model, tokens = LongRNNForCausalLM.from_pretrained("passkey-tiny"), random_tokens(1, 6)
    assert_near(model(tokens).logits, load("passkey-tiny")(tokens).logits, 1e-6)


def test_a_model_without_recurrent_layers_has_its_own_class_in_transformers() -> None:
    with pytest.raises(UserError, match=naming("llama", "AutoModelForCausalLM")):
        LongRNNForCausalLM.of(open_hugging_face(architecture("llama")))


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_a_checkpoint_lacks_are_reported_and_initialised(
    tied: bool, tmp_path: Path
) -> None:
    """Also the embedding, with the values of a new model."""
    build_auto("lstm", tie_embeddings=tied).save_pretrained(tmp_path)
    save_file({"other": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, report = LongRNNForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert report["missing_keys"] >= {name for name, _ in model.named_parameters()}
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert model.model.embedding.weight.std() > 0
    assert (model.model.head.weight is model.model.embedding.weight) == tied


@pytest.mark.parametrize(
    "given",
    [
        *({name: True} for name in ("trust_remote_code", "use_safetensors", "low_cpu_mem_usage")),
        {"revision": "main"},
        {"max_memory": {"cpu": "1GB"}, "offload_folder": "offload", "device_map": "auto"},
        {"pad_token_id": 0, "output_hidden_states": True, "use_cache": False},
    ],
    ids=lambda given: ",".join(given),
)
def test_arguments_that_other_libraries_pass_are_taken(
    given: dict[str, Any], tmp_path: Path
) -> None:
    """Those of lm-eval, TRL and the Auto classes."""
    saved, tokens = build_auto(), random_tokens(1, 5)
    saved.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **given)
    assert torch.equal(loaded(tokens).logits, saved(tokens).logits)


@EVERY_PART
def test_embeddings_may_be_given_instead_of_tokens(mixer: str, position: str) -> None:
    model, tokens = build_auto(mixer, position=position), random_tokens(2, 7)
    found = []
    for given in ("input_ids", "inputs_embeds"):
        model.zero_grad()
        vectors = model.get_input_embeddings()(tokens)
        inputs = {given: tokens if given == "input_ids" else vectors, "attention_mask": MASK}
        output = model(**inputs, labels=tokens)
        output.loss.backward()
        state = [leaf for _, leaf in leaves(output.past_key_values.state)]
        grad = model.get_input_embeddings().weight.grad
        found.append([output.logits, output.loss, grad, *state])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)

"""GGUF files: a model and its tokenizer in one file of llama.cpp."""

from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import load, load_tokenizer
from longrnn.errors import UserError
from longrnn.hf.tokenizer import byte_level
from tests.contracts.builders import assert_near
from tests.hf.foreign import causal, tokens
from tests.refusals import naming

gguf = pytest.importorskip("gguf")


def write_gguf(theirs: Any, path: Path) -> None:
    """Write a Qwen3 with a tokenizer of bytes."""
    config, writer = theirs.config, gguf.GGUFWriter(path, "qwen3")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    vocabulary = byte_level().tokenizer.get_vocab()
    writer.add_tokenizer_model("gpt2")
    ordered = sorted(vocabulary, key=lambda token: vocabulary[token])
    writer.add_token_list([*ordered, "ab"])
    writer.add_token_types([1] * (len(ordered) + 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, weight in theirs.state_dict().items():
        stem, _, ending = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{ending}", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def test_a_gguf_file_opens_by_its_name_with_its_tokenizer(tmp_path: Path) -> None:
    theirs, text = causal("qwen3", vocab_size=257, head_dim=128), tokens(2, 12)
    write_gguf(theirs, tmp_path / "tiny.gguf")
    model: Any = load(f"{tmp_path}/tiny.gguf+beyond")
    assert model.kind == "qwen3"
    assert_near(model(text).logits, theirs(text, use_cache=False).logits, 1e-5)
    assert load(tmp_path / "tiny.gguf", dtype=torch.bfloat16)(text).logits.dtype == torch.bfloat16
    tokenizer = load_tokenizer(tmp_path / "tiny.gguf")
    assert tokenizer.decode(tokenizer.encode("Call me Ishmael.")) == "Call me Ishmael."


def test_a_damaged_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    for opened in (load, load_tokenizer):
        with pytest.raises(UserError, match=r"cut\.gguf"):
            opened(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    ("key", "size"),
    [("block_count", 1), ("block_count", 2**20), ("embedding_length", 2**20)],
)
def test_sizes_that_the_tensors_do_not_have_are_refused(
    key: str, size: int, tmp_path: Path
) -> None:
    """Of a model with fewer layers, and before anything of a larger size is allocated."""
    write_gguf(causal("qwen3", vocab_size=257, head_dim=128), tmp_path / "tiny.gguf")
    content, name = (tmp_path / "tiny.gguf").read_bytes(), f"qwen3.{key}".encode()
    place = content.index(name) + len(name) + 4  # behind the type of the number
    changed = content[:place] + size.to_bytes(4, "little") + content[place + 4 :]
    (tmp_path / "tiny.gguf").write_bytes(changed)
    with pytest.raises(UserError, match=naming("tiny.gguf", "cannot be loaded")):
        load(tmp_path / "tiny.gguf")

"""A transformer in lm-eval gives the results of lm-eval's own `hf` type."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.evaluation.harness.conftest import Setting, evaluate, hf_model
from tests.evaluation.harness.test_lm import TASKS, responses


@pytest.mark.parametrize("limit", [2048, 24])
def test_llama(setting: Setting, tmp_path: Path, limit: int) -> None:
    """Forks of its cache are exact, and long requests are cut as `hf` cuts them."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=limit,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(setting.checkpoint).save_pretrained(tmp_path)
    arguments = {"pretrained": str(tmp_path), "quiet": True, "batch_size": 3}
    found = evaluate("longrnn", setting.tasks, *TASKS, model_args=arguments, num_fewshot=1)
    other = hf_model(str(tmp_path), device="cpu", batch_size=1)
    expected = evaluate(other, setting.tasks, *TASKS, num_fewshot=1)
    for task in TASKS[:2]:
        for mine, theirs in zip(responses(found, task), responses(expected, task), strict=True):
            pairs = zip(mine, theirs, strict=True)
            for a, b in pairs:
                one, two = (a[0], b[0]) if isinstance(a, (tuple, list)) else (a, b)
                assert one == pytest.approx(two, abs=1e-3)
    assert responses(found, TASKS[2]) == responses(expected, TASKS[2])
    assert (found["config"]["truncated"]["requests"] > 0) == (limit < 100)

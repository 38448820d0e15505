"""A server of a model with states: a second turn begins from a checkpoint, and operators see how many there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests.engine.helpers import byte_level_tokenizer
from tests.support.harness import Server

TEXT: dict[str, Any] = {
    "vocab_size": 271,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "head_dim": 16,
}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
TEXT |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "max_position_embeddings": 512, "eos_token_id": 2}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
KEY = "sk-admin"
STATE_BYTES = 3 * 4 * (4 * 8 * 8 + (2 * 16 + 32) * 3)


def server_info(server: Server) -> dict[str, Any]:
    return server.client.get("/server_info", headers={"authorization": f"Bearer {KEY}"}).json()


@pytest.mark.slow
def test_checkpoints_are_shown_and_make_the_second_turn_short(tmp_path: Path) -> None:
    torch.manual_seed(0)
    Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=TEXT, vision_config=VISION)).save_pretrained(tmp_path)
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    settings: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "state_checkpoint_interval": 64,
        "kv_cache_memory": "8MiB",
    }
    with Server(
        model=str(tmp_path), max_num_seqs=4, max_model_len=512, admin_keys=KEY, engine="process", **settings
    ) as server:
        server.wait_ready()
        asked = {"max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
        prompt = [i * i % 250 for i in range(200)]
        answer = server.complete(prompt, **asked)
        turn = [*prompt, *answer["choices"][0]["token_ids"]]
        # At 64, 128 and 192 tokens, which is the last block boundary of the prompt, too; and the end of the turn.
        shown = server_info(server)
        assert shown["state_checkpoints"] == {"count": 4, "num_bytes": 4 * STATE_BYTES, "hits": 0}
        assert shown["kv_cache"]["state_bytes"] == STATE_BYTES
        assert shown["kv_cache"]["num_checkpoints"] > 100
        again = server.complete([*turn, 7, 7], max_tokens=1)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 224
        found = server.metrics().samples
        assert found["headrace:state_checkpoints"] >= 4
        assert found["headrace:state_checkpoint_bytes"] == found["headrace:state_checkpoints"] * STATE_BYTES
        assert found["headrace:state_checkpoint_hits_total"] == 1
        assert server_info(server)["state_checkpoints"]["hits"] == 1

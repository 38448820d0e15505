"""Configurations of the dense and hybrid families with a few random changes: each is refused by name, or gives the
logits of transformers. `python -m tests.gpu.mutated_configs NAME FIRST COUNT` tries many by hand."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gpu.checkpoint import ModelError, open_model
from gpu.weights.tensors import weights_of
from tests.engine.helpers import byte_level_tokenizer
from tests.gpu.deepseek_models import DEEPSEEK
from tests.gpu.dense_models import DENSE, FULL, GROWING, MSCALES, SLIDING, WINDOWS, YARN, longrope
from tests.gpu.gemma_models import GEMMA, vary
from tests.gpu.gemma_models import ROPES as ROPES_OF_GEMMA
from tests.gpu.hybrid_models import HYBRIDS
from tests.gpu.hybrid_models import VALUES as OF_HYBRIDS
from tests.gpu.oracles import Runner, build, expected, prompt

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 300.0}
BY_KIND = [
    {FULL: YARN, SLIDING: DEFAULT},
    {FULL: DEFAULT, SLIDING: DEFAULT | {"rope_theta": 50.0}},
    {FULL: DEFAULT},
    {SLIDING: LINEAR, FULL: LINEAR},
    {FULL: YARN | {"truncate": False}, SLIDING: DEFAULT},
]
ROPES: list[Any] = [None, {}, LINEAR, LLAMA3, YARN, YARN | MSCALES, GROWING, DEFAULT, *BY_KIND]
ROPES += [longrope(16, 8), longrope(256, 6), longrope(256, 8), {"type": "linear", "factor": 3.0}]
ROPES += [longrope(256, 8) | {"rope_type": "su"}, longrope(16, 8) | {"factor": 4.0}, {"rope_type": "dynamic"}]
ROPES += [YARN | {"attention_factor": 1.3}, YARN | {"beta_fast": 4.0, "beta_slow": 0.5}, YARN | {"truncate": False}]
ROPES += [DEFAULT | {"partial_rotary_factor": 0.5}, YARN | {"mscale": 0.7}]
NUMBERS = [None, 0, 1, 2, 0.5, -1, "1", True]
FLAGS = [True, False, None]
VALUES: dict[str, list[Any]] = {
    "hidden_act": ["silu", "gelu", "relu", None],
    "rms_norm_eps": [1e-5, 1e-3, 0.05, None, "small"],
    "rope_theta": [100.0, 1e6, 10000.0, 500000.0, None, -1.0],
    "head_dim": [8, 16, 32, None],
    "num_attention_heads": [2, 4, 8],
    "num_key_value_heads": [1, 2, 3, 4, None],
    "num_hidden_layers": [2, 3, 4, 5],
    "hidden_size": [32, 64, 128],
    "intermediate_size": [64, 96],
    "vocab_size": [96, 97, 98],
    "tie_word_embeddings": FLAGS,
    "max_position_embeddings": [64, 512, 2048],
    "attention_bias": FLAGS,
    "mlp_bias": FLAGS,
    "qkv_bias": FLAGS,
    "sliding_window": [None, 5, 11, 0, 4096],
    "use_sliding_window": FLAGS,
    "max_window_layers": [0, 2, 28, None],
    "layer_types": [None, [], [FULL] * 4, WINDOWS, [SLIDING] * 4, [FULL] * 3, ["attention"] * 4, ["mamba"] * 4],
    "partial_rotary_factor": [None, 0.0, 0.25, 0.3, 0.5, 0.75, 1.0, 2.0],
    "rope_scaling": ROPES,
    "rope_parameters": ROPES,
    "original_max_position_embeddings": [16, 256, 4096, None],
    "embedding_multiplier": NUMBERS,
    "residual_multiplier": NUMBERS,
    "attention_multiplier": NUMBERS,
    "logits_scaling": NUMBERS,
    "no_rope_layers": [None, [], [0, 1, 1, 0], [1, 1, 1, 1, 0], [1, 0], [2, 1, 1, 1], [True, False, True, True]],
    "no_rope_layer_interval": [None, 0, 1, 2, 4, 9],
    "position_embedding_type": ["rope", "nope", None, "alibi", 1],
    "num_local_experts": [0, 2, None],
    "num_experts": [4, 6, 8, None],
    "num_experts_per_tok": [1, 2, 3, 7],
    "moe_intermediate_size": [32, 48, None],
    "shared_intermediate_size": [80, 96, None],
    "shared_expert_intermediate_size": [48, 96, None],
    "norm_topk_prob": FLAGS,
    "decoder_sparse_step": [1, 2, 3],
    "mlp_only_layers": [None, [], [0], [1], [1, 9]],
    "quantization_config": [None, {"quant_method": "aqlm"}],
    "model_type": ["llama", "mistral", "phi3", None],
}
# Only for the families with these keys.
OF_DEEPSEEK: dict[str, list[Any]] = {
    "q_lora_rank": [None, 24, 16, 0],
    "kv_lora_rank": [20, 16, None],
    "qk_nope_head_dim": [12, 8, 14, None],
    "qk_rope_head_dim": [8, 12, 7, None],
    "v_head_dim": [10, 12, None],
    "n_group": [1, 2, 4, 8, 3, 0, None],
    "topk_group": [1, 2, 3, 4, 5, 0, None],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc", None],
    "scoring_func": ["sigmoid", "softmax", None],
    "norm_topk_prob": FLAGS,
    # Integers mean the same, and transformers refuses them.
    "routed_scaling_factor": [None, 0.0, 0.5, 1.0, 2.0, -1.0, "1", True],
    "n_routed_experts": [8, 4, None],
    "num_experts_per_tok": [1, 2, 3, 4, 6, 9, None],
    "n_shared_experts": [1, 2, 0, None],
    "first_k_dense_replace": [0, 1, 2, 4, None],
    "mlp_layer_types": [None, ["dense"] + ["sparse"] * 3, ["sparse"] * 4, ["dense"] * 4, ["dense", "sparse"]],
    "moe_layer_freq": [1, 2, None],
    "rope_interleave": FLAGS,
    "use_qk_norm": FLAGS,
}
FOUR = {FULL: ROPES_OF_GEMMA[FULL], SLIDING: DEFAULT}
HEADS: list[Any] = [
    {"head_dim": 32},
    {"head_dim": 32, "num_key_value_heads": 1},
    {"head_dim": 16},
    {},
    {"sliding_window": 3},
]
OF_GEMMA: dict[str, list[Any]] = {
    "hidden_activation": ["gelu_pytorch_tanh", "gelu", "silu", None],
    "num_hidden_layers": [3, 5, 6],
    "intermediate_size": [64, 96, [96] * 6, [96] * 5, [96] * 5 + [64]],
    "layer_types": [None, [], [FULL] * 6, [SLIDING] * 6, [SLIDING, FULL] * 3, [FULL, SLIDING] * 3, [FULL] * 5],
    "final_logit_softcapping": [None, 2.0, 0.0, 0, 30.0, -1.0],
    "num_kv_shared_layers": [0, 1, 2, 3, 4, 5, 6, None],
    "hidden_size_per_layer_input": [0, 16, 24, None],
    "vocab_size_per_layer_input": [90, 97, 98, None],
    "use_double_wide_mlp": FLAGS,
    "attention_k_eq_v": FLAGS,
    "enable_moe_block": FLAGS,
    "top_k_experts": [1, 2, 3, 7, None],
    "global_head_dim": [8, 16, 32, None],
    "num_global_key_value_heads": [1, 2, 4, None],
    "use_bidirectional_attention": ["all", "vision", None, False],
    "per_layer_config": [None, {}, {"5": HEADS[0]}, *({"2": each, "5": each} for each in HEADS)],
    "rope_parameters": [*ROPES, FOUR, FOUR | {FULL: FOUR[FULL] | {"factor": 1.5}}, FOUR | {SLIDING: FOUR[FULL]}],
    "activation_sparsity_pattern": [None, 0.5, [], [0.5] * 6, [0.0] * 6, [0.9] + [0.0] * 5, [0.0, 0.5] * 3, [1.0] * 6],
    "altup_num_inputs": [1, 2, 3, 4],
    "altup_active_idx": [0, 1, 2, 3, -1],
    "altup_correct_scale": FLAGS,
    "altup_coef_clip": [None, 0.1, 120.0],
    "laurel_rank": [8, 16, None],
    "query_pre_attn_scalar": [24, None],
    "rope_local_base_freq": [50.0, None],
    "model_type": ["gemma3_text", "gemma4_text", "gemma3n_text", None],
}
NESTED: dict[str, list[Any]] = {
    "rope_theta": [50.0, 1e6, None],
    "rope_type": ["default", "yarn", "linear", "longrope", None],
    "factor": [1.0, 2.0, None, "2"],
    "original_max_position_embeddings": [16, 256, None],
    "partial_rotary_factor": [0.25, 0.5, 1.0, None],
    "mscale": [0.5, 1.0, 0, None],
    "mscale_all_dim": [0.5, 1.0, 0, None],
    "llama_4_scaling_beta": [0.0, 0.1, 0.5, None],
    "attention_factor": [0.8, 1.0, None],
    "truncate": FLAGS,
    "short_factor": [[1.5] * 8, [1.5] * 6, None],
    "long_factor": [[2.5] * 8, [2.5] * 6, "long"],
}


def mutated(values: dict[str, Any], chance: random.Random, choices: dict[str, list[Any]]) -> dict[str, Any]:
    """Return values with one to three changes."""
    values = json.loads(json.dumps(values))
    for _ in range(chance.choice([1, 1, 2, 3])):
        known = [key for key in choices if key in values or chance.random() < 0.2]
        what, rope = chance.random(), values.get("rope_parameters")
        if what < 0.3 and isinstance(rope, dict) and rope:
            inner = [each for each in rope.values() if isinstance(each, dict)]
            target = chance.choice(inner) if inner else rope
            key = chance.choice([*target, *NESTED] if chance.random() < 0.5 or not target else [*target])
            if chance.random() < 0.3:
                target.pop(key, None)
            else:
                target[key] = chance.choice(NESTED.get(key, [None, 1]))
        elif what < 0.4:
            values.pop(chance.choice(known), None)
        else:
            key = chance.choice(known)
            values[key] = chance.choice(choices[key])
    return values


def repaired(values: Any, honest: Any) -> Any:
    """Return values that transformers takes, and that mean the same here: some of its keys may not be null, and it
    needs a `model_type`."""
    if not isinstance(values, dict):
        return values
    before = honest if isinstance(honest, dict) else {}
    kept = {
        key: repaired(value, before.get(key))
        for key, value in values.items()
        if value is not None and (key, value) != ("layer_types", [])
    }
    kept |= {key: None for key, value in values.items() if value is None and key in before and before[key] is None}
    return kept | ({"model_type": before["model_type"]} if "model_type" in before and "model_type" not in kept else {})


class Judge:
    """A checkpoint of one configuration, and what becomes of changes of it."""

    def __init__(self, name: str, folder: Path) -> None:
        torch.manual_seed(4)
        config = {**DENSE, **DEEPSEEK, **HYBRIDS, **GEMMA}[name]
        oracle = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        vary(oracle)
        oracle.save_pretrained(folder)
        byte_level_tokenizer().save(str(folder / "tokenizer.json"))
        self.name, self.folder = name, folder
        own = OF_HYBRIDS if name in HYBRIDS else OF_DEEPSEEK if name in DEEPSEEK else OF_GEMMA if name in GEMMA else {}
        self.choices = VALUES | own
        self.tolerance = 2.5e-3 if name in HYBRIDS else 2e-4  # two forms of a recurrence differ by more
        self.values = json.loads((folder / "config.json").read_text())

    def outcome(self, seed: int) -> str:
        """Return "refused", or "equal". Raises AssertionError for anything else, with the changed configuration."""
        values = mutated(self.values, random.Random(f"{self.name} {seed}"), self.choices)
        (self.folder / "config.json").write_text(json.dumps(values))
        try:
            files = open_model(str(self.folder))
            model = build(files.config)
            model.load_weights(weights_of(files))
        except ModelError:
            return "refused"
        changed = {key: value for key, value in values.items() if self.values.get(key) != value}
        changed |= dict.fromkeys(self.values.keys() - values.keys(), "removed")
        try:
            oracle = self._oracle()
        except Exception as error:
            (self.folder / "config.json").write_text(json.dumps(repaired(values, self.values)))
            try:
                oracle = self._oracle()
            except Exception:
                raise AssertionError(f"{self.name} {seed}: served, transformers: {error!r:.300}; {changed}") from error
        tokens = prompt(seed, 40)
        (logits,) = Runner(model).step((tokens, 0, list(range(12))))
        try:
            wanted = expected(oracle, tokens)
            # Scores that are many times as large make differences of rounding as much larger.
            bound = self.tolerance * max(2.0, float(wanted.abs().max()))
            torch.testing.assert_close(logits, wanted, atol=bound, rtol=2e-4)
        except AssertionError as error:
            raise AssertionError(f"{self.name} {seed}: other logits; {error}; {changed}") from error
        return "equal"

    def _oracle(self) -> PreTrainedModel:
        options: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32, "output_loading_info": True}
        loaded: Any = AutoModelForCausalLM.from_pretrained(str(self.folder), **options)
        oracle, found = loaded
        wrong = {kind: keys for kind, keys in found.items() if keys}
        assert not wrong, f"it makes up weights: {wrong}"
        model, rope = oracle.base_model, oracle.config.rope_parameters
        rotary = model.rotary_emb if hasattr(model, "rotary_emb") else model.pos_emb
        if rotary is not None and rope.get("rope_type") == "longrope":  # a server's contexts are all long, or all short
            of_long, _ = ROPE_INIT_FUNCTIONS["longrope"](oracle.config, "cpu", seq_len=2**20)
            if rope["original_max_position_embeddings"] < 128:
                rotary.original_inv_freq = of_long
        return oracle.eval()


def run(name: str, first: int, count: int) -> tuple[Counter[str], list[str]]:
    """Return how many outcomes there were of each kind, and what was wrong."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    wrong: list[str] = []
    outcomes: Counter[str] = Counter()
    folder = Path(tempfile.mkdtemp())
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(shutil.rmtree, folder)
        judge = Judge(name, folder)
        for seed in range(first, first + count):
            try:
                outcomes[judge.outcome(seed)] += 1
            except AssertionError as error:
                wrong.append(str(error))
    return outcomes, wrong


if __name__ == "__main__":
    torch.set_num_threads(1)
    outcomes, wrong = run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(sys.argv[1], dict(outcomes), f"{len(wrong)} wrong", flush=True)
    for message in wrong[:12]:
        print("   ", message.replace("\n", " ")[:600])

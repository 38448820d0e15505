"""Scheduler, runner and sampler together against transformers: small random models in float32, and every way that the
engine has of computing a sequence. What is compared are the raw log-probabilities of each generated position, so a
wrong slot, position, mask or cached block shows even where it would not change the token."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    ArceeConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    OlmoConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    StableLmConfig,
    Starcoder2Config,
)

from app.config.settings import Settings
from app.serving.loading import core_factory, open_files
from engine.core.core import EngineCore
from engine.messages import EngineCoreRequest
from engine.plan import most_blocks
from tests.engine.helpers import byte_level_tokenizer, make_request
from tests.golden.driving import Story, drive, fresh_core, plans_of
from tests.golden.oracle import Oracle
from tests.gpu.deepseek_models import BOTH, GROUPS, LATENT
from tests.gpu.deepseek_models import EXPERTS as GROUPED
from tests.gpu.gemma_models import EXPERTS as IN_PARALLEL
from tests.gpu.gemma_models import SIZES, SPARSE, WIDE, vary
from tests.gpu.oracles import LLAMA3_ROPE, SMALL, YARN
from tests.selection import slow_except

VOCAB = 271
BLOCK_SIZE = 4
MAX_MODEL_LEN = 96
SHAPE = SMALL | {"vocab_size": VOCAB, "eos_token_id": 2, "bos_token_id": 1}
OF_LAYERS = {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB}
GEMMA = {"num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 11}
EXPERTS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2}
OWN: dict[str, Any] = {"vocab_size": VOCAB}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=11),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2-some-windows": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=11, max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE | {"head_dim": 16}),
    "gemma2": Gemma2Config(**SHAPE | GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=2.0),
    "gemma3": Gemma3TextConfig(**SHAPE | GEMMA | {"num_key_value_heads": 1}),
    "mixtral": MixtralConfig(**SHAPE, **EXPERTS),
    "qwen3-moe": Qwen3MoeConfig(**SHAPE | EXPERTS | {"head_dim": 16, "moe_intermediate_size": 24}),
    "deepseek-v3": DeepseekV3Config(**LATENT | OWN, **GROUPS, first_k_dense_replace=1, rope_parameters=YARN | BOTH),
    "deepseek-v2": DeepseekV2Config(
        **LATENT | OWN | {"q_lora_rank": None}, **GROUPS, topk_method="group_limited_greedy", first_k_dense_replace=1
    ),
    "glm-flash": Glm4MoeLiteConfig(**LATENT | OWN),
    "glm-moe": Glm4MoeConfig(**SHAPE | GROUPED | {"head_dim": 16}, use_qk_norm=True),
    "gpt-oss-window": GptOssConfig(**SHAPE, **EXPERTS, sliding_window=11, swiglu_limit=1.5, rope_parameters=YARN),
    "gemma4": Gemma4TextConfig(**SIZES | WIDE | OF_LAYERS, num_kv_shared_layers=3, use_double_wide_mlp=True),
    "gemma4-moe": Gemma4TextConfig(**SIZES | WIDE | OF_LAYERS | IN_PARALLEL),
    "gemma3n": Gemma3nTextConfig(**SIZES | SPARSE | OF_LAYERS, num_kv_shared_layers=2),
}

# Models without a record, which transformers computes.
TAIL: dict[str, Any] = {
    "stablelm": StableLmConfig(**SHAPE, use_parallel_residual=True, qk_layernorm=True),
    "cohere": CohereConfig(**SHAPE, use_qk_norm=True),
    "cohere2-window": Cohere2Config(**SHAPE, sliding_window=11),
    "gpt-neox": GPTNeoXConfig(**SHAPE | {"num_key_value_heads": 6}),
    "gpt2": GPT2Config(
        vocab_size=VOCAB,
        n_positions=512,
        n_embd=48,
        n_layer=3,
        n_head=6,
        initializer_range=0.2,
        eos_token_id=2,
        bos_token_id=1,
    ),
    "starcoder2-window": Starcoder2Config(**SHAPE, sliding_window=11),
    "olmo": OlmoConfig(**SHAPE, clip_qkv=2.0),
    "nemotron": NemotronConfig(**SHAPE),
    "exaone4-window": Exaone4Config(**SHAPE, sliding_window=11, sliding_window_pattern=2),
    "minimax-m2": MiniMaxM2Config(**SHAPE, **EXPERTS),
    "hunyuan": HunYuanDenseV1Config(**SHAPE),
    "ernie4.5": Ernie4_5Config(**SHAPE),
    "seed-oss": SeedOssConfig(**SHAPE),
    "arcee": ArceeConfig(**SHAPE),
}
CONFIGS |= TAIL

QUICK = ("llama", "gemma3", "qwen3-moe", "gpt-oss-window", "cohere2-window")
WITHOUT_WINDOWS = [name for name in CONFIGS if "window" not in name and "gemma" not in name]

Pair = tuple[Oracle, EngineCore]


@pytest.fixture(scope="module", params=slow_except(CONFIGS, *QUICK))
def pair(request, tmp_path_factory) -> Iterator[Pair]:
    """A model that transformers made and saved, and the engine that the application makes of its directory."""
    torch.manual_seed(2)
    oracle = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param], attn_implementation="eager").eval()
    vary(oracle)
    directory = tmp_path_factory.mktemp(request.param)
    oracle.save_pretrained(directory)
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    settings = Settings(
        model=str(directory),
        dtype="float32",
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        block_size=BLOCK_SIZE,
        num_threads=1,
        target_inter_token_latency=60.0,  # so that no plan depends on the clock
    )
    files = open_files(settings, None)
    assert (files.config.transformers_dir is not None) == (request.param in TAIL)
    core = core_factory(settings, files)()
    yield Oracle(oracle), core
    core.shutdown()


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def ask(name: str, tokens: list[int], max_tokens: int = 12, **sampling: Any) -> EngineCoreRequest:
    """Greedy unless told otherwise, for exactly `max_tokens`, with the five most likely tokens of each position."""
    asked = {"seed": 0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 5}
    return make_request(tokens, name, **asked | sampling)


def assert_agrees(oracle: Oracle, story: Story, *requests: EngineCoreRequest) -> None:
    for request in requests:
        tokens = story.tokens(request.request_id)
        assert len(tokens) == request.sampling.max_tokens
        oracle.assert_agrees(
            request.prompt_token_ids,
            tokens,
            story.logprobs(request.request_id),
            greedy=request.sampling.greedy and not request.sampling.has_penalties,
        )


@pytest.mark.slow
def test_a_prefill_and_its_decodes_agree_with_transformers(pair: Pair):
    oracle, core = pair
    core = fresh_core(core)
    for request in (ask("long", prompt(0, 45), 30), ask("one token", prompt(1, 1), 30), ask("block", prompt(2, 4))):
        assert_agrees(oracle, drive(core, [request]), request)


def test_a_prefill_in_chunks_agrees_with_transformers(pair: Pair):
    oracle, core = pair
    core = fresh_core(core, max_num_batched_tokens=9, enable_prefix_caching=False)
    request = ask("chunked", prompt(3, 40))
    story = drive(core, [request])
    assert [plan["chunked"] for plan in plans_of(core)][:5] == [9, 9, 9, 9, 4]
    assert_agrees(oracle, story, request)


@pytest.mark.slow
def test_a_request_on_blocks_that_others_computed_agrees_with_transformers(pair: Pair):
    oracle, core = pair
    core = fresh_core(core, max_num_batched_tokens=16)
    shared = prompt(4, 24)
    first, again, longer = ask("first", shared), ask("again", shared), ask("longer", shared[:21] + prompt(5, 20))
    drive(core, [first])
    story = drive(core, [again])
    assert story.num_cached_tokens("again") == 20  # all whole blocks that leave a token to compute
    assert_agrees(oracle, story, again)
    story = drive(core, [longer])
    assert story.num_cached_tokens("longer") == 20
    assert_agrees(oracle, story, longer)
    # The same blocks at other positions are other content.
    moved = ask("moved", shared[BLOCK_SIZE:] + prompt(18, 3))
    story = drive(core, [moved])
    assert story.num_cached_tokens("moved") == 0
    assert_agrees(oracle, story, moved)
    # What a request generated can be found as well.
    turn = drive(core, [ask("turn", shared + prompt(6, 9), 15)])
    followed = ask("followed", shared + prompt(6, 9) + turn.tokens("turn") + prompt(7, 3))
    story = drive(core, [followed])
    assert story.num_cached_tokens("followed") == 44
    assert_agrees(oracle, story, followed)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize(
    "pair", slow_except(WITHOUT_WINDOWS, "llama"), indirect=True, scope="module"
)  # with them these two would fit
def test_a_request_that_is_preempted_and_resumed_agrees_with_transformers(pair: Pair, enable_prefix_caching: bool):
    oracle, core = pair
    assert core.config.facts.kv_windows == (None,)
    # 24 blocks hold 96 tokens; the two want 58 each in the end.
    core = fresh_core(core, num_blocks=24, enable_prefix_caching=enable_prefix_caching)
    stays, goes = ask("stays", prompt(8, 30), 28), ask("goes", prompt(9, 34), 24)
    story = drive(core, [stays, goes])
    assert story.num_preemptions == 1
    ran = ["goes" in plan for plan in plans_of(core)]
    assert ran.index(False) < len(ran) - 1 - ran[::-1].index(True), "it ran, was out, and ran again"
    # Resumed, it computes what it had said before, too: more than its prompt in one go, unless blocks were found.
    resumed = [plan["goes"] for plan in plans_of(core) if plan.get("goes", 1) > 1]
    assert len(resumed) == 2
    assert (resumed[1] > 34) == (not enable_prefix_caching)
    assert_agrees(oracle, story, stays, goes)


@pytest.mark.slow
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_requests_that_outgrow_the_blocks_together_agree_with_transformers(pair: Pair, enable_prefix_caching: bool):
    oracle, core = pair
    num_blocks = most_blocks(core.config.facts.kv_windows, BLOCK_SIZE, MAX_MODEL_LEN, 8)
    options = {"max_num_batched_tokens": 8, "enable_prefix_caching": enable_prefix_caching}
    core = fresh_core(core, num_blocks=num_blocks, **options)
    requests = [ask(f"request {number}", prompt(20 + number, 5), 35) for number in range(5)]
    story = drive(core, requests)
    assert story.num_preemptions > 0
    assert_agrees(oracle, story, *requests)


def test_everything_at_once_agrees_with_transformers(pair: Pair):
    oracle, core = pair
    windows = core.config.facts.kv_windows
    core = fresh_core(core, num_blocks=40 * len(windows), max_num_batched_tokens=20)
    system = prompt(10, 16)
    requests = {
        "greedy": ask("greedy", system + prompt(11, 12), 24),
        "drawn": ask("drawn", prompt(12, 3), 30, temperature=1.0, seed=5, top_p=0.9),
        "long": ask("long", prompt(13, 61), 8, temperature=0.7, seed=6, top_k=20),
        "shared": ask("shared", system + prompt(14, 7), 20),
        "penalized": ask("penalized", prompt(15, 9), 20, repetition_penalty=1.5, presence_penalty=0.5),
        "leaves": ask("leaves", prompt(16, 30), 40),
        "late": ask("late", system + prompt(11, 12), 30, temperature=1.5, seed=7, min_p=0.01),
        "last": ask("last", prompt(17, 33), 16),
    }
    arrivals = {
        0: ["greedy", "drawn"],
        1: ["long"],
        2: ["shared", "penalized"],
        4: ["leaves"],
        5: ["late"],
        9: ["last"],
    }
    story = drive(
        core, {step: [requests[name] for name in names] for step, names in arrivals.items()}, leaving={12: "leaves"}
    )

    plans = plans_of(core)
    assert any({1} < set(plan.values()) for plan in plans), "prefills and decodes share steps"
    assert sum(plan.get("long", 0) > 1 for plan in plans) >= 3, "a prefill is cut into chunks"
    assert story.num_cached_tokens("shared") == 16
    assert story.num_cached_tokens("late") == 24
    assert (story.num_preemptions > 0) == (windows == (None,)), "what has a window needs less"
    assert max(len(plan) for plan in plans) >= 5
    left = requests.pop("leaves")
    assert left.sampling.max_tokens is not None
    assert len(story.tokens("leaves")) < left.sampling.max_tokens
    assert_agrees(oracle, story, *requests.values())

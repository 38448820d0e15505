"""The embedded model with its batch on the device and a step planned ahead, token for token as transformers says it."""

import dataclasses

import pytest

from engine.core.core import EngineCore
from engine.frontend.llm import LLM
from engine.messages import SamplingParams
from gpu.device.runner import DeviceRunner
from gpu.executor import UniProcExecutor
from gpu.models.torch_model import TorchModel
from gpu.runner.host_runner import ModelRunner
from gpu.runner.rows import BatchSizes
from tests.golden.driving import RecordedExecutor, plans_of
from tests.golden.prompts import PROMPTS

NUM_TOKENS = 16
NUM_BLOCKS, MAX_NUM_SEQS, MAX_MODEL_LEN = 12, 5, 192


class DeviceExecutor:
    """An `engine.executor.Executor` with a cache of its own around the model of another one."""

    num_blocks = NUM_BLOCKS

    def __init__(self, llm: LLM) -> None:
        loaded = llm.core.executor
        assert isinstance(loaded, UniProcExecutor)
        assert loaded._worker is not None
        runner = loaded._worker.runner
        assert isinstance(runner, ModelRunner)
        served = runner._model
        assert isinstance(served, TorchModel)
        self.block_size, self.vocab_size = loaded.block_size, loaded.vocab_size
        self.runner = DeviceRunner(
            served.model,
            served.model.allocate_kv_cache(NUM_BLOCKS, served.dtype, served.device),
            BatchSizes(MAX_NUM_SEQS, MAX_MODEL_LEN, self.block_size),
            served.device,
            vocab_size=self.vocab_size,
        )
        self.submit = self.runner.submit

    def shutdown(self) -> None: ...


@pytest.mark.slow
def test_in_small_chunks_with_few_slots_and_few_blocks(smollm2, smollm2_oracle):
    prompts = [smollm2.tokenizer.encode(text).ids for text in PROMPTS[:6]]
    config = dataclasses.replace(
        smollm2.core.config,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=24,
        pipeline_depth=2,
    )
    executor = DeviceExecutor(smollm2)
    recorded = RecordedExecutor(executor)
    llm = LLM(EngineCore(config, recorded), smollm2.tokenizer, seed=0)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    results = llm.generate(prompts, sampling)
    for prompt, result, theirs in zip(prompts, results, smollm2_oracle.generate(prompts, NUM_TOKENS), strict=True):
        smollm2_oracle.assert_says(prompt, result.choices[0].token_ids, theirs)
    plans = plans_of(llm.core)
    assert any({1} < set(plan.values()) for plan in plans), "prefills share steps with decodes"
    introduced = [new.request_id for plan in recorded.plans for new in plan.new_requests]
    assert len(introduced) > len(set(introduced)) == len(prompts), "somebody was preempted and came back"
    assert len(executor.runner.rows) == 0

"""How much of the model is lost by the forms in which weights are kept and computed with: next to nothing.

The measure is perplexity on one fixed text, against the same model dequantized to float32 and run by torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.config.settings import Settings
from app.serving.loading import core_factory, open_files
from engine.core.core import EngineCore
from engine.frontend.llm import LLM
from engine.messages import EngineCoreRequest, SamplingParams
from tests.golden.driving import drive, fresh_core
from tests.gpu.native_builds import needs_library
from tests.selection import slow_except
from tests.support.embedded_model import embedded_gguf

TOLERANCE = 0.001  # of the perplexity of float32
MAX_MODEL_LEN = 512  # of the fixture `smollm2`

PROSE = """\
A river does not work for the mill by being fast. It works by falling. The miller who wants power looks for a place \
where the bed drops, and then he borrows some of the drop: upstream he cuts a channel into the bank, and leads the \
water along the slope, almost level, while the river beside it tumbles down to the valley floor. Where the channel \
ends, the water stands two or three metres above the river it came from, and there he builds his wheel. The channel \
is the headrace. What leaves the wheel at the bottom flows back through the tailrace, and nobody downstream can tell \
that anything was taken.

A good headrace is dull to look at. It has no rapids, because every splash is work that the wheel will not do. It is \
wide enough that the water moves slowly, and slow enough that sand settles before the gate. In dry summers the \
miller closes the gate at night, lets the pond fill up, and grinds in the morning; in spring he opens the spillway, \
so that the flood goes past the wheel and not over it. Most of his day is spent on waiting for the right amount.

There are two kinds of wheels. If the water comes in from above, it fills the buckets of the wheel, and its weight \
pulls them down; such a wheel turns slowly and makes good use of little water. If the water runs below the wheel, it \
pushes against the blades; such a wheel needs a strong stream and loses most of what the stream could give. About \
the year 1750 an engineer named John Smeaton built a small model of each, measured how much water went in and how \
high a weight was lifted, and found that the first kind did twice the work of the second. He also found that a wheel \
does its best when it turns more slowly than the water runs. Before that, people had argued about the question for \
two hundred years without measuring anything.
"""
CODE = '''\
# Mills

The same can be written down as a program. The pond is a queue, the gate is a limit, and the wheel turns at the \
speed that it turns, whatever the river brings:

```python
from collections import deque
from dataclasses import dataclass, field


@dataclass
class Mill:
    """Grinds sacks of grain in the order in which they came, as long as there is water."""

    capacity: int
    water: float = 0.0
    waiting: deque[str] = field(default_factory=deque)

    def bring(self, sack: str) -> bool:
        """Take a sack. Returns False if there is no room for it."""
        if len(self.waiting) >= self.capacity:
            return False
        self.waiting.append(sack)
        return True

    def grind(self, inflow: float, needed: float = 1.0) -> list[str]:
        """Let the pond fill by `inflow` and grind what it is enough for."""
        self.water += inflow
        done = []
        while self.waiting and self.water >= needed:
            self.water -= needed
            done.append(self.waiting.popleft())
        return done


mill = Mill(capacity=3)
for name in ("rye", "oats", "wheat", "barley"):
    if not mill.bring(name):
        print(f"no room for {name}")
for hour in range(4):
    print(hour, mill.grind(inflow=0.75))
```

With three sacks in the yard, the fourth is sent away. In the first hour there is not enough water for anything. In \
the second hour the first sack is ground, and half a measure is left in the pond.

| hour | water before | ground | water after |
| ---: | ---: | --- | ---: |
| 0 | 0.75 | nothing | 0.75 |
| 1 | 1.50 | rye | 0.50 |
| 2 | 1.25 | oats | 0.25 |
| 3 | 1.00 | wheat | 0.00 |
'''


def make_core(dtype: str, model: Path | None = None, **more: Any) -> EngineCore:
    settings = Settings(
        model=str(model or embedded_gguf()),
        dtype=dtype,
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=2,
        num_threads=2,
        target_inter_token_latency=60.0,  # so that no plan depends on the clock
        **more,
    )
    return core_factory(settings, open_files(settings, None))()


def perplexity(core: EngineCore, texts: list[list[int]], rows: int) -> float:
    """Of all tokens but the first of each text, computed `rows` at a time."""
    requests = [
        EngineCoreRequest(
            request_id=str(index),
            prompt_token_ids=tokens,
            sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=0, prompt_logprobs=0),
            arrival_time=0.0,
        )
        for index, tokens in enumerate(texts)
    ]
    story = drive(fresh_core(core, max_num_batched_tokens=rows), requests)
    outputs = [output for request in requests for output in story.outputs[request.request_id]]
    logprobs = [entry.logprob for output in outputs for entry in output.prompt_logprobs or ()]
    assert len(logprobs) == sum(len(tokens) - 1 for tokens in texts)
    return math.exp(-math.fsum(logprobs) / len(logprobs))


@pytest.fixture(scope="module")
def texts(smollm2: LLM) -> list[list[int]]:
    texts = [smollm2.tokenizer.encode(text).ids for text in (PROSE, CODE)]
    assert all(400 < len(tokens) < MAX_MODEL_LEN for tokens in texts)
    return texts


@pytest.fixture(scope="module")
def reference(smollm2: LLM, texts: list[list[int]]) -> float:
    """In float32. That this path agrees with transformers is what the other tests of this directory say."""
    value = perplexity(smollm2.core, texts, MAX_MODEL_LEN)
    assert 3 < value < 30, "the texts are such as the model can read"
    return value


# What can be asked for as `dtype` besides float32; "auto" is what this processor computes fastest with.
@pytest.fixture(scope="module", params=slow_except(["auto", "bfloat16"], "auto"))
def core(request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    core = make_core(request.param)
    yield core
    core.shutdown()


# Who computes may depend on the number of rows, so the texts are computed at once and in small steps.
@pytest.mark.slow
@pytest.mark.parametrize("rows", slow_except([MAX_MODEL_LEN, 16], MAX_MODEL_LEN))
def test_every_form_of_the_weights_keeps_the_perplexity(
    core: EngineCore, texts: list[list[int]], reference: float, rows: int
) -> None:
    assert perplexity(core, texts, rows) == pytest.approx(reference, rel=TOLERANCE)


@needs_library
@pytest.mark.slow
def test_keys_and_values_of_8_bits_keep_the_perplexity_in_steps_of_any_size(
    texts: list[list[int]], reference: float
) -> None:
    core = make_core("auto", kv_cache_dtype="int8")
    found = [perplexity(core, texts, rows) for rows in (MAX_MODEL_LEN, 16)]
    core.shutdown()
    assert found == pytest.approx([reference] * 2, rel=2 * TOLERANCE)

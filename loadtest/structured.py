"""Measure structured output: the time of a mask, and the speed of streams with a grammar and without.

    python -m loadtest.structured [--streams 8] [--tokens 64] [--rounds 5] [--model NAME]

Loads a model into this process and generates for the same prompts with a JSON Schema and without, in turns. Both give
the same number of tokens, sampled at temperature 1: the schema is of a list that does not end before them.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from numpy.typing import NDArray

from app.config.settings import Settings
from app.library import LLM
from engine.messages import SamplingParams, StructuredOutput
from engine.structured.matchers import GrammarMatcher
from protocol.syntax.grammars import json_schema

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "price": {"type": "number", "minimum": 0},
        "status": {"enum": ["active", "closed", "unknown"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}, "maxItems": 3},
        "since": {"type": "string", "format": "date-time"},
    },
    "required": ["name", "price", "status", "tags", "since"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": ITEM, "minItems": 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default=Settings.model_fields["model"].default)
    options = parser.parse_args()
    llm = LLM(options.model, progress=False, max_model_len=2048)
    masks = _timed_masks()

    structured, plain = json_schema(LIST), None
    _tokens_per_second(llm, options, structured)  # compiles the grammar and warms everything up
    masks.clear()
    speeds: dict[str, list[float]] = {"plain": [], "structured": []}
    for _ in range(options.rounds):
        speeds["plain"].append(_tokens_per_second(llm, options, plain))
        speeds["structured"].append(_tokens_per_second(llm, options, structured))
    pairs = [one / other for one, other in zip(speeds["structured"], speeds["plain"], strict=True)]

    first, *_, p99 = np.percentile(np.array(masks) * 1e6, [50, 90, 99])
    print(f"a mask of {llm.core.executor.vocab_size} tokens: median {first:.0f} µs, p99 {p99:.0f} µs, of {len(masks)}")
    for name, values in speeds.items():
        print(f"{options.streams} {name} streams: {statistics.median(values):.1f} tok/s")
    print(f"structured / plain: {statistics.median(pairs):.3f} ({min(pairs):.3f} to {max(pairs):.3f})")
    llm.core.shutdown()


def _tokens_per_second(llm: LLM, options: argparse.Namespace, structured: StructuredOutput | None) -> float:
    prompts = [f"<|im_start|>user\nList things, {number} of them.<|im_end|>\n" for number in range(options.streams)]
    sampling = SamplingParams(max_tokens=options.tokens, ignore_eos=True, seed=1, structured_output=structured)
    started = time.perf_counter()
    results = llm.generate(prompts, sampling)
    took = time.perf_counter() - started
    count = sum(len(choice.token_ids) for result in results for choice in result.choices)
    assert count == options.streams * options.tokens, "the streams are to be of the same length"
    return count / took


def _timed_masks() -> list[float]:
    """Record the seconds of each mask from now on."""
    seconds: list[float] = []
    fill = GrammarMatcher.fill

    def timed(matcher: GrammarMatcher, mask: NDArray[np.uint32]) -> None:
        started = time.thread_time()
        fill(matcher, mask)
        seconds.append(time.thread_time() - started)

    GrammarMatcher.fill = timed  # type: ignore[assignment,method-assign]  # a stopwatch around it
    return seconds


if __name__ == "__main__":
    main()

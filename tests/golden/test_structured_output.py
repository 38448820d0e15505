"""Grammars on the embedded model: the answers fit, and nobody beside them notices."""

import json
import re
from typing import Any

import jsonschema
import pytest

from engine.frontend.llm import LLM
from engine.messages import FinishReason, SamplingParams, StructuredOutput, StructuredOutputKind
from protocol.syntax.grammars import Tag, choice, json_schema, tagged_json
from tests.golden.driving import fresh_llm

PROMPT = "<|im_start|>user\nDescribe Alice, who is 30 and likes chess.<|im_end|>\n<|im_start|>assistant\n"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["chess", "tea"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


def params(structured: StructuredOutput | None, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 64, "structured_output": structured} | fields)


@pytest.mark.slow
def test_a_mixed_batch_fits_its_grammars_and_leaves_the_others_alone(smollm2: LLM) -> None:
    """With prefills in chunks: rows that sample and rows that do not share steps, in another order than planned."""
    plain = params(None, max_tokens=24, ignore_eos=True)
    alone = fresh_llm(smollm2).generate([PROMPT], plain)[0].choices[0].token_ids
    phone = StructuredOutput(kind=StructuredOutputKind.REGEX, value=r"\d{3}-\d{4}")
    call = tagged_json([Tag("<call>", {"const": {"f": 1}}, "</call>")], text=False, required=True, repeat=False)
    asked = [
        params(json_schema(PERSON)),
        plain,
        params(json_schema(PERSON), temperature=1.0, seed=5, n=2),
        params(phone, temperature=1.5, seed=1, logprobs=3),
        params(choice(["yes", "no"])),
        params(call, temperature=1.0, seed=2, presence_penalty=1.0),
    ]
    llm = fresh_llm(smollm2, max_num_seqs=8, max_num_batched_tokens=13)
    results = llm.generate([PROMPT] * len(asked), asked)
    exact, plainly, drawn, number, answer, called = (result.choices for result in results)
    for choices in (exact, drawn):
        for one in choices:
            jsonschema.validate(json.loads(one.text), PERSON)
    assert plainly[0].token_ids == alone
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", number[0].text)
    assert number[0].logprobs is not None
    assert len(number[0].logprobs) == len(number[0].token_ids)
    assert answer[0].text in ("yes", "no")
    assert re.fullmatch(r'<call>\{\s*"f"\s*:\s*1\s*\}</call>', called[0].text)
    ends = {one.finish_reason for result in results for one in result.choices}
    assert ends == {FinishReason.STOP, FinishReason.LENGTH}
    assert plainly[0].finish_reason is FinishReason.LENGTH

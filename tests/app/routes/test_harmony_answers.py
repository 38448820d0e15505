"""Answers of a model with gpt-oss's template and tokens, through a real server in each dialect.

The model is random, so its answers are forced: by a budget of reasoning, and by the grammar of what is demanded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from tokenizers import Tokenizer

from protocol.syntax.harmony import HARMONY
from tests.protocol.test_harmony import TEMPLATE
from tests.support.harness import TIMEOUT, Server
from tests.support.tiny_model import NAME, tiny_server, write_tiny_model

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Bonn"]}},
    "required": ["city"],
    "additionalProperties": False,
}
USER: list[Any] = [{"role": "user", "content": "Weather?"}]


@pytest.fixture(scope="module")
def harmony_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_tiny_model(tmp_path_factory.mktemp("harmony") / NAME, vocab_size=512)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(list(HARMONY.tags))
    config = write_tiny_model(model / "larger", vocab_size=512 + len(HARMONY.tags))
    (config / "config.json").rename(model / "config.json")
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with tiny_server(model=model) as running:
        yield running.wait_ready()


def is_weather(arguments: str) -> bool:
    return json.loads(arguments) in ({"city": "Ulm"}, {"city": "Bonn"})


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0, 5])
def test_chat(harmony_server: Server, budget: int) -> None:
    client = openai.OpenAI(base_url=f"{harmony_server.base_url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT)
    extra = {"thinking_token_budget": budget}
    common: dict[str, Any] = {"model": NAME, "messages": USER, "seed": 1, "max_tokens": 200, "extra_body": extra}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    whole = client.chat.completions.create(**common, tools=[tool], tool_choice="required")
    [choice] = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert is_weather(call.function.arguments)
    assert whole.usage
    assert whole.usage.completion_tokens_details
    counted = whole.usage.completion_tokens_details.reasoning_tokens or 0
    assert counted <= budget + 4  # the closing token, and the bytes of a character
    with client.chat.completions.stream(**common, tools=[tool], tool_choice="required") as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    assert (getattr(streamed.message, "reasoning", "") or None) == choice.message.model_dump()["reasoning"]
    schema: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    answered = client.chat.completions.create(**common, response_format=schema).choices[0]
    assert is_weather(answered.message.content or "")


def test_responses(harmony_server: Server) -> None:
    client = openai.OpenAI(base_url=f"{harmony_server.base_url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT)
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    response = client.responses.create(
        model=NAME,
        input="Weather?",
        tools=[tool],
        tool_choice="required",
        max_output_tokens=80,
        reasoning={"effort": "low"},
        extra_body={"thinking_token_budget": 5},
    )
    assert response.status == "completed"
    assert {item.type for item in response.output} <= {"reasoning", "function_call"}
    call = response.output[-1]
    assert call.type == "function_call"
    assert is_weather(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    later = client.responses.create(
        model=NAME, previous_response_id=response.id, input=[result], tools=[tool], max_output_tokens=4
    )
    assert later.usage
    assert response.usage
    assert later.usage.input_tokens > response.usage.input_tokens


def test_messages(harmony_server: Server) -> None:
    client = anthropic.Anthropic(base_url=harmony_server.base_url, api_key="none", max_retries=0, timeout=TIMEOUT)
    tool: Any = {"name": "weather", "input_schema": SCHEMA}
    fields: dict[str, Any] = {"model": NAME, "messages": USER, "max_tokens": 80, "tools": [tool]}
    fields |= {"tool_choice": {"type": "any"}, "extra_body": {"thinking_token_budget": 5, "seed": 1}}
    message = client.messages.create(**fields)
    assert message.stop_reason == "tool_use"
    assert message.content[-1].type == "tool_use"
    assert message.content[-1].input in ({"city": "Ulm"}, {"city": "Bonn"})
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    assert [block.type for block in streamed.content] == [block.type for block in message.content]


def test_an_effort_that_the_model_lacks_is_warned_of(harmony_server: Server) -> None:
    client = openai.OpenAI(base_url=f"{harmony_server.base_url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT)
    raw = client.chat.completions.with_raw_response
    for effort, warning in (("none", "reasoning_effort"), ("low", None)):
        answer = raw.create(model=NAME, messages=USER, max_tokens=1, extra_body={"reasoning_effort": effort})
        found = answer.headers.get("x-headrace-warning")
        assert found is None if warning is None else warning in (found or "")

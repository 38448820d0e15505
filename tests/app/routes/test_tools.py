"""Tool calls of the embedded model, as the SDK and the frameworks on top of it make and read them.

The model is small and its template knows no tools: calls that are demanded are enforced by grammar, and what it does
when it is free to choose is told in words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import instructor
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from tests.support.harness import MODEL, TIMEOUT, Server

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "description": "Tells the time"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
FIELDS: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 48, "tools": [WEATHER]}


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client:
        yield client


def is_weather_call(call: Any) -> bool:
    arguments = json.loads(call.function.arguments)
    return (
        call.type == "function"
        and call.function.name == "get_weather"
        and arguments.keys() == {"city", "unit"}
        and arguments["city"] in ("Paris", "Rome")
        and arguments["unit"] in ("C", "F")
    )


@pytest.mark.parametrize(("choice", "finish"), [(NAMED, "stop"), ("required", "tool_calls")])
def test_a_demanded_call_is_made_and_streams_the_same(sdk: openai.OpenAI, choice: Any, finish: str) -> None:
    fields = FIELDS | {"tool_choice": choice, "parallel_tool_calls": False}
    whole = sdk.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == finish
    assert whole.message.content is None
    [call] = whole.message.tool_calls or []
    assert is_weather_call(call)
    with sdk.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0]
    assert kinds >= {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"}
    [same] = streamed.message.tool_calls or []
    assert same.function.arguments == call.function.arguments
    assert same.id.startswith("call_")
    assert streamed.finish_reason == finish


def test_a_stop_string_does_not_cut_a_demanded_call_off(sdk: openai.OpenAI) -> None:
    fields = {**FIELDS, "tool_choice": "required", "parallel_tool_calls": False}
    choice = sdk.chat.completions.create(**fields, stop=["e", "a", "{"]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert all(map(is_weather_call, choice.message.tool_calls or ()))


def test_required_may_call_any_of_the_functions_and_several(server: Server) -> None:
    fields = {"tools": [WEATHER, TIME], "tool_choice": "required", "temperature": 1.0, "seed": 1, "n": 2}
    answer = server.chat("Weather and time in Paris and Rome?", max_tokens=40, **fields)
    for choice in answer["choices"]:
        calls = choice["message"]["tool_calls"]
        assert {call["function"]["name"] for call in calls} <= {"get_weather", "get_time"}
        assert len({call["id"] for call in calls}) == len(calls)
        if choice["finish_reason"] == "tool_calls":
            assert all(json.loads(call["function"]["arguments"]) is not None for call in calls)


def test_a_call_that_is_cut_off_is_there_as_far_as_it_came(server: Server) -> None:
    whole = server.chat("Weather?", tools=[WEATHER], tool_choice=NAMED, max_tokens=64)
    num_tokens = whole["usage"]["completion_tokens"]
    cut = server.chat("Weather?", tools=[WEATHER], tool_choice=NAMED, max_tokens=num_tokens - 8)
    [choice] = cut["choices"]
    assert choice["finish_reason"] == "length"
    [call], [complete] = choice["message"]["tool_calls"], whole["choices"][0]["message"]["tool_calls"]
    assert complete["function"]["arguments"].startswith(call["function"]["arguments"])
    assert call["function"]["name"] == "get_weather"


def test_where_it_is_free_the_model_may_answer_in_words(sdk: openai.OpenAI) -> None:
    fields = FIELDS | {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16}
    answers = [sdk.chat.completions.create(**fields | extra) for extra in ({}, {"tool_choice": "none"})]
    for answer in answers:
        message = answer.choices[0].message
        assert message.content or message.tool_calls
    assert answers[0].usage
    assert answers[1].usage
    assert answers[0].usage.prompt_tokens > answers[1].usage.prompt_tokens  # told of the tools, or not


def test_a_call_that_the_model_makes_by_itself_is_told_from_its_words(sdk: openai.OpenAI) -> None:
    # The model is too small to do so reliably: a pattern makes it write what a larger one would.
    call = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "(Paris|Rome)", "unit": "C"\}\}\n</tool_call>'
    fields = FIELDS | {"extra_body": {"structured_outputs": {"regex": rf"I look\.\n\n{call}"}}}
    [whole] = sdk.chat.completions.create(**fields).choices
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "I look."
    [called] = whole.message.tool_calls or []
    assert is_weather_call(called)
    with sdk.chat.completions.stream(**fields) as stream:
        [streamed] = stream.get_final_completion().choices
    assert (streamed.finish_reason, streamed.message.content) == ("tool_calls", "I look.")
    [same] = streamed.message.tool_calls or []
    assert same.function.arguments == called.function.arguments


def test_a_call_and_its_result_go_back_to_the_model(sdk: openai.OpenAI) -> None:
    called = sdk.chat.completions.create(**FIELDS, tool_choice="required", parallel_tool_calls=False).choices[0].message
    [call] = called.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "sky": "clear"}'}
    answer = sdk.chat.completions.create(**(FIELDS | {"messages": [*QUESTION, called, result], "max_tokens": 8}))
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


def test_strict_arguments_parse_into_the_sdks_models(sdk: openai.OpenAI) -> None:
    class GetWeather(BaseModel):
        """Tells the weather of a city"""

        city: Literal["Paris", "Rome"]
        days: Literal[1, 2, 3]

    tool = openai.pydantic_function_tool(GetWeather)
    choice = {"type": "function", "function": {"name": "GetWeather"}}
    parsed = sdk.chat.completions.parse(**(FIELDS | {"tools": [tool], "tool_choice": choice}))
    [call] = parsed.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_a_schema_that_no_grammar_can_hold_is_refused(server: Server) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "(a+)+b"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": QUESTION, "tools": [tool], "tool_choice": "required"}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"


@pytest.mark.slow
def test_langchain_binds_tools_and_reads_calls(server: Server) -> None:
    class get_weather(BaseModel):  # noqa: N801 - its name is the function's
        """Tells the weather of a city"""

        city: Literal["Paris", "Rome"] = Field(description="Where")

    model = ChatOpenAI(model=MODEL, base_url=f"{server.base_url}/v1", api_key="none", temperature=0, max_tokens=64)
    bound = model.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)
    message = bound.invoke("What is the weather in Paris?")
    [call] = message.tool_calls
    assert call["name"] == "get_weather"
    assert call["args"]["city"] in ("Paris", "Rome")
    first, *others = bound.stream("What is the weather in Paris?")
    streamed: Any = sum(others, first)  # chunks of a message add up to one
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [(call["name"], call["args"])]
    structured = model.with_structured_output(get_weather, method="function_calling").invoke("Weather in Rome?")
    assert isinstance(structured, get_weather)


def test_instructor_gets_its_model(sdk: openai.OpenAI) -> None:
    class Person(BaseModel):
        name: Literal["Ada", "Alan"]
        is_adult: bool

    client = instructor.from_openai(sdk, mode=instructor.Mode.TOOLS)
    person = client.chat.completions.create(
        model=MODEL,
        response_model=Person,
        messages=[{"role": "user", "content": "Ada is 36 years old."}],
        temperature=0,
        max_tokens=64,
        max_retries=1,
    )
    assert isinstance(person, Person)

"""Requests of the dialects: what they mean in chat's words, and that nothing a client can write is more than a 400."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from protocol.anthropic.messages import MessagesChat, MessagesRequest
from protocol.body import parse_body
from protocol.chat_template import ChatTemplate, segments_text
from protocol.errors import ApiError
from protocol.openai.chat import ChatCompletionRequest
from protocol.responses.request import ResponsesChat, ResponsesRequest
from protocol.syntax.model_syntax import ModelSyntax

USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}


def messages_chat(**fields: Any) -> MessagesChat:
    body = {"max_tokens": 2048, "messages": [USER], **fields}
    return parse_body(MessagesRequest, orjson.dumps(body)).translate()


def chat_of(**fields: Any) -> ChatCompletionRequest:
    return parse_body(ChatCompletionRequest, orjson.dumps({"messages": [USER], **fields}))


def responses_chat(**fields: Any) -> ResponsesChat:
    body = parse_body(ResponsesRequest, orjson.dumps({"input": "Hi", **fields}))
    return body.translate()


def test_messages_say_it_in_chats_words():
    chat = messages_chat(
        temperature=0.5,
        top_k=7,
        stop_sequences=["a", "b"],
        seed=3,
        logit_bias={"5": 1.5},
        output_config={"effort": "low"},
    )
    params = chat.to_sampling_params(1000)
    assert (params.temperature, params.top_k, params.stop, params.max_tokens) == (0.5, 7, ("a", "b"), 2048)
    assert (params.seed, params.logit_bias) == (3, {5: 1.5})
    assert chat.reasoning_effort == "low"


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [(None, False), ({"type": "disabled"}, False), ({"type": "adaptive"}, True)],
)
def test_thinking_is_on_if_it_was_asked_for(thinking, thinks):
    assert messages_chat(thinking=thinking).template_variables()["enable_thinking"] is thinks


# What a template that reads one name only is given to render.
THINKING = [
    (messages_chat, {"thinking": {"type": "adaptive"}}, ("True", "True", "medium", "high")),
    (
        messages_chat,
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
        ("True", "True", "low", "low"),
    ),
    (messages_chat, {"thinking": {"type": "disabled"}}, ("False", "False", "none", "none")),
    (messages_chat, {}, ("False", "False", "", "none")),
    (messages_chat, {"chat_template_kwargs": {"enable_thinking": True}}, ("True", "True", "medium", "high")),
    (responses_chat, {"reasoning": {"effort": "high"}}, ("True", "True", "high", "high")),
    (responses_chat, {"chat_template_kwargs": {"thinking": True}}, ("True", "True", "medium", "high")),
    (responses_chat, {"reasoning": {"effort": "none"}}, ("False", "False", "none", "none")),
    (responses_chat, {}, ("", "", "", "")),
    (chat_of, {"reasoning_effort": "low"}, ("True", "True", "low", "low")),
    (chat_of, {"reasoning_effort": "none"}, ("False", "False", "none", "none")),
    (
        chat_of,
        {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}},
        ("False", "True", "none", "none"),
    ),
    (chat_of, {"chat_template_kwargs": {"enable_thinking": False}}, ("False", "False", "", "none")),
    (chat_of, {"chat_template_kwargs": {"reasoning_effort": "high"}}, ("True", "True", "high", "high")),
]


@pytest.mark.parametrize(("chat", "fields", "rendered"), THINKING)
def test_what_switches_thinking_reaches_the_template_under_the_name_that_it_reads(chat, fields, rendered):
    variables = chat(**fields).template_variables()
    sources = [f"{{{{ {name} }}}}" for name in ("enable_thinking", "thinking", "reasoning_effort")]
    sources.append("{% if reasoning_effort != 'none' or true %}{{ reasoning_effort }}{% endif %}")
    for source, expected in zip(sources, rendered, strict=True):
        template = ChatTemplate(source, {})
        syntax = ModelSyntax(template, {})
        assert segments_text(template.render([USER], variables=syntax.thinking_variables(variables))) == expected


def test_names_that_a_template_only_sets_or_finds_in_messages_are_none_that_it_reads():
    source = "{% set thinking = 1 %}{{ messages[0].reasoning_effort }}{% for tools in messages %}{% endfor %}"
    template = ChatTemplate(source, {})
    assert template.variables == {"messages"}
    assert not template.knows_tools


def test_claude_codes_accounting_line_stays_out_of_the_prompt():
    blocks = ["x-anthropic-billing-header: cc_version=1; cch=2;", "You are Claude Code."]
    chat = messages_chat(system=[{"type": "text", "text": text} for text in blocks])
    assert chat.messages_for_template()[0] == {"role": "system", "content": "You are Claude Code."}


@pytest.mark.parametrize(
    "system",
    [
        # Claude Code's, and what gateways make of it that join the blocks.
        [
            "x-anthropic-billing-header: cc_version=2.1.330.aad; cc_entrypoint=cli; cch=00000;",
            "You are Claude Code.",
            "Be brief.",
        ],
        [
            "x-anthropic-billing-header: cc_version=2.1.330.aad; cc_entrypoint=sdk-py;\nYou are Claude Code.",
            "Be brief.",
        ],
        "x-anthropic-billing-header: cc_version=2.1.331.4be; cc_entrypoint=cli;\nYou are Claude Code.\nBe brief.",
    ],
)
def test_the_accounting_line_is_left_out_and_nothing_else(system):
    blocks = system if isinstance(system, str) else [{"type": "text", "text": text} for text in system]
    chat = messages_chat(system=blocks)
    assert chat.messages_for_template()[0] == {"role": "system", "content": "You are Claude Code.\nBe brief."}


def test_responses_say_it_in_chats_words():
    chat = responses_chat(
        instructions="Be brief.",
        max_output_tokens=9,
        top_p=0.5,
        top_logprobs=2,
        reasoning={"effort": "none"},
        stop="END",
    )
    params = chat.to_sampling_params(1000)
    assert (params.max_tokens, params.top_p, params.logprobs, params.stop) == (9, 0.5, 2, ("END",))
    assert chat.messages_for_template()[0] == {"role": "system", "content": "Be brief."}
    assert chat.template_variables()["enable_thinking"] is False


# --- whatever a client writes

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
MESSAGES: dict[str, Any] = {
    "max_tokens": 2048,
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "it"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a wall"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ],
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low"},
    "stop_sequences": ["END"],
    "metadata": {"user_id": "u"},
}
RESPONSES: dict[str, Any] = {
    "input": [
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a wall"},
        {"role": "user", "content": [{"type": "input_text", "text": "And?"}]},
    ],
    "instructions": "Be brief.",
    "tools": [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}, {"type": "web_search"}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "max_output_tokens": 5,
}


@st.composite
def damaged(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """A good body with up to three values, anywhere in it, replaced by anything or left out."""
    body = orjson.loads(orjson.dumps(body))
    for _ in range(draw(st.integers(0, 3))):
        place: Any = body
        while isinstance(place, dict | list) and place:
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or draw(st.booleans()):
                if draw(st.booleans()):
                    place[key] = draw(json_values)
                else:
                    del place[key]
                break
            place = inner
    return body


def is_refused_or_taken(make, body: dict[str, Any]) -> None:
    try:
        content = orjson.dumps(body)
    except orjson.JSONEncodeError:  # an integer beyond 64 bits, which some JSON libraries write
        content = str(body).encode()
    with suppress(InvalidRequest, ApiError):
        make(content).to_sampling_params(1000)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(body=damaged(MESSAGES))
def test_no_messages_request_is_more_than_a_400(body):
    is_refused_or_taken(lambda content: parse_body(MessagesRequest, content).translate(), body)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(body=damaged(RESPONSES))
def test_no_responses_request_is_more_than_a_400(body):
    def make(content: bytes) -> ResponsesChat:
        request = parse_body(ResponsesRequest, content)
        assert orjson.dumps({**request.echo(), "context": [item.listed() for item in request.items()]})
        return request.translate()

    is_refused_or_taken(make, body)


@pytest.mark.parametrize("kind", ["function", "custom", "namespace"])
def test_a_chosen_or_allowed_tool_without_a_name_is_refused_by_name(kind: str) -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": kind}]}
    for choice in (allowed, {"type": kind})[: 1 if kind == "namespace" else 2]:
        with pytest.raises(ApiError, match=r"name is required: the tool to call") as caught:
            parse_body(
                ResponsesRequest,
                orjson.dumps({"input": "a", "tools": [{"type": "function", "name": "f"}], "tool_choice": choice}),
            )
        assert (caught.value.param or "").endswith("name")

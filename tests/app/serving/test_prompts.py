"""Conversations to tokens, as every dialect writes them: nothing that a client has said is missing in the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from app.config.settings import Settings
from app.serving.loading import open_files
from app.serving.prompts import open_prompts
from gpu.checkpoint import ModelFiles
from protocol.anthropic.messages import MessagesRequest
from protocol.body import parse_body
from protocol.chat_template import ChatTemplateError, TemplateProcesses
from protocol.openai.chat import ChatCompletionRequest
from protocol.responses.request import ResponsesRequest
from tests.support.tiny_model import write_tiny_model

OF_PARTS = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}|"
    "{% endif %}{% endfor %}\n{% endfor %}"
)
TOOL = {"name": "look", "parameters": {"type": "object"}}
ARGUMENTS = {"at": "walls"}
TALKS: list[tuple[type[Any], dict[str, Any]]] = [
    (
        ChatCompletionRequest,
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "that?"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": ARGUMENTS}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "A door."}]},
                {"role": "assistant", "content": "It seems"},
            ],
            "tools": [{"type": "function", "function": TOOL}],
            "continue_final_message": True,
        },
    ),
    (
        MessagesRequest,
        {
            "max_tokens": 1,
            "system": "Be brief.",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "that?"}]},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": ARGUMENTS}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "A door."}]},
                {"role": "assistant", "content": "It seems"},
            ],
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        },
    ),
    (
        ResponsesRequest,
        {
            "instructions": "Be brief.",
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_text", "text": "What is"}, {"type": "input_text", "text": "that?"}],
                },
                {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "walls"}'},
                {"type": "function_call_output", "call_id": "c1", "output": "A door."},
                {"role": "assistant", "content": "It seems"},
            ],
            "tools": [{"type": "function", **TOOL}],
        },
    ),
]


def tiny_files(directory: Path, template: str) -> tuple[Settings, ModelFiles]:
    model = write_tiny_model(directory / "tiny")
    (model / "chat_template.jinja").write_text(template)
    settings = Settings(model=str(model), load_format="dummy")
    return settings, open_files(settings, None)


@pytest.mark.slow
@pytest.mark.parametrize(("request_model", "body"), TALKS, ids=["chat", "messages", "responses"])
async def test_a_template_that_loops_over_parts_loses_no_word(
    tmp_path: Path, request_model: type[Any], body: dict[str, Any]
) -> None:
    settings, files = tiny_files(tmp_path, OF_PARTS)
    prompts = open_prompts(settings, files)
    try:
        chat = parse_body(request_model, orjson.dumps(body)).translate()
        text = prompts.decode(await prompts.encode_chat(chat, 8192))
    finally:
        prompts.close()
    for said in ("Be brief.", "You can call functions", '"walls"', "A door.", "It seems", "What is|that?|"):
        assert said in text
    assert text.endswith("It seems") or not chat.continue_final_message


def test_a_template_that_shows_nothing_of_what_users_say_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[TemplateProcesses] = []

    class Noted(TemplateProcesses):
        def __init__(self, source: str, timeout: float) -> None:
            super().__init__(source, timeout)
            started.append(self)

    monkeypatch.setattr("app.serving.prompts.TemplateProcesses", Noted)
    with pytest.raises(ChatTemplateError, match="chat template of tiny does not show"):
        open_prompts(*tiny_files(tmp_path, "{% for m in messages %}{{ m.role }}{% endfor %}"))
    [processes] = started
    assert processes._pool.is_closed  # none is left behind

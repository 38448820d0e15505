"""`chat_template`: a file in place of the model's own template, and files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.selection import slow_except
from tests.support.harness import Server
from tests.support.serve_command import ServeCommand
from tests.support.tiny_model import tiny_server

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ 'assistant:' if add_generation_prompt }}"
)
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "return_token_ids": True}


def prompt_of(server: Server) -> str:
    token_ids = server.post("/v1/chat/completions", CHAT).json()["prompt_token_ids"]
    return server.post("/detokenize", {"tokens": token_ids}).json()["prompt"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", slow_except(["thread", "process"], "thread"))
def test_conversations_are_written_as_the_file_says(tmp_path: Path, engine: str) -> None:
    file = tmp_path / "plain.jinja"
    file.write_text(TEMPLATE, encoding="utf-8-sig")  # some editors put a mark at the beginning
    with tiny_server(chat_template=file, engine=engine, enable_tokenizer_info_endpoint=True) as server:
        server.wait_ready()
        assert prompt_of(server) == "user: Hi\nassistant:"
        assert server.client.get("/tokenizer_info").json()["chat_template"] == TEMPLATE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read {}: No such file"),
        (b"\xff\xfe", "cannot read {}: 'utf-8' codec can't decode"),
        (b"a\n{% if %}", "got '{}'. The chat template does not parse"),
        (b"Hello", "got '{}'. The chat template of tiny does not show the text"),
    ],
)
def test_a_file_that_is_no_template_ends_the_start_by_name(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_bytes(content)
    with ServeCommand(chat_template=file) as server:
        assert server.wait_exit() == 1
        assert f"error: chat_template: {words.format(file)}" in server.log.splitlines()[-1]

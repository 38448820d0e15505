"""`headrace chat` as a person has it, in a terminal, and as a script has it, in a pipe."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.bench.scripted_server import SSE_HEAD, scripted
from tests.support.harness import MODEL, REPOSITORY, TIMEOUT, Server
from tests.support.terminal import Terminal
from tests.support.tiny_model import write_tiny_model

PROMPT = r"\n> $"


def talk(server: Server, tmp_path: Path, *arguments: str) -> Terminal:
    return Terminal("chat", "--url", server.base_url, *arguments, environment={"HEADRACE_CACHE_DIR": str(tmp_path)})


def test_a_conversation_in_a_terminal(server: Server, tmp_path: Path) -> None:
    with talk(server, tmp_path, "--temperature", "0") as terminal:
        assert "/help lists" in terminal.wait_for(PROMPT)
        before = server.metrics()
        for line, answer in (("/help", "/set NAME VALUE"), ("/hlep", "Did you mean /help?")):
            terminal.type(f"{line}\r")
            assert answer in terminal.wait_for(PROMPT)
        assert server.metrics().prompt_tokens == before.prompt_tokens  # the model was told nothing of it
        terminal.type("/set\r")
        assert "frequency_penalty 0.3\n" in terminal.wait_for(PROMPT)  # as the server's card of this model wants it
        terminal.type("/set max_tokens 3\r")
        terminal.wait_for(PROMPT)
        terminal.type("What is the capital of France?\r")
        assert "cut off" in (answer := terminal.wait_for(PROMPT))
        assert "The capital of" in answer
        assert "tok/s" not in answer  # of three tokens
        terminal.type("/set max_tokens 24\r")
        terminal.wait_for(PROMPT)
        terminal.type("/set ignore_eos true\r")
        terminal.wait_for(PROMPT)
        terminal.type("What is the capital of France?\r")
        assert "24 tokens, " in (answer := terminal.wait_for(PROMPT))
        assert "tok/s; first token after" in answer
        assert "prompt tokens cached" in answer
        path = tmp_path / "talk.json"
        terminal.type(f"/save {path}\r")
        assert "messages are in" in terminal.wait_for(PROMPT)
        terminal.type("/undo\r")
        terminal.wait_for(r"> .*capital of France\?$")  # to be edited
        terminal.type(" Say it.\r")
        assert "tok/s" in terminal.wait_for(PROMPT)
        terminal.type("/retry\r")
        assert "tok/s" in terminal.wait_for(PROMPT)
        terminal.type("exit\r")
        assert terminal.wait_exit() == 0
    saved = json.loads(path.read_text())
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"] * 2
    # A question looks unlike its answer.
    assert re.search(r"\x1b\[[0-9;]*1m[^\x1b]*What is the capital", terminal.shown)
    with talk(server, tmp_path) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type(f"/load {path}\r")
        assert "4 messages were read" in terminal.wait_for(PROMPT)
        terminal.type(f"/load {tmp_path}/ta\t\r")  # the name of the file is completed
        assert "4 messages were read" in terminal.wait_for(PROMPT)
        terminal.type("\x1b[A\x1b[A\x1b[A")  # what was typed in the session before
        terminal.wait_for("/retry")
        terminal.type("\x15/sh\t\r")  # completed
        assert "\n> What is the capital of France?" in terminal.wait_for(PROMPT)
        terminal.type("\x04")
        assert terminal.wait_exit() == 0
    assert (tmp_path / "chat_history").stat().st_mode & 0o777 == 0o600


def test_ctrl_c_stops_an_answer_and_twice_leaves(server: Server, tmp_path: Path) -> None:
    aborted = server.wait_idle().aborted
    with talk(server, tmp_path) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("/set ignore_eos true\r")
        terminal.wait_for(PROMPT)
        terminal.type("Tell me a long story.\r")
        terminal.wait_for(r"story\.\n\S")
        terminal.type("\x03")
        assert "stopped by you" in terminal.wait_for(PROMPT)
        server.wait_until(lambda now: now.aborted == aborted + 1)
        terminal.type("\x03")
        assert "Ctrl-C again" in terminal.wait_for(PROMPT)
        terminal.type("\x03")
        assert terminal.wait_exit() == 0
    assert "Traceback" not in terminal.shown


def ask(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app.commands.cli", "chat", *arguments],
        input=typed,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"TERM": "xterm-256color"},
        timeout=TIMEOUT,
        check=False,
    )


def test_a_question_or_a_pipe_is_answered_once(server: Server) -> None:
    question = "Write a Python function\nthat adds two numbers."
    common = ("--url", server.base_url, "--temperature", "0", "--set", "max_tokens=12")
    expected = server.chat(question, max_tokens=12)["choices"][0]["message"]["content"] + "\n"
    assert "```python" in expected
    for done in (ask(*common, question), ask(*common, typed=f"{question}\n"), ask(*common, MODEL, question)):
        assert (done.stdout, done.stderr, done.returncode) == (expected, "", 0)
    both = server.chat("Add these:\n\n1 and 2", max_tokens=12)["choices"][0]["message"]["content"]
    assert ask(*common, "Add these: ", typed="1 and 2\n").stdout == f"{both}\n"
    word = server.chat("Hello", max_tokens=12)["choices"][0]["message"]["content"]
    assert ask(*common, "Hello").stdout == f"{word}\n", "a word that is no model is a question"
    unknown = ask(*common, "smol", question)
    assert (unknown.stdout, unknown.returncode) == ("", 1)
    assert f"has no model 'smol'. Give one of its models: {MODEL}. A question of one word ends with" in unknown.stderr
    refused = ask(*common, "--set", "max_tokens=many", question)
    assert (refused.stdout, refused.returncode) == ("", 1)
    assert "max_tokens: got 'many'" in refused.stderr
    empty = ask(*common, typed=" \n")
    assert (empty.stdout, empty.returncode) == ("", 1)
    assert "standard input is empty" in empty.stderr


@pytest.mark.slow
def test_a_question_needs_no_server(tmp_path: Path) -> None:
    settings = ("--load-format", "dummy", "--kv-cache-memory", "4MiB", "--set", "max_tokens=3")
    done = ask(str(write_tiny_model(tmp_path / "tiny")), "What is it?", *settings)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout


def test_half_an_answer_fails() -> None:
    async def script(_body: dict[str, Any]) -> AsyncIterator[bytes]:
        event = b'data: {"choices": [{"delta": {"content": "The sea"}}]}\n\n'
        yield SSE_HEAD + b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)

    with scripted(script, pages={"/v1/models": {"data": [{"id": "scripted"}]}}) as server:
        done = ask("--url", server.url, "What is it?")
    assert (done.stdout, done.returncode) == ("The sea\n", 1)
    assert "the text shown is incomplete" in done.stderr


def test_a_word_is_a_model_where_the_server_has_it() -> None:
    async def script(_body: dict[str, Any]) -> AsyncIterator[bytes]:
        event = b'data: {"choices": [{"delta": {"content": "sea"}}]}\n\ndata: [DONE]\n\n'
        yield SSE_HEAD + b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)

    with scripted(script, pages={"/v1/models": {"data": [{"id": "first"}, {"id": "second"}]}}) as server:
        assert ask("--url", server.url, "second", typed="What is it?").returncode == 0
        assert ask("--url", server.url, "second").returncode == 0  # there is nothing else to ask
        (asked, alone) = ((body["model"], body["messages"][-1]["content"]) for body in server.bodies)
    assert (asked, alone) == (("second", "What is it?"), ("first", "second"))


def test_a_pasted_paragraph_is_one_question_and_typing_stands_in_no_answer(tmp_path: Path) -> None:
    typed = threading.Event()

    async def script(body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield SSE_HEAD
        for words in ("first part ", "second part"):
            event = json.dumps({"choices": [{"delta": {"content": words}}]})
            data = f"data: {event}\n\n".encode()
            yield b"%x\r\n%b\r\n" % (len(data), data)
            await asyncio.to_thread(typed.wait)
        yield b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"

    pages = {"/v1/models": {"data": [{"id": "scripted"}]}}
    environment = {"HEADRACE_CACHE_DIR": str(tmp_path)}
    with (
        scripted(script, pages=pages) as server,
        Terminal("chat", "--url", server.url, environment=environment) as terminal,
    ):
        terminal.wait_for(PROMPT)
        terminal.type("\x1b[200~one line\nand another\x1b[201~\r")
        terminal.wait_for("first part")
        terminal.type("meanwhile ")
        terminal.type("\x1b[200~a paste\nof two lines\x1b[201~")
        time.sleep(0.2)  # an echo would be written by the terminal itself, in no time
        typed.set()
        answer = terminal.wait_for("second part")
        assert "meanwhile" not in answer
        assert "paste" not in answer
        terminal.wait_for(r"> meanwhile a paste\n *of two lines$")
        terminal.type("\r")
        assert "second part" in terminal.wait_for(PROMPT)
        for line in ('"""', "in a", "", 'block"""'):
            terminal.type(f"{line}\r")
        assert "second part" in terminal.wait_for(PROMPT)
        terminal.type("by keys\x1b\rtwice\r")
        terminal.wait_for("second part")
        asked = [body["messages"][-1]["content"] for body in server.bodies]
        assert asked == ["one line\nand another", "meanwhile a paste\nof two lines", "in a\n\nblock", "by keys\ntwice"]

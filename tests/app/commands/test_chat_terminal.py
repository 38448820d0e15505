"""`headrace chat` as a person has it, in a terminal, and as a script has it, in a pipe."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.app.bench.scripted_server import SSE_HEAD, scripted
from tests.support.harness import REPOSITORY, TIMEOUT, Server
from tests.support.terminal import ESCAPES, Terminal

PROMPT = r"\n> $"


def test_a_conversation_in_a_terminal(server: Server, tmp_path: Path) -> None:
    with Terminal("chat", "--url", server.base_url, "--temperature", "0") as terminal:
        assert "/help lists" in terminal.wait_for(PROMPT)
        before = server.metrics()
        for line, answer in (("/help", "/set NAME VALUE"), ("/hlep", "Did you mean /help?")):
            terminal.type(f"{line}\n")
            assert answer in terminal.wait_for(PROMPT)
        assert server.metrics().prompt_tokens == before.prompt_tokens  # the model was told nothing of it
        terminal.type("/set\n")
        assert "frequency_penalty 0.3\n" in terminal.wait_for(PROMPT)  # as the server's card of this model wants it
        terminal.type("/set max_tokens 3\n")
        terminal.wait_for(PROMPT)
        terminal.type("What is the capital of France?\n")
        assert "3 tokens," in (answer := terminal.wait_for(PROMPT))
        assert "The capital of" in answer
        assert "tok/s; first token after" in answer
        assert "cut off" in answer
        terminal.type("/set max_tokens\n")
        terminal.wait_for(PROMPT)
        terminal.type("What is the capital of France?\n")
        assert "prompt tokens cached" in terminal.wait_for(PROMPT)
        path = tmp_path / "talk.json"
        terminal.type(f"/save {path}\n")
        terminal.wait_for("messages are in")
        terminal.type("/exit\n")
        assert terminal.wait_exit() == 0
    saved = json.loads(path.read_text())
    assert saved["temperature"] == 0.0
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"] * 2
    # What was saved can be sent again.
    assert server.post("/v1/chat/completions", saved | {"max_tokens": 1}).status_code == 200


def test_ctrl_c_stops_an_answer_and_not_the_conversation(server: Server) -> None:
    aborted = server.wait_idle().aborted
    with Terminal("chat", "--url", server.base_url) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("/set ignore_eos true\n")
        terminal.wait_for(PROMPT)
        terminal.type("Tell me a long story.\n")
        terminal.wait_for(r"story\.\n\S")
        terminal.type("\x03")
        assert "stopped by you" in terminal.wait_for(PROMPT)
        server.wait_until(lambda now: now.aborted == aborted + 1)
        terminal.type("\x04")
        assert terminal.wait_exit() == 0
    assert "Traceback" not in terminal.shown


def test_in_a_pipe_an_answer_is_as_the_model_wrote_it(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "app.commands.cli", "chat", "--url", server.base_url, "--temperature", "0"],
        input="/set max_tokens 12\nWrite a Python function that adds two numbers.\n",
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"TERM": "xterm-256color"},
        timeout=TIMEOUT,
        check=True,
    )
    content = server.chat("Write a Python function that adds two numbers.", max_tokens=12)["choices"][0]["message"]
    assert content["content"] in done.stdout
    assert "```python" in done.stdout
    assert "tok/s" not in done.stdout
    assert not ESCAPES.search(done.stdout)
    assert done.stderr == ""


def test_a_pasted_paragraph_is_one_question_and_typing_stands_in_no_answer() -> None:
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
    with scripted(script, pages=pages) as server, Terminal("chat", "--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.type("\x1b[200~one line\nand another\x1b[201~\r")
        terminal.wait_for("first part")
        terminal.type("meanwhile")
        time.sleep(0.2)  # an echo would be written by the terminal itself, in no time
        typed.set()
        answer = terminal.wait_for("second part")
        assert "meanwhile" not in answer
        terminal.wait_for("> meanwhile")
        terminal.type("\r")
        terminal.wait_for("second part")
        asked = [[message["content"] for message in body["messages"]] for body in server.bodies]
        said = "first part second part"
        assert asked == [["one line\nand another"], ["one line\nand another", said, "meanwhile"]]

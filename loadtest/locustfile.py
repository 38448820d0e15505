"""Chat users: each opens a streamed chat completion, reads it to its end (or leaves in the middle), and asks again.

`locust -f loadtest/locustfile.py` from the repository's root; README.md in this folder says how. Streams become metrics
of locust, one line of its table for each length of prompt:

    SSE     the whole request; failures are counted here, once each
    TTFT    time to the first piece of text
    ITL     every gap between two pieces of text
    tok/s   the speed of a stream after its first token. locust calls all values milliseconds: these are tokens a second
    LEFT    requests that the user ended on purpose, up to that moment

Importing locust makes the sockets gevent's, so it stays the first import.
"""

from __future__ import annotations

from locust import User, constant, events, task  # isort: skip

import argparse
import itertools
import random
import time
from typing import Any

import gevent
from locust.exception import StopUser

from app.client import ServerClient, ServerError
from app.workload.datasets import WORDS

PAUSE = 0.5  # seconds that a user waits after a failure

_random = random.Random()  # not seeded: a second run must not find the prompts of the first in the cache
_numbers = itertools.count(1)  # of requests; users are greenlets of one thread, so counting needs no lock


def prompt_mix(text: str) -> dict[int, float]:
    """`"32:6,256:3"` -> {32: 6.0, 256: 3.0}: prompts of 32 words twice as often as prompts of 256."""
    try:
        mix = {int(words): float(weight) for words, _, weight in (part.partition(":") for part in text.split(","))}
    except ValueError:
        mix = {}
    if not mix or min(mix) < 1 or min(mix.values()) < 0 or not sum(mix.values()):
        raise argparse.ArgumentTypeError(f"got {text!r}; write words:weight,words:weight, for example 32:6,256:3,700:1")
    return mix


@events.init_command_line_parser.add_listener
def _add_options(parser: Any) -> None:
    parser.add_argument("--model", env_var="LOADTEST_MODEL", default="", help="default: the first that is served")
    parser.add_argument("--api-key", env_var="LOADTEST_API_KEY", default="", is_secret=True, help="default: none")
    parser.add_argument(
        "--prompt-mix",
        env_var="LOADTEST_PROMPT_MIX",
        type=prompt_mix,
        default="32:6,128:3,400:1",
        metavar="WORDS:WEIGHT,...",
        help="lengths of prompts in words, and how often each (default 32:6,128:3,400:1)",
    )
    parser.add_argument(
        "--max-tokens",
        env_var="LOADTEST_MAX_TOKENS",
        type=int,
        default=64,
        help="length of answers, which do not end before it (default 64)",
    )
    parser.add_argument(
        "--leave-share",
        env_var="LOADTEST_LEAVE_SHARE",
        type=float,
        default=0.0,
        metavar="0..1",
        help="share of requests whose user hangs up somewhere in the middle (default 0)",
    )
    parser.add_argument(
        "--max-requests",
        env_var="LOADTEST_MAX_REQUESTS",
        type=int,
        default=0,
        help="end the run after so many requests (default 0: by time alone)",
    )
    parser.add_argument(
        "--silence",
        env_var="LOADTEST_SILENCE",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long a stream may be silent before it counts as failed (default 60)",
    )


class ChatUser(User):
    """Asks, reads the answer as it comes, and asks again at once."""

    wait_time = constant(0)
    num_ended = 0  # requests of all users

    def on_start(self) -> None:
        options = self.environment.parsed_options
        self.client = ServerClient(self.host or "", options.api_key or None, timeout=options.silence)
        self.model: str = options.model

    @task
    def chat(self) -> None:
        """One request, from the connection to the last byte."""
        options = self.environment.parsed_options
        if options.max_requests and next(_numbers) > options.max_requests:
            raise StopUser
        mix = options.prompt_mix
        (num_words,) = _random.choices(list(mix), list(mix.values()))
        # Every prompt begins otherwise, so that no prefix cache does the server's work.
        prompt = f"{_random.getrandbits(32):08x} " + " ".join(_random.choices(WORDS, k=num_words))
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": options.max_tokens,
            "ignore_eos": True,
            "temperature": 1.0,  # whatever the model's authors recommend
            "top_p": 1.0,
        }
        leaves = _random.random() < options.leave_share
        leave_after = _random.randint(1, max(1, options.max_tokens // 2)) if leaves else None
        started = time.perf_counter()
        try:
            self._ask(f"chat, {num_words} words", body, leave_after)
        except ServerError as error:
            self._fire("SSE", f"chat, {num_words} words", time.perf_counter() - started, exception=error)
            time.sleep(PAUSE)
        ChatUser.num_ended += 1
        if ChatUser.num_ended == options.max_requests:
            gevent.spawn(self.environment.runner.quit)  # it ends all users, and would end with the one that calls it

    def _ask(self, name: str, body: dict[str, Any], leave_after: int | None) -> None:
        """Raises ServerError for a refusal, and for a stream that does not end well."""
        started = time.perf_counter()
        self.model = self.model or self.client.models()[0]["id"]
        arrivals: list[float] = []
        finish_reason, num_tokens = None, 0
        for chunk in self.client.stream(body | {"model": self.model}):
            with self.client.understood():
                for choice in chunk["choices"]:
                    if choice["delta"].get("content"):
                        arrivals.append(time.perf_counter())
                    finish_reason = choice["finish_reason"] or finish_reason
                if usage := chunk.get("usage"):
                    num_tokens = usage["completion_tokens"]
            if leave_after is not None and len(arrivals) >= leave_after:
                self._fire("LEFT", name, time.perf_counter() - started)
                return
        if finish_reason is None:
            raise ServerError("the stream ended without a finish reason")
        self._fire("SSE", name, time.perf_counter() - started)
        if arrivals:
            self._fire("TTFT", name, arrivals[0] - started)
        for earlier, later in itertools.pairwise(arrivals):
            self._fire("ITL", name, later - earlier)
        if num_tokens > 1 and arrivals[-1] > arrivals[0]:
            self._fire("tok/s", name, (num_tokens - 1) / (arrivals[-1] - arrivals[0]) / 1e3)

    def _fire(self, kind: str, name: str, seconds: float, exception: Exception | None = None) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=1e3 * seconds,
            response_length=0,
            exception=exception,
            context={},
        )

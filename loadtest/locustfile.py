"""Users who chat: each opens a streamed chat completion, reads it to its end (or leaves in the middle), and asks again.

`locust -f loadtest/locustfile.py` from the repository's root; README.md beside this file says how. What a stream's
user feels becomes metrics of locust, one line of its table for each length of prompt:

    SSE     the whole request; failures are counted here, once each
    TTFT    time to the first piece of text
    ITL     every gap between two pieces of text
    tok/s   the speed of a stream after its first token. locust calls all values milliseconds: these are tokens a second
    LEFT    requests whose user hung up on purpose, up to that moment

Importing locust makes the sockets gevent's, so it stays the first import.
"""

from __future__ import annotations

from locust import User, constant, events, task  # isort: skip

import argparse
import http.client
import random
import time
from typing import Any

import gevent
from locust.env import Environment
from locust.exception import StopUser

from loadtest.figures import HEADER, Figures
from loadtest.stream import Refused, StreamBroken, Target, Timeline, first_model, stream_chat

TIMEOUT = 10.0  # seconds that a refused user waits at most before asking again, whatever Retry-After says
WORDS = ("river", "mill", "wheel", "water", "stone", "grain", "flour", "channel", "gate", "flow", "turn", "sluice")

_random = random.Random()  # not seeded: a second run must not find the prompts of the first in the cache
_figures = Figures()


def prompt_mix(text: str) -> dict[int, float]:
    """`"32:6,256:3"` -> {32: 6.0, 256: 3.0}: prompts of 32 words twice as often as prompts of 256."""
    try:
        mix = {int(words): float(weight) for words, _, weight in (part.partition(":") for part in text.split(","))}
    except ValueError:
        mix = {}
    if not mix or min(mix) < 1 or min(mix.values()) < 0 or not sum(mix.values()):
        raise argparse.ArgumentTypeError(f"got {text!r}; write words:weight,words:weight, for example 32:6,256:3,700:1")
    return mix


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"got {text!r}; write a number from 0 to 1, for example 0.2")
    return value


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
        type=share,
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

    def on_start(self) -> None:
        options = self.environment.parsed_options
        self.mix: dict[int, float] = options.prompt_mix
        self.target = Target(host=self.host or "", api_key=options.api_key, timeout=options.silence)
        self.model: str = options.model
        _figures.max_users = max(_figures.max_users, self.environment.runner.user_count)

    @task
    def chat(self) -> None:
        """One request, from the connection to the last byte."""
        options = self.environment.parsed_options
        if options.max_requests and not _take_turn(options.max_requests):
            raise StopUser
        (num_words,) = _random.choices(list(self.mix), list(self.mix.values()))
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
        self._ask(f"chat, {num_words} words", body, leave_after)
        if options.max_requests and _figures.num_ended == options.max_requests:
            gevent.spawn(self.environment.runner.quit)  # it ends all users, and would end with the one that calls it

    def _ask(self, name: str, body: dict[str, Any], leave_after: int | None) -> None:
        started = time.perf_counter()
        try:
            self.model = self.model or first_model(self.target)
            timeline = stream_chat(self.target, body | {"model": self.model}, leave_after=leave_after)
        except (Refused, StreamBroken, OSError, http.client.HTTPException, ValueError, LookupError) as error:
            _figures.failures[_cause(error)] += 1
            self._fire("SSE", name, (time.perf_counter() - started) * 1e3, exception=error)
            time.sleep(min(TIMEOUT, getattr(error, "retry_after", None) or 0.1))
        else:
            _figures.add(timeline)
            self._report(name, timeline)

    def _report(self, name: str, timeline: Timeline) -> None:
        if timeline.left:
            self._fire("LEFT", name, timeline.e2e * 1e3, timeline.num_bytes)
            return
        self._fire("SSE", name, timeline.e2e * 1e3, timeline.num_bytes)
        if timeline.ttft is not None:
            self._fire("TTFT", name, timeline.ttft * 1e3)
        for gap in timeline.gaps:
            self._fire("ITL", name, gap * 1e3)
        if (speed := timeline.tokens_per_second) is not None:
            self._fire("tok/s", name, speed)

    def _fire(self, kind: str, name: str, value: float, num_bytes: int = 0, exception: Exception | None = None) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=value,
            response_length=num_bytes,
            exception=exception,
            context={},
        )


_turns = 0


def _take_turn(limit: int) -> bool:
    """Whether one more request may start. Users are greenlets of one thread, so counting needs no lock."""
    global _turns
    _turns += 1
    return _turns <= limit


def _cause(error: Exception) -> str:
    return str(error) if isinstance(error, Refused | StreamBroken) else type(error).__name__


@events.quitting.add_listener
def _print_figures(environment: Environment, **_: Any) -> None:
    print(f"\n{HEADER}\n{_figures.row()}")
    for cause, count in _figures.failures.most_common():
        print(f"failed {count} times: {cause}")

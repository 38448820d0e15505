"""An abort beside a shared prefix changes nobody else's text, and neither does a stop string.

The recipe is sglang#23392's: requests that share a prefix of more than 128 tokens start together, some are cancelled
after 10 to 20 ms, in the middle of their chunked prefill, and sent again at once; and vllm#5543's: a request that has
ended on a stop string leaves its blocks to the next. Every text must be the one that the prompt gets cold and alone.
Cold is another tenant: nobody reuses blocks across tenants, and usage says so. Float32 and greedy. The everyday rounds
run on random weights, whose texts hang on every word before them as much as real ones do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest

from tests.support.harness import Server
from tests.support.raw_client import RawClient, sse_events
from tests.support.tiny_model import tiny_server, write_tiny_model
from tests.support.victims import PATH

PREFIX = """
In the valley there stood a mill, and beside the mill there ran a channel that the miller's grandfather had dug when he
was young. Every morning the miller opened the gate, and the water came down the channel and turned the wheel, and the
wheel turned the stone. In summer, when the river was low, he had to choose: either the wheel or the gardens of the
village could have the water, and the people came to him and asked for it, one after the other, and each had a reason
that was better than the last. One day a stranger knocked at the door and said:
"""  # 120 tokens, and a dozen more before it
QUESTIONS = (
    "I have come to buy the mill, and I will pay for it with",
    "Do you know who opened the gate last night? It was",
    "There is no water in the river any more, because",
    "My horse is thirsty, and the nearest well is",
    "The king has sent me to ask you for",
)
MAX_TOKENS = 24
HOT_KEY = "hot"
COLD_KEYS = [f"cold-{number}" for number in range(len(QUESTIONS))]
_KEYS = ",".join([HOT_KEY, *COLD_KEYS])
SEED = 20260801


@pytest.fixture
def tiny_chunking_server(tmp_path: Path) -> Iterator[Server]:
    """Two layers, and an output layer of its own: with tied weights a random model repeats its last word."""
    changes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = write_tiny_model(tmp_path / "model", **changes, tie_word_embeddings=False)
    yield from _serve(tiny_server(model=model, max_num_seqs=8, max_num_batched_tokens=8, api_keys=_KEYS))


@pytest.fixture
def chunking_server() -> Iterator[Server]:
    yield from _serve(Server(max_num_seqs=8, max_num_batched_tokens=48, api_keys=_KEYS))


def _serve(server: Server) -> Iterator[Server]:
    with server:
        server.client.headers.update(_authorization(HOT_KEY))
        yield server.wait_ready()
        assert "Traceback" not in server.log, server.log


@dataclass(frozen=True)
class Order:
    """What one client of a round does."""

    prompt: str
    expected: str  # the whole text, cold and alone
    stop: str | None  # which it then ends before
    stream: bool
    cancel_after: tuple[float, ...]  # seconds until it leaves, once per attempt; then it stays
    reset: bool

    @property
    def expected_text(self) -> str:
        return self.expected if self.stop is None else self.expected[: self.expected.index(self.stop)]


@pytest.mark.slow
def test_abort_and_stop_string_beside_a_shared_prefix_change_no_text(tiny_chunking_server: Server) -> None:
    check_rounds(tiny_chunking_server, rounds=5)


@pytest.mark.storm
def test_aborts_beside_a_shared_prefix_for_a_long_time(tiny_chunking_server: Server) -> None:
    check_rounds(tiny_chunking_server, rounds=500)


@pytest.mark.storm
def test_aborts_beside_a_shared_prefix_of_the_real_model(chunking_server: Server) -> None:
    check_rounds(chunking_server, rounds=20)


def check_rounds(server: Server, rounds: int) -> None:
    before = server.wait_idle()
    generator = random.Random(SEED)
    first_texts = set()
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        for number in range(rounds):
            prefix = f"Story number {number}, of the {generator.choice(QUESTIONS).split()[-3]} {number}.\n{PREFIX}"
            orders = [
                _order(prefix + question, _cold_text(server, key, prefix + question), generator)
                for key, question in zip(COLD_KEYS, QUESTIONS, strict=True)
            ]
            first_texts.add(orders[0].expected)
            texts = list(pool.map(lambda order: _carry_out(server, order), orders))
            # What the round has left in the cache must be as good as what it has sent.
            texts += [server.complete(order.prompt, **_length())["choices"][0]["text"] for order in orders[:2]]
            expected = [order.expected_text for order in orders] + [order.expected for order in orders[:2]]
            assert texts == expected, f"round {number} of seed {SEED}"
    after = server.wait_idle()
    assert len(first_texts) > 1, "the text hangs on the story, so it would tell a wrong one"
    assert after.aborted > before.aborted, "some of the cancellations came in time"
    assert after.finished["stop"] > before.finished["stop"]
    assert after.samples["vllm:prefix_cache_hits_total"] > before.samples["vllm:prefix_cache_hits_total"]


def _length() -> dict[str, object]:
    return {"max_tokens": MAX_TOKENS, "ignore_eos": True}


def _authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _cold_text(server: Server, key: str, prompt: str) -> str:
    answer = server.post(PATH, {"prompt": prompt, "temperature": 0, **_length()}, **_authorization(key)).json()
    assert answer["usage"]["prompt_tokens"] > 128
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    return answer["choices"][0]["text"]


def _order(prompt: str, expected: str, generator: random.Random) -> Order:
    middle = len(expected) // 2
    return Order(
        prompt=prompt,
        expected=expected,
        stop=expected[middle : middle + 3] if generator.random() < 0.4 else None,
        stream=generator.random() < 0.5,
        cancel_after=tuple(generator.uniform(0.01, 0.02) for _ in range(generator.randrange(3))),
        reset=generator.random() < 0.5,
    )


def _carry_out(server: Server, order: Order) -> str:
    """The text that the client gets in the end."""
    body = {"prompt": order.prompt, "temperature": 0, "stream": order.stream, "stop": order.stop, **_length()}
    for seconds in order.cancel_after:
        client = server.connect()
        client.post(PATH, body, _authorization(HOT_KEY))
        time.sleep(seconds)
        (RawClient.leave_with_rst if order.reset else RawClient.leave_with_fin)(client)
    with server.connect() as client:
        client.post(PATH, body, _authorization(HOT_KEY))
        assert client.read_head().status_code == 200
        if not order.stream:
            return orjson.loads(client.read_body())["choices"][0]["text"]
        *chunks, done = sse_events(client.chunks())
        assert done == "[DONE]"
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

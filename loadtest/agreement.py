"""Compare a server's greedy tokens and distributions with those of float32, question by question.

    python -m loadtest.agreement                                        Headrace's default and its bfloat16
    python -m loadtest.agreement --vllm VENV --llama EXECUTABLE          the peers too
    python -m loadtest.agreement --settings dtype=bfloat16 --settings num_threads=1 --questions FILE --json FILE

Perplexity averages over thousands of tokens and hides what a user sees: whether the answer to a plain question is the
one that the model would give if nothing were rounded. So every server is asked the questions of `questions.txt`, one
at a time, at temperature 0, and its answer is compared token by token with that of the same weights in float32, which
torch computes. Printed are

- how many of 100 answers have the same first 16 and the same first 64 tokens (one that ends earlier has to end there
  too), and after how many tokens the median answer parts;
- the mean Kullback-Leibler divergence, float32's next-token distribution from the server's, over all places up to the
  first token that differs: there both have read the same text. Of each distribution the 20 likeliest tokens are known;
  those that both know are compared one by one and all others as one, which gives a lower bound of the divergence.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from loadtest.peers import LLAMA, VLLM, make_server
from loadtest.servers import Server, Target, headrace

QUESTIONS = Path(__file__).with_name("questions.txt")
LENGTHS = (16, 64)  # tokens of which all have to be the same
NUM_LIKELY = 20  # log-probabilities per token: as many as all servers return
SECONDS = 120.0  # for one answer
REFERENCE = "float32"


@dataclass(frozen=True)
class Place:
    """One generated token, and the log-probabilities of what might have stood there, by the tokens' bytes."""

    token: bytes
    likely: dict[bytes, float]


Answer = list[Place]


def ask(target: Target, question: str) -> Answer:
    """A greedy answer of at most as many tokens as are compared."""
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max(LENGTHS),
        "logprobs": True,
        "top_logprobs": NUM_LIKELY,
    }
    request = urllib.request.Request(
        f"{target.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        choice = json.load(answer)["choices"][0]
    return [
        Place(_bytes(entry), {_bytes(each): each["logprob"] for each in entry["top_logprobs"]})
        for entry in choice["logprobs"]["content"]
    ]


def _bytes(entry: dict[str, Any]) -> bytes:
    spelled = entry.get("bytes")
    return bytes(spelled) if spelled is not None else str(entry["token"]).encode()


def num_alike(ours: Answer, theirs: Answer) -> int:
    """Return the length of the common beginning in tokens."""
    pairs = zip(ours, theirs, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0].token == pair[1].token, pairs))


def is_same(ours: Answer, theirs: Answer, length: int) -> bool:
    """Return True if the first `length` tokens are the same; the end of the answer counts as one."""
    return [place.token for place in ours[:length]] == [place.token for place in theirs[:length]]


def divergence(truth: dict[bytes, float], other: dict[bytes, float]) -> float:
    """Kullback-Leibler divergence of `truth` from `other`, in nats, as far as both are known."""
    common = truth.keys() & other.keys()
    pairs = [(math.exp(truth[token]), math.exp(other[token])) for token in common]
    rest = tuple(max(1e-9, 1 - math.fsum(column)) for column in zip(*pairs, strict=True)) if pairs else (1.0, 1.0)
    return math.fsum(p * math.log(p / q) for p, q in [*pairs, rest] if p > 0)


@dataclass(frozen=True)
class Agreement:
    """The agreement of a server's answers with the reference."""

    same: dict[int, float]  # of 100, by how many tokens
    parts_after: float  # tokens, the median
    divergence: float  # nats, the mean

    @classmethod
    def of(cls, truth: Sequence[Answer], answers: Sequence[Answer]) -> Agreement:
        pairs = list(zip(truth, answers, strict=True))
        divergences = [
            divergence(a.likely, b.likely)
            for ours, theirs in pairs
            for a, b in list(zip(ours, theirs, strict=False))[: num_alike(ours, theirs) + 1]
        ]
        return cls(
            same={length: 100 * statistics.mean(is_same(*pair, length) for pair in pairs) for length in LENGTHS},
            parts_after=statistics.median(num_alike(*pair) for pair in pairs),
            divergence=statistics.mean(divergences),
        )


def table(agreements: dict[str, Agreement]) -> str:
    """A line for each server."""
    lines = [
        "| server | "
        + " | ".join(f"same first {length}, of 100" for length in LENGTHS)
        + " | parts after | KL, nats |",
        "| --- |" + " ---: |" * (len(LENGTHS) + 2),
    ]
    for name, seen in agreements.items():
        same = " | ".join(f"{seen.same[length]:.1f}" for length in LENGTHS)
        lines.append(f"| {name} | {same} | {seen.parts_after:.0f} tokens | {seen.divergence:.5f} |")
    return "\n".join(lines)


def answers_of(server: Server, questions: Sequence[str]) -> list[Answer]:
    """Start a server, ask it everything, end it."""
    with server as target:
        return [ask(target, question) for question in questions]


def _setting(given: str) -> tuple[str, dict[str, str]]:
    pairs = [pair.partition("=") for pair in given.split(",")]
    return f"headrace {given}", {name: value for name, _, value in pairs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="the environment that vLLM is installed in")
    parser.add_argument("--llama", type=Path, metavar="EXECUTABLE", help="llama.cpp's llama-server")
    parser.add_argument("--settings", action="append", metavar="NAME=VALUE,...", help="Headrace again, with these")
    parser.add_argument("--questions", type=Path, default=QUESTIONS, metavar="FILE", help="one a line")
    parser.add_argument("--first", type=int, metavar="N", help="only the first so many of them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every answer of every server there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the server on the way out, as Ctrl-C does
    questions = options.questions.read_text().splitlines()[: options.first]
    variants = dict(_setting(given) for given in options.settings or ["dtype=bfloat16"])
    with tempfile.TemporaryDirectory() as scratch:
        servers = {"headrace": headrace("headrace")}
        servers |= {name: headrace(name, **settings) for name, settings in variants.items()}
        for name, given in ((VLLM, options.vllm), (LLAMA, options.llama)):
            if given is not None:
                places = {"vllm": options.vllm, "llama": options.llama}
                servers[name] = make_server(name, **places, max_streams=1, scratch=Path(scratch))
        truth = answers_of(headrace(REFERENCE, dtype="float32"), questions)
        given_answers = {name: answers_of(server, questions) for name, server in servers.items()}
    print(table({name: Agreement.of(truth, answers) for name, answers in given_answers.items()}))
    if options.json:
        content = {
            name: [b"".join(place.token for place in answer).decode(errors="replace") for answer in answers]
            for name, answers in {REFERENCE: truth, **given_answers}.items()
        }
        options.json.write_text(json.dumps({"questions": questions, "answers": content}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The phases of a request, and the names in traces that several modules use.

`gen_ai.*`, `http.*`, `url.*`, `network.*` and `error.type` are names of OpenTelemetry's semantic conventions 1.41.0,
the last version that defines `gen_ai.*`. That part has moved to a repository of its own, where names still change, so
the names here are pinned to 1.41.0. A name that the conventions lack begins with `headrace.`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.41.0"
PROVIDER: Final = "headrace"
BLOCKED_ON_CLIENT: Final = "blocked_on_client"
TOKENS: Final = "headrace.tokens"  # of an event
CHOICE: Final = "headrace.choice"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"


class Phase(StrEnum):
    """What a request does. Those of its choices in the engine, from `QUEUE` to `DECODE`, rise to its answer."""

    RECEIVE = "receive"  # its body
    PARSE = "parse"
    TOKENIZE = "tokenize"  # chat template and tokens
    CHECK = "check"  # against the model
    COMPILE_GRAMMAR = "compile_grammar"
    ENDED = "ended"
    QUEUE = "queue"
    PREEMPTED = "preempted"  # waits again
    WAIT_FOR_GRAMMAR = "wait_for_grammar"
    LOAD_KV = "load_kv"  # from a tier
    PREFILL = "prefill"
    DECODE = "decode"
    DELIVER = "deliver"  # until the client has everything

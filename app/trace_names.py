"""Every name that a trace has, in one place.

`gen_ai.*`, `http.*`, `url.*`, `network.*` and `error.type` are those of OpenTelemetry's semantic conventions 1.41.0,
the last that define `gen_ai.*`. That part has moved to a repository of its own, where names still change and no stable
release is; so it is pinned to what it was. `trace_names = vllm` gives attributes and the request's span the names that
vLLM's traces have. What neither of them names begins with `headrace.`; phases are called the same in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal

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


@dataclass(frozen=True)
class Names:
    """`span` is the request's span, None for method and route. `attributes` are the names of figures; those that are
    not there are left out."""

    span: str | None
    attributes: Mapping[str, str]

    def of(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes of these figures, without those that are None."""
        names = self.attributes
        return {names[each]: value for each, value in figures.items() if value is not None and each in names}


_BOTH = {
    "method": "http.request.method",
    "route": "http.route",
    "path": "url.path",
    "scheme": "url.scheme",
    "protocol": "network.protocol.version",
    "status": "http.response.status_code",
    "error": "error.type",
    "model": "gen_ai.response.model",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "cached_tokens": "headrace.cached_tokens",
    "blocked_seconds": "headrace.blocked_on_client_seconds",
}
_NAMES: Mapping[str, Names] = {
    "gen_ai": Names(
        None,
        _BOTH
        | {
            "operation": "gen_ai.operation.name",
            "provider": "gen_ai.provider.name",
            "requested_model": "gen_ai.request.model",
            "answer_id": "gen_ai.response.id",
            "request_id": "headrace.request_id",
            "choices": "gen_ai.request.choice.count",
            "top_k": "gen_ai.request.top_k",
            "seed": "gen_ai.request.seed",
            "input_tokens": "gen_ai.usage.input_tokens",
            "output_tokens": "gen_ai.usage.output_tokens",
            "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
            "first_token": "gen_ai.server.time_to_first_token",
        },
    ),
    "vllm": Names(
        "llm_request",
        _BOTH
        | {
            "request_id": "gen_ai.request.id",
            "choices": "gen_ai.request.n",
            "input_tokens": "gen_ai.usage.prompt_tokens",
            "output_tokens": "gen_ai.usage.completion_tokens",
            "queue": "gen_ai.latency.time_in_queue",
            "first_token": "gen_ai.latency.time_to_first_token",
            "prefill": "gen_ai.latency.time_in_model_prefill",
            "decode": "gen_ai.latency.time_in_model_decode",
            "inference": "gen_ai.latency.time_in_model_inference",
            "seconds": "gen_ai.latency.e2e",
        },
    ),
}


def names_of(scheme: Literal["gen_ai", "vllm"]) -> Names:
    """The names that the setting `trace_names` asks for."""
    return _NAMES[scheme]

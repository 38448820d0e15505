"""The one alphabet of the channel between front end and engine: commands go down, events come up.

The same structs cross a thread as they are and a process as msgpack (`engine.transport.wire`). A new command or
question is a type here and an entry in the tables of `engine.core.core`, which carries it out; nothing on the way knows
one by its name.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.messages import EngineCoreOutputs, EngineCoreRequest, EngineReady, FinishReason
from engine.snapshot import EngineSnapshot

# --- questions


class GetSnapshot(msgspec.Struct, tag=True, array_like=True, gc=False):
    """What the engine has to do, holds and has done lately: an `EngineSnapshot`. It takes the engine about a
    millisecond for a thousand requests or ten thousand blocks.

    Of steps it tells those that ended after `after`, of requests the first `most_requests` that run and that wait."""

    after: float = 0.0
    most_requests: int | None = None


class StartProfile(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Record what the next steps do with their time; what was recorded before is dropped."""

    num_steps: int


class StopProfile(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Tell what was recorded, and record no more."""


class Profile(msgspec.Struct, frozen=True, tag_field="object", tag="profile"):
    """What was recorded of so many steps: a JSON list of events of Chrome's trace format, unless it is too large."""

    events: bytes = b"[]"
    num_steps: int = 0
    is_too_large: bool = False


# --- commands


class _Command(msgspec.Struct, tag=True, array_like=True, gc=False):
    @property
    def ends(self) -> Sequence[str]:
        """The requests that this is the end of: work for them can be dropped before it is carried out."""
        return ()


class AddRequests(_Command):
    """Run the choices of one prompt. They will run where they can share its blocks, too."""

    prompt_token_ids: list[int]  # which so crosses once and not with each choice
    choices: list[EngineCoreRequest]  # each without the prompt

    @classmethod
    def of(cls, requests: Sequence[EngineCoreRequest]) -> AddRequests:
        prompt = requests[0].prompt_token_ids
        assert all(request.prompt_token_ids is prompt for request in requests)
        return cls(prompt, [msgspec.structs.replace(request, prompt_token_ids=[]) for request in requests])

    def requests(self) -> list[EngineCoreRequest]:
        """The choices with their prompt, for the one who carries this out."""
        for request in self.choices:
            request.prompt_token_ids = self.prompt_token_ids
        return self.choices


class FinishRequests(_Command):
    """End these requests: the client has left (ABORT), or the front end found a stop string (STOP)."""

    request_ids: list[str]
    reason: FinishReason

    @property
    def ends(self) -> Sequence[str]:
        return self.request_ids


class ResetPrefixCache(_Command):
    """Find nothing any more of what has been computed so far. Requests keep the blocks that they hold."""


class SetLogLevel(_Command):
    """Log from this severity on, as the process does that has sent this: ``"debug"``."""

    level: str


class ChargeTenants(_Command):
    """Other engines have served these tenants so much, in prompt tokens by the tenant's weight: it counts as if this
    one had."""

    served: dict[str, float]


class PublishKVEvents(_Command):
    """Tell with each step what has come into the prefix cache and what has gone from it, beginning with all that is
    known to be there. `key` is what chunks are hashed with, at most 64 bytes; with another one nothing is known."""

    key: bytes


class Ask(_Command):
    """Answer a question, between two steps, with an `Answered` of the same number."""

    number: int
    question: Question


class Break(_Command):
    """What computes has gone: the engine ends of this. Put by whoever watches it, not by the front end."""

    error: BaseException


class Close(_Command):
    """Last command: the engine ends its loop."""


# --- events, besides EngineReady, which is the first after loading, and EngineCoreOutputs, one per step


class LoadingProgress(msgspec.Struct, tag=True, array_like=True, gc=False):
    """How far an engine in a process of its own has come with loading."""

    phase: str
    done: int
    total: int | None


class RequestsBegun(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The next step is the first of these requests, or the first since they were preempted. Should the engine die from
    here on, they may be why. Told by engines in processes of their own, before the step."""

    request_ids: list[str]


class Answered(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The answer to the question of this number, or why there is none."""

    number: int
    answer: Answer | None
    error: str = ""


class EngineDied(msgspec.Struct, tag=True, array_like=True):
    """Last event: what the engine has ended of; `EngineDead` if it was told to."""

    error: BaseException


Question = GetSnapshot | StartProfile | StopProfile
Answer = EngineSnapshot | Profile
Command = (
    AddRequests
    | FinishRequests
    | ResetPrefixCache
    | ChargeTenants
    | PublishKVEvents
    | SetLogLevel
    | Ask
    | Break
    | Close
)
Event = LoadingProgress | EngineReady | RequestsBegun | EngineCoreOutputs | Answered | EngineDied

"""The messages between front end and engine: commands go down, events come up.

The same structs go to a thread as they are, and to a process as msgpack (`engine.transport.wire`). A new command or
question is a type here and an entry in the tables of `engine.core.core`; no module in between names it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.messages import EngineCoreOutputs, EngineCoreRequest, EngineReady, FinishReason
from engine.snapshot import EngineSnapshot

# --- questions


class GetSnapshot(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Return an `EngineSnapshot`, with the steps that ended after `after`, and the first `most_requests` of the running
    and of the waiting requests. Takes about a millisecond for a thousand requests or ten thousand blocks."""

    after: float = 0.0
    most_requests: int | None = None


class StartProfile(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Begin a profile of the next steps, and drop an earlier one."""

    num_steps: int


class StopProfile(msgspec.Struct, tag=True, array_like=True, gc=False):
    """End the profile and return it."""


class Profile(msgspec.Struct, frozen=True, tag_field="object", tag="profile"):
    """A profile of `num_steps` steps: a JSON list of events in Chrome's trace format, empty if it is too large."""

    events: bytes = b"[]"
    num_steps: int = 0
    is_too_large: bool = False


# --- commands


class _Command(msgspec.Struct, tag=True, array_like=True, gc=False):
    @property
    def ends(self) -> Sequence[str]:
        """The requests that this command ends. A step that only serves them may be aborted at once."""
        return ()


class AddRequests(_Command):
    """Run the choices of one prompt, all in one engine, so that they share the blocks of the prompt."""

    prompt_token_ids: list[int]  # sent once and not with each choice
    choices: list[EngineCoreRequest]  # each without the prompt

    @classmethod
    def of(cls, requests: Sequence[EngineCoreRequest]) -> AddRequests:
        prompt = requests[0].prompt_token_ids
        assert all(request.prompt_token_ids is prompt for request in requests)
        return cls(prompt, [msgspec.structs.replace(request, prompt_token_ids=[]) for request in requests])

    def requests(self) -> list[EngineCoreRequest]:
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
    """Forget all cached prefixes. Running requests keep their blocks."""


class SetLogLevel(_Command):
    """Set the level from which the engine's process logs, such as ``"debug"``."""

    level: str


class ChargeTenants(_Command):
    """Charge tenants for what other engines have served, in prompt tokens / tenant weight."""

    served: dict[str, float]


class PublishKVEvents(_Command):
    """Send KV events with each step, beginning with the whole prefix cache. `key`, at most 64 bytes, is the key of the
    hashes; prompts computed under another key are not known."""

    key: bytes


class Ask(_Command):
    """Answer a question between two steps, with an `Answered` of the same number."""

    number: int
    question: Question


class Break(_Command):
    """End the engine with this error: its device or a rank has ended. Sent by the executor's watcher."""

    error: BaseException


class Close(_Command):
    """End the engine's loop. The last command."""


# --- events, besides EngineReady, which is the first after loading, and EngineCoreOutputs, one per step


class LoadingProgress(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The progress of loading in an engine's process."""

    phase: str
    done: int
    total: int | None


class RequestsBegun(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The requests that start or resume in the next step. If the engine dies from here on, they may be the cause. Sent
    by an engine's process before the step."""

    request_ids: list[str]


class Answered(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The answer to the question with this number, or an error."""

    number: int
    answer: Answer | None
    error: str = ""


class EngineDied(msgspec.Struct, tag=True, array_like=True):
    """The engine has ended with this error; `EngineDead` after `Close`. The last event."""

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

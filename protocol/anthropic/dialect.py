"""Anthropic's Messages API."""

from __future__ import annotations

from protocol.anthropic.answers import AnthropicError, Message
from protocol.anthropic.errors import error_body
from protocol.anthropic.messages import CountTokensRequest, MessagesRequest
from protocol.anthropic.output import MessageBodyWriter, MessageStreamWriter
from protocol.dialect import CountingRoute, Dialect, GenerationRoute

_MESSAGES = GenerationRoute(
    path="/v1/messages",
    summary="Answer a conversation, as Anthropic's API does.",
    request=MessagesRequest,
    answer=Message,
    id_prefix="msg_",
    stream_writer=MessageStreamWriter,
    body_writer=MessageBodyWriter,
)

ANTHROPIC = Dialect(
    root="/v1/messages",
    retired=("/v1/complete",),
    generation=(_MESSAGES,),
    counting=(
        CountingRoute(path="/v1/messages/count_tokens", summary="Count its tokens.", request=CountTokensRequest),
    ),
    error_body=error_body,
    error_answer=AnthropicError,
    request_id_header=b"request-id",
    shared_roots=("/v1/models",),
    client_header="anthropic-version",
)

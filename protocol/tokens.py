"""POST /tokenize and /detokenize: text to token ids and back, in vLLM's shape."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from engine.errors import InvalidRequest
from protocol.body import ClientModel, at_most, decode_json, fail_fast, validate
from protocol.openai.chat import ChatCompletionRequest
from protocol.request_fields import TruncatedPrompt

MAX_TOKENS = 2**20  # of one request


class TokenizeTextRequest(TruncatedPrompt):
    """The body of /tokenize for a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatCompletionRequest):
    """The body of /tokenize for a conversation: what /v1/chat/completions would make of the same messages."""

    return_token_strs: bool = False


class DetokenizeRequest(ClientModel):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], fail_fast, at_most(MAX_TOKENS, "tokens")]

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` for an id that the model does not have."""
        highest = max(self.tokens, default=0)
        if highest >= vocab_size:
            raise InvalidRequest(f"tokens must hold token ids in [0, {vocab_size - 1}], got {highest}.", param="tokens")


def parse_tokenize(body: bytes) -> TokenizeTextRequest | TokenizeChatRequest:
    """Which of the two a body is, checked. Raises `ApiError` 400."""
    content = decode_json(body)
    is_chat = isinstance(content, dict) and content.get("messages") is not None
    return validate(TokenizeChatRequest, content) if is_chat else validate(TokenizeTextRequest, content)

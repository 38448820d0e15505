"""Guards around the tokenizers library, which is handed what strangers wrote.

What it dislikes ends in a bare Exception, and what it did not think of in a panic of Rust, which reaches Python as a
BaseException that no `except Exception` catches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tokenizers import Tokenizer

from gpu.checkpoint.errors import ModelError
from gpu.checkpoint.header_fields import FIELDS, shown
from gpu.checkpoint.tokenizer_steps import check_lengths

logger = logging.getLogger(__name__)

# Letters with and without accents, digits, blanks, a word in another script, an emoji, a broken special token.
_SAMPLE = "Hello, wörld! 12 345\n\t  中文 Привет 🙂 <|im_start|> a"
_MOST_TOKENS = 4096  # of the sample, which has 50 characters


@contextmanager
def tokenizer_errors(what: str) -> Iterator[None]:
    """Whatever the library raises becomes a `ModelError` that begins with `what`."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{what}: {str(error)[:200] or type(error).__name__}.") from error


def check_tokenizer(tokenizer: Tokenizer, vocabulary: Mapping[str, int], vocab_size: int, *, source: str) -> None:
    """Raise `ModelError` for a tokenizer that cannot be used: a vocabulary out of bounds, or a text that breaks it.

    `vocabulary` has the id of each token, which the tokenizer itself takes long to tell. Some models that work have a
    few tokens more than rows in their embedding, for padding that nobody asks for: these are served, and a request with
    such a token is refused.
    """
    most = FIELDS["vocab_size"].high
    with tokenizer_errors(f"{source} has a tokenizer that cannot be used"):
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        if not any(token and token not in special for token in vocabulary):
            raise ModelError(f"{source}: the tokenizer's vocabulary is empty but for special tokens.")
        check_lengths(vocabulary, source)
        highest = max(vocabulary.values())
        if highest >= most:
            token = next(token for token, token_id in vocabulary.items() if token_id == highest)
            raise ModelError(f"{source}: token {shown(token)} has the id {highest:,}; ids below {most:,} are allowed.")
        if highest >= vocab_size:
            logger.warning(
                "%s has tokens with ids up to %d, the model an embedding of %d: requests with those beyond it are "
                "refused",
                source, highest, vocab_size,
            )  # fmt: skip
        for add_special_tokens in (True, False):
            token_ids = tokenizer.encode(_SAMPLE, add_special_tokens=add_special_tokens).ids
            if len(token_ids) > _MOST_TOKENS or max(token_ids, default=0) > highest:
                raise ModelError(
                    f"{source}: the tokenizer makes {len(token_ids):,} tokens of {len(_SAMPLE)} characters, with ids "
                    f"up to {max(token_ids):,}; up to {_MOST_TOKENS:,} are allowed, with ids up to {highest:,}."
                )
            tokenizer.decode(token_ids, skip_special_tokens=not add_special_tokens)

"""Which tensors a model consists of, under their Hugging Face names; and the check that a file holds just these.

Imported by every reader of this package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from gpu.checkpoint.architecture import DecoderSpec, parts_of
from gpu.checkpoint.config import ModelConfig
from gpu.checkpoint.errors import ModelError
from gpu.checkpoint.families import spec_of
from gpu.checkpoint.header_fields import shown

# Computed from the configuration, whatever a checkpoint says; old Llama checkpoints saved them.
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
# Of a model that sees images too, whose text part is served: what it sees them by, and how the rest is called.
_OF_IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..+")
_OF_TEXT = re.compile(r"(model\.language_model|language_model\.model)\.")
_BARE = re.compile(r"(embed_tokens|layers|norm)\.")  # names in a model that was saved without its head
_NAMES_SHOWN = 8  # of each kind in an error: one missing layer alone has a dozen names


class Shaped(Protocol):
    """A tensor, in whatever form."""

    @property
    def shape(self) -> Sequence[int]: ...


W = TypeVar("W", bound=Shaped)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every weight of a model, linear weights as [out_features, in_features]."""
    return shapes_of(spec_of(config))


def shapes_of(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """As `tensor_shapes`, of a model or of what a rank has of one."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts_of(spec):
        shapes[part.weight_name] = part.shape
        if part.bias:
            shapes[f"{part.name}.bias"] = part.shape[:1]
    return shapes


def text_name(name: str) -> str:
    """What a tensor is called in a model of text alone."""
    if _BARE.match(name):
        return f"model.{name}"
    return _OF_TEXT.sub("model.", name, count=1) if _OF_TEXT.match(name) else name


def checked(
    weights: Iterable[tuple[str, W]], config: ModelConfig, *, source: str, spec: DecoderSpec | None = None
) -> Iterator[tuple[str, W]]:
    """Pass on the weights that `config` calls for, or a rank's `spec` of it, each once and in its shape. Raises
    `ModelError` at the end if they did not all come, or others did: it names what is wrong, all of it."""
    check = _Check(config, spec)
    for given, weight in weights:
        name = text_name(given)
        if check.takes(name, tuple(weight.shape)):
            yield name, weight
    check.end(source)


def check_shapes(found: Iterable[tuple[str, tuple[int, ...]]], config: ModelConfig, *, source: str) -> None:
    """Raise `ModelError` unless the tensors of a file are those that `config` calls for.

    So what the configuration claims lies in the file in full, before memory is taken for any of it.
    """
    check = _Check(config)
    for name, shape in found:
        check.takes(text_name(name), shape)
    check.end(source)


class _Check:
    """What a model lacks, and what it has no place for.

    A tensor too many is refused like one too few: a bias that nobody adds changes every token without a sign.
    """

    def __init__(self, config: ModelConfig, spec: DecoderSpec | None = None) -> None:
        self._config = config
        self._shapes = shapes_of(spec or spec_of(config))
        self._missing = dict(self._shapes)
        self._faults: dict[str, list[str]] = {"missing": [], "with no place": [], "given twice": [], "misshapen": []}

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        if (
            _DERIVED.fullmatch(name)
            or _OF_IMAGES.fullmatch(name)
            or (name == "lm_head.weight" and self._config.tie_word_embeddings)
        ):
            return False
        expected = self._missing.pop(name, None)
        if expected == shape:
            return True
        if name not in self._shapes:
            self._faults["with no place"].append(shown(name))
        elif expected is None:
            self._faults["given twice"].append(name)
        else:
            self._faults["misshapen"].append(f"{name} is {list(shape)}, needs {list(expected)}")
        return False

    def end(self, source: str) -> None:
        self._faults["missing"] += self._missing
        faults = [
            f"{len(names)} {kind}: {', '.join(names[:_NAMES_SHOWN])}"
            + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")
            for kind, names in self._faults.items()
            if names
        ]
        if faults:
            config = self._config
            kind = f"a {config.architecture} of {config.num_hidden_layers} layers"
            raise ModelError(
                f"{source} does not hold the {len(self._shapes)} tensors of {kind} (attention_bias="
                f"{config.attention_bias}, qk_norm={config.qk_norm}) that its configuration claims: "
                f"{'; '.join(faults)}. Fetch the model's files anew."
            )

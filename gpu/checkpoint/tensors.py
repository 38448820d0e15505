"""Which tensors a model consists of, under their Hugging Face names; and the check that a file holds just these.

Imported by every reader of this package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpu.checkpoint.architecture import parts_of
from gpu.checkpoint.config import ModelConfig
from gpu.checkpoint.errors import ModelError
from gpu.checkpoint.families import spec_of
from gpu.checkpoint.header_fields import shown

# Computed from the configuration, whatever a checkpoint says; old Llama checkpoints saved them.
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every weight of a model, linear weights as [out_features, in_features]."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts_of(spec_of(config)):
        shapes[f"{part.name}.weight"] = part.shape
        if part.bias:
            shapes[f"{part.name}.bias"] = part.shape[:1]
    return shapes


def check_shapes(found: Iterable[tuple[str, tuple[int, ...]]], config: ModelConfig, *, source: str) -> None:
    """Raise `ModelError` unless the tensors of a file are those that `config` calls for.

    So what the configuration claims lies in the file in full, before memory is taken for any of it.
    """
    check = TensorCheck(config, source)
    for name, shape in found:
        check.take(name, shape)
    check.end()


class TensorCheck:
    """That each tensor that `config` calls for comes once, in its shape, and no other.

    A tensor too many is refused like one too few: a bias that nobody adds changes every token without a sign.
    """

    def __init__(self, config: ModelConfig, source: str) -> None:
        self._config = config
        self._source = source
        self.shapes = tensor_shapes(config)
        self.total = len(self.shapes)

    def take(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the model wants it. Raises `ModelError` if it has no place for it."""
        config = self._config
        if _DERIVED.fullmatch(name) or (name == "lm_head.weight" and config.tie_word_embeddings):
            return False
        if name not in self.shapes:
            raise ModelError(
                f"{self._source}: tensor {shown(name)} is repeated or has no place in a {config.architecture} of "
                f"{config.num_hidden_layers} layers (attention_bias={config.attention_bias}, qk_norm={config.qk_norm})."
            )
        expected = self.shapes.pop(name)
        if shape != expected:
            raise ModelError(
                f"{self._source}: tensor {name} has the shape {list(shape)}; the configuration makes it "
                f"{list(expected)}. The weights and the configuration are of different models."
            )
        return True

    def end(self) -> None:
        """Raises `ModelError` if something is missing."""
        if self.shapes:
            named = ", ".join(list(self.shapes)[:3])
            raise ModelError(
                f"{self._source}: {len(self.shapes)} of {self.total} tensors are missing, among them {named}. The "
                f"configuration claims {self._config.num_hidden_layers} layers. Fetch the model's files anew."
            )

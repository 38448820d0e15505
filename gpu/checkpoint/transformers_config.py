"""The configuration of a model without a record, which transformers computes.

transformers is imported for such a model only, because that takes seconds. It reads config.json with its own class.
Code of a repository is never run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu.checkpoint import hf_config
from gpu.checkpoint.config import FIELDS, ModelConfig, ModelError, check_field, shown
from gpu.checkpoint.families.table import FAMILIES
from gpu.checkpoint.hf_files import read_header

logger = logging.getLogger(__name__)

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


def is_for_transformers(values: Mapping[str, Any], model_impl: str) -> bool:
    """Return True if transformers computes the model of this config.json: the setting says so, or it is auto,
    transformers is installed, and there is no record."""
    named = values.get("architectures")
    if model_impl != "auto" or not isinstance(named, list) or FAMILIES.keys() & {*map(str, named)}:
        return model_impl == "transformers"
    return find_spec("transformers") is not None


def config_from_transformers(
    directory: Path,
    values: Mapping[str, Any],
    *,
    eos_token_ids: tuple[int, ...],
    tensors: tuple[Path, ...] | None,
    source: str,
) -> ModelConfig:
    """Return the configuration of a decoder that the installed transformers implements. `tensors` are its files.
    Raises `ModelError` for other models, and if transformers is not installed."""
    if find_spec("transformers") is None:
        raise ModelError(f"{source}: model_impl=transformers cannot work. {hf_config.WITH_TRANSFORMERS}")
    if tensors is None:
        raise ModelError(f"{source}: leave out load_format=dummy, which is not for models that transformers computes.")
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named, model_type = values.get("architectures"), values.get("model_type")
    decoder = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None
    if not isinstance(decoder, str) or named != [decoder]:
        others = "It is no decoder that the installed transformers implements; code that auto_map names is never run."
        raise hf_config.unknown_architecture(named, source, others)
    if "auto_map" in values:
        logger.warning("%s: the code that auto_map names is not run; transformers' own %s is", source, decoder)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"{source}: transformers does not take config.json: {error}") from error
    for refused in _refusals(config, values):
        raise ModelError(f"{source}: {refused} in config.json is not supported with transformers' {decoder}.")
    found = {name: getattr(config, name, None) for name in (*_SIZES, "num_key_value_heads", "head_dim")}
    found["num_key_value_heads"] = found["num_key_value_heads"] or found["num_attention_heads"]
    if found["head_dim"] is None and found["num_attention_heads"]:
        found["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    sizes = {
        name: check_field(FIELDS[name], n, key=f"{name} of config.json", source=source) for name, n in found.items()
    }
    values = {**values, **{name: getattr(config, name, None) for name in ("eos_token_id", "bos_token_id")}}
    checked = ModelConfig(
        **sizes,
        architecture=decoder,
        intermediate_size=1,  # nothing reads it
        torch_dtype=hf_config.dtype_of(values, source),
        eos_token_ids=tuple(
            dict.fromkeys([*eos_token_ids, *hf_config.token_ids(values, "eos_token_id", source=source)])
        ),
        bos_token_id=next(iter(hf_config.token_ids(values, "bos_token_id", source=source)), None),
        numbers={"num_weights": sum(math.prod(each.shape) for path in tensors for each in read_header(path).values())},
        transformers_dir=str(directory),
    )
    hf_config.check_config(checked, source=source)
    return checked


def _refusals(config: Any, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is known to be wrong with paged keys and values, or not read."""
    if values.get("quantization_config"):
        yield f"quantization_config={shown(values['quantization_config'])}"
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in (hf_config.FULL, hf_config.SLIDING):
            yield f"{kind!r} of layer_types"
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *rope.values()):
        if isinstance(each, dict) and each.get("rope_type") in ("dynamic", "longrope"):  # others in longer contexts
            yield f"rope_type={each['rope_type']}"

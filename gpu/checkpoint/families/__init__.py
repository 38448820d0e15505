"""The families of models that are served: a file for each, and its line in `FAMILIES`.

In reading order:

llama      Llama, and the many that took over its shape
mistral    Mistral, with a sliding window
qwen2      Qwen 2 and 2.5, with biases on queries, keys and values
qwen3      Qwen 3, with norms on queries and keys
gemma      Gemma 2 and 3, with windows in some layers, and norms of their own
mixtral    Mistral with experts
qwen3_moe  Qwen 3 with experts
gpt_oss    gpt-oss: experts, sinks, and windows in every second layer
"""

from gpu.checkpoint.architecture import Architecture, DecoderSpec
from gpu.checkpoint.config import ModelConfig
from gpu.checkpoint.errors import ModelError
from gpu.checkpoint.families.gemma import GEMMA2, GEMMA3
from gpu.checkpoint.families.gpt_oss import GPT_OSS
from gpu.checkpoint.families.llama import LLAMA
from gpu.checkpoint.families.mistral import MISTRAL
from gpu.checkpoint.families.mixtral import MIXTRAL
from gpu.checkpoint.families.qwen2 import QWEN2
from gpu.checkpoint.families.qwen3 import QWEN3
from gpu.checkpoint.families.qwen3_moe import QWEN3_MOE

_FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, MIXTRAL, QWEN3_MOE, GPT_OSS)
FAMILIES: dict[str, Architecture] = {family.name: family for family in _FAMILIES}
FAMILIES["Gemma3ForConditionalGeneration"] = GEMMA3  # of which the text part is served


def spec_of(config: ModelConfig) -> DecoderSpec:
    """What a model of this configuration is made of. Raises ModelError for an architecture that is not supported."""
    if config.architecture not in FAMILIES:
        raise ModelError(f"Architecture {config.architecture!r} is not supported; supported are {', '.join(FAMILIES)}.")
    return FAMILIES[config.architecture].spec(config)

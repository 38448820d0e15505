"""A model's files: configuration, tokenizer, chat template, and the tensors' places.

Nothing here imports torch: the front end opens a model for its tokenizer and chat template.

In reading order:

config          The model's configuration, whatever kind of file it comes from, and checks of its numbers.
architecture    The parts of a model, their names in files, and mixtures of experts.
encoder         The parts of an encoder.
gemma_layers    The parts of Gemma 3n and 4 that other families do not have.
families        The families of models that are served.
tensors         The tensors of a model, their slices for a rank, and stacked experts.
quantized_rows  Quantized weights in the blocks of GGUF types, and their lossless conversion into other blocks.
gguf_file       The GGUF container.
gguf_tokenizer  A GGUF file's metadata as a tokenizer.
quantized_layers  The linear layers of quantized safetensors: FP8, compressed-tensors, GPTQ, AWQ, bitsandbytes.
hf_files        JSON files and safetensors headers, read within bounds.
hf_config       A Hugging Face config.json as the model's configuration.
transformers_config  The configuration of a model without a record, which transformers computes.
embedder        Pooling and prompts of embedding models.
scorer          Labels and activation of classifiers and rerankers.
tokenizers      Bounds on tokenizers of unknown origin.
model_files     A model on disk: described at once, read on demand; digest, default sampling, progress.
gguf_model      A GGUF file as `ModelFiles`.
hf_directory    A Hugging Face directory as `ModelFiles`.
embedded        The embedded model, and how it is fetched.
hub             Models of a Hugging Face hub: the choice of files, downloads that are checked and resume.
resolve         From a model's name or path to opened files, from the hub if need be.
"""

from gpu.checkpoint.config import ModelConfig, ModelError, RopeScaling
from gpu.checkpoint.embedded import EMBEDDED_CHAT, EMBEDDED_MODEL, default_cache_dir
from gpu.checkpoint.embedder import Embedder
from gpu.checkpoint.model_files import SAMPLING_FIELDS, ModelFiles, Progress, model_digest, weight_paths
from gpu.checkpoint.quantized_rows import QuantizedRows
from gpu.checkpoint.resolve import LOAD_FORMATS, fetch_repository, models_here, open_model
from gpu.checkpoint.scorer import Scorer
from gpu.checkpoint.tokenizers import is_known as is_known_tokenizer

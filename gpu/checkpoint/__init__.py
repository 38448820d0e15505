"""What a model is, read from its files: configuration, tokenizer, chat template, and which tensors lie where.

Torch-free, and so is all that this room imports: the front end opens a model for its tokenizer and chat template, and
`gpu.weights` draws its tensors. Every way ends in a `ModelFiles`.

In reading order:

resolve             from what the operator typed to an opened model
model_files         a model as it lies on disk: described at once, read when asked
digest              a digest of it, from a little of it
config              the shape of a model, whatever kind of file it came from
architecture        what a model is made of: its parts, and what computes with them
experts             what the families with a mixture of experts have in common
families            the families of models that are served
tensors             which tensors a model consists of, and the check that a file holds just these
embedded            fetches the embedded model
hub                 fetches a repository of the Hugging Face hub
gguf_model          a GGUF file as a `ModelFiles`
gguf_file           the container: metadata and tensors of one mapped file
gguf_config         its metadata as the model's shape
gguf_tokenizer      its metadata as a tokenizer
gguf_sentencepiece  the same where the tokenizer is SentencePiece's
quantized_rows      a quantized tensor as its file holds it
slices              the part of a tensor that one rank of several has
hf_directory        a Hugging Face directory as a `ModelFiles`
hf_config           its config.json as the model's shape
hf_spellings        one spelling of facts that a config.json may state twice
stacks              its tensors that hold the parts of many experts, taken apart
json_file           its JSON files, within bounds
safetensors_header  what a safetensors file says it holds, checked before it is mapped
default_sampling    what a model's authors recommend to sample with
embedder            pooling and prompts of embedding models
header_fields       what the numbers of a model's header may be
foreign_tokenizer   guards around the tokenizers library
tokenizer_steps     what the steps of a stranger's tokenizer may do
progress            how slow steps report how far they are
errors              what is wrong with a model that was asked for
"""

from gpu.checkpoint.config import ModelConfig, RopeScaling
from gpu.checkpoint.default_sampling import SAMPLING_FIELDS
from gpu.checkpoint.digest import model_digest, weight_paths
from gpu.checkpoint.embedded import EMBEDDED_CHAT, EMBEDDED_MODEL, default_cache_dir
from gpu.checkpoint.embedder import Embedder
from gpu.checkpoint.errors import ModelError
from gpu.checkpoint.model_files import ModelFiles
from gpu.checkpoint.progress import Progress
from gpu.checkpoint.quantized_rows import QuantizedRows
from gpu.checkpoint.resolve import LOAD_FORMATS, open_model
from gpu.checkpoint.tokenizer_steps import is_known as is_known_tokenizer

__all__ = [
    "EMBEDDED_CHAT",
    "EMBEDDED_MODEL",
    "LOAD_FORMATS",
    "SAMPLING_FIELDS",
    "Embedder",
    "ModelConfig",
    "ModelError",
    "ModelFiles",
    "Progress",
    "QuantizedRows",
    "RopeScaling",
    "default_cache_dir",
    "is_known_tokenizer",
    "model_digest",
    "open_model",
    "weight_paths",
]

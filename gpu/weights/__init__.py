"""How a model is found on disk or fetched, read and described.

Every way ends in a `ModelFiles`. Importing this package imports no torch: the front end opens a model for its
tokenizer and chat template, and only drawing from `ModelFiles.weights()` needs torch.

In reading order:

resolve             from what the operator typed to an opened model
model_files         a model as it lies on disk: described at once, read when asked
embedded            fetches the embedded model
hub                 fetches a repository of the Hugging Face hub
gguf_model          a GGUF file as a `ModelFiles`
gguf_file           the container: metadata and tensors of one mapped file
gguf_config         its metadata as the model's shape
gguf_tokenizer      its metadata as a tokenizer
hf_directory        a Hugging Face directory as a `ModelFiles`
hf_config           its config.json as the model's shape
json_file           its JSON files, within bounds
safetensors_header  what a safetensors file says it holds, checked before it is mapped
dummy               random weights from a configuration alone
tensors             which tensors a model consists of, and the check that a file holds just these
header_fields       what the numbers of a model's header may be
foreign_tokenizer   guards around the tokenizers library
tokenizer_steps     what the steps of a stranger's tokenizer may do
quantized_rows      a quantized tensor as its file holds it
staging             the way of a checkpoint to the device, through a little pinned memory
progress            how slow steps report how far they are
errors              what is wrong with a model that was asked for
"""

from gpu.weights.embedded import EMBEDDED_MODEL, default_cache_dir
from gpu.weights.errors import ModelError
from gpu.weights.model_files import ModelFiles
from gpu.weights.progress import Progress
from gpu.weights.quantized_rows import QuantizedRows
from gpu.weights.resolve import LOAD_FORMATS, open_model
from gpu.weights.tokenizer_steps import is_known as is_known_tokenizer

__all__ = [
    "EMBEDDED_MODEL",
    "LOAD_FORMATS",
    "ModelError",
    "ModelFiles",
    "Progress",
    "QuantizedRows",
    "default_cache_dir",
    "is_known_tokenizer",
    "open_model",
]

"""How a model is found on disk or fetched, read and described.

Reading order: `resolve` says what a name may be; `embedded`, `hub` fetch; `gguf_*` and `hf_*` read; `dummy` invents.
All of them end in a `ModelFiles`. Importing this package imports no torch: the front end opens a model for its
tokenizer and chat template, and only drawing from `ModelFiles.weights()` needs torch.
"""

from gpu.weights.embedded import EMBEDDED_MODEL, default_cache_dir
from gpu.weights.errors import ModelError
from gpu.weights.model_files import ModelFiles
from gpu.weights.progress import Progress
from gpu.weights.quantized_rows import QuantizedRows
from gpu.weights.resolve import LOAD_FORMATS, open_model

__all__ = [
    "EMBEDDED_MODEL",
    "LOAD_FORMATS",
    "ModelError",
    "ModelFiles",
    "Progress",
    "QuantizedRows",
    "default_cache_dir",
    "open_model",
]

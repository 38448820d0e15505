"""Open a model by its name or path, and fetch it from the hub if necessary."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.checkpoint.config import ModelError
from gpu.checkpoint.embedded import EMBEDDED_MODEL, EMBEDDED_SAMPLING, default_cache_dir, fetch_embedded_model
from gpu.checkpoint.model_files import ModelFiles, Progress, no_progress

if TYPE_CHECKING:
    from tqdm import tqdm


LOAD_FORMATS = ("auto", "dummy")

_EMBEDDED_NAMES = (EMBEDDED_MODEL, "embedded")
_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
_WHAT_WORKS = (
    f"A model is one of: {EMBEDDED_MODEL!r} (embedded, fetched once); a .gguf file; a directory with config.json, "
    "*.safetensors and tokenizer.json; a Hugging Face repository as 'org/name' or 'org/name@revision', "
    "for example 'Qwen/Qwen3-0.6B'."
)


def open_model(
    model: str,
    *,
    cache_dir: Path | None = None,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> ModelFiles:
    """Find `model`, fetch it if necessary, and read all of it except the weights. Blocks; call it off the event loop.

    `model` is the embedded model's alias, a .gguf file, a Hugging Face directory, or a hub repository id with an
    optional "@revision"; what exists on disk wins over the hub. `cache_dir` is where the embedded model is kept
    (`default_cache_dir()` if None); hub downloads go to Hugging Face's own cache (HF_HOME), which other tools share.
    `load_format` "dummy" makes random weights from `seed` instead of the files', which need not exist.

    Raises `ModelError` if the model cannot be found, fetched, read or run.
    """
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"load_format must be one of {', '.join(LOAD_FORMATS)}; got {load_format!r}.")
    with_weights = load_format != "dummy"
    progress = progress or no_progress
    files = _open(model, cache_dir or default_cache_dir(), with_weights=with_weights, progress=progress)
    return replace(files, tensors=files.tensors if with_weights else None, seed=seed, progress=progress)


def _open(model: str, cache_dir: Path, *, with_weights: bool, progress: Progress) -> ModelFiles:
    # Imported here, because the server answers before it needs them, and they take time to import.
    from gpu.checkpoint.gguf_model import open_gguf
    from gpu.checkpoint.hf_directory import open_hf_directory

    if model in _EMBEDDED_NAMES:
        files = open_gguf(fetch_embedded_model(cache_dir, progress), name=EMBEDDED_MODEL)
        return replace(files, load_sampling=lambda: EMBEDDED_SAMPLING)
    path = Path(model).expanduser()
    if path.is_dir():
        return open_hf_directory(path, name=path.resolve().name, with_weights=with_weights)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return open_gguf(path, name=path.stem)
    if path.exists():
        raise ModelError(f"{model!r} is neither a directory nor a .gguf file. {_WHAT_WORKS}")
    if path.suffix.lower() != ".gguf" and (hub_id := _HUB_ID.fullmatch(model)):
        directory = fetch_from_hub(hub_id["repo"], hub_id["revision"], with_weights=with_weights, progress=progress)
        return open_hf_directory(directory, name=hub_id["repo"], with_weights=with_weights)
    raise ModelError(f"There is no model {model!r}. {_WHAT_WORKS}")


# ------------------------------------------------------------------------------------------------------------------ hub


_DESCRIPTION_FILES = ["*.json", "*.jinja"]
# A repository's folders hold other formats of the same model, except the folders of modules.json, which begin
# with a number. Mistral's "consolidated" files repeat its weights.
_IGNORED = ["[!0-9]*/*", "*/*.safetensors", "consolidated*"]


def fetch_from_hub(repo_id: str, revision: str | None, *, with_weights: bool, progress: Progress = no_progress) -> Path:
    """Download the missing files of a repository and return its directory in Hugging Face's cache.

    Only safetensors, JSON and Jinja files are fetched, never pickled weights. Without a network an earlier download is
    used. Raises `ModelError`.
    """
    from huggingface_hub import errors, snapshot_download

    try:
        directory = snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=[*_DESCRIPTION_FILES, *(["*.safetensors"] if with_weights else [])],
            ignore_patterns=_IGNORED,
            tqdm_class=None if progress is no_progress else _reporting_to(progress),
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"The repository {repo_id} is gated: accept its terms on its page, then set HF_TOKEN to a token that "
            f"may read it."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"There is no directory {repo_id} here and no such repository on the hub (or it is private and "
            f"HF_TOKEN is not set). A repository that works is 'Qwen/Qwen3-0.6B'."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(
            f"The repository {repo_id} has no revision {revision!r}; leave '@...' out for the newest."
        ) from error
    except Exception as error:  # the hub's library passes on any error of its HTTP client
        raise ModelError(
            f"The repository {repo_id} cannot be fetched from the hub and is not in the local cache "
            f"({type(error).__name__}). Check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give a local directory."
        ) from error
    return Path(directory)


def _reporting_to(progress: Progress) -> type[tqdm[Any]]:
    """Return a tqdm class that draws nothing and reports the bytes of its bars to `progress`.

    For deduplicated chunks the hub's library has a bar for received bytes and one for bytes on disk: the one that is
    ahead counts.
    """
    from tqdm.auto import tqdm

    best = 0

    class ReportingTqdm(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._done = 0 if kwargs.get("unit") == "B" else None
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal best
            if self._done is not None:
                self._done += int(n or 0)
                best = max(best, self._done)
                total = int(self.total or 0)
                progress("Downloading the model", best, total if total >= best else None)
            return super().update(n)

    return ReportingTqdm

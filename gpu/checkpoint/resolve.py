"""Open a model by its name or path, and fetch it from the hub if necessary."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gpu.checkpoint.config import ModelError
from gpu.checkpoint.embedded import (
    EMBEDDED_FILE,
    EMBEDDED_MODEL,
    EMBEDDED_SAMPLING,
    default_cache_dir,
    fetch_embedded_model,
)
from gpu.checkpoint.model_files import ModelFiles, Progress, no_progress

LOAD_FORMATS = ("auto", "dummy")

_EMBEDDED_NAMES = (EMBEDDED_MODEL, "embedded")
_HUB_ID = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?<!\.gguf)(:(?P<tag>[^@:]+))?(@(?P<revision>[\w./-]+))?", re.ASCII | re.IGNORECASE
)
_WHAT_WORKS = (
    f"A model is one of: {EMBEDDED_MODEL!r} (embedded, fetched once); a .gguf file; a directory with config.json, "
    "*.safetensors and tokenizer.json; a Hugging Face repository as 'org/name', 'org/name@revision' or, for one of its "
    "GGUF files, 'org/name:Q4_K_M' or 'org/name:FILE.gguf', for example 'Qwen/Qwen3-0.6B'."
)


def open_model(
    model: str,
    *,
    cache_dir: Path | None = None,
    load_format: str = "auto",
    model_impl: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> ModelFiles:
    """Find `model`, fetch it if necessary, and read all of it except the weights. Blocks; call it off the event loop.

    `model` is the embedded model's alias, a .gguf file, a Hugging Face directory, or a hub repository id with an
    optional ":quantization" or ":file.gguf" and an optional "@revision"; what exists on disk wins over the hub.
    `cache_dir` is where the embedded model is kept (`default_cache_dir()` if None); hub downloads go to Hugging Face's
    own cache (HF_HOME), which other tools share. `load_format` "dummy" makes random weights from `seed`; files of
    weights need not exist. `model_impl` "transformers" or "headrace" chooses what computes the model; "auto" takes
    transformers for one that has no record.

    Raises `ModelError` if the model cannot be found, fetched, read or run.
    """
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"load_format must be one of {', '.join(LOAD_FORMATS)}; got {load_format!r}.")
    with_weights = load_format != "dummy"
    progress = progress or no_progress
    files = _open(model, cache_dir or default_cache_dir(), model_impl, with_weights=with_weights, progress=progress)
    if model_impl == "transformers" and files.config.transformers_dir is None:
        raise ModelError(
            f"{model!r} is a GGUF file, and model_impl=transformers computes Hugging Face directories only."
        )
    return replace(files, tensors=files.tensors if with_weights else None, seed=seed, progress=progress)


def fetch_repository(name: str, progress: Progress) -> None:
    """Download a hub's model by a name as in `open_model`, which is never read as a path here. Raises `ModelError`."""
    if (hub_id := _HUB_ID.fullmatch(name)) is None:
        raise ModelError(
            f"{name[:80]!r} is no repository of the hub: name one as 'org/name' or 'org/name:Q4_K_M', for example "
            "'Qwen/Qwen3-0.6B'."
        )
    from gpu.checkpoint.hub import fetch_from_hub

    fetch_from_hub(*hub_id.group("repo", "tag", "revision"), progress=progress)


def _open(model: str, cache_dir: Path, model_impl: str, *, with_weights: bool, progress: Progress) -> ModelFiles:
    # Imported here, because the server answers before it needs them, and they take time to import.
    from gpu.checkpoint.gguf_model import open_gguf
    from gpu.checkpoint.hf_directory import open_hf_directory

    if model in _EMBEDDED_NAMES:
        files = open_gguf(fetch_embedded_model(cache_dir, progress), name=EMBEDDED_MODEL)
        return replace(files, load_sampling=lambda: EMBEDDED_SAMPLING)
    path = Path(model).expanduser()
    if path.is_dir():
        return open_hf_directory(path, name=path.resolve().name, with_weights=with_weights, model_impl=model_impl)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return open_gguf(path, name=path.stem)
    if path.exists():
        raise ModelError(f"{model!r} is neither a directory nor a .gguf file. {_WHAT_WORKS}")
    if hub_id := _HUB_ID.fullmatch(model):
        from gpu.checkpoint.hub import fetch_from_hub

        path, name = fetch_from_hub(
            *hub_id.group("repo", "tag", "revision"), with_weights=with_weights, progress=progress
        )
        if path.is_dir():
            return open_hf_directory(path, name=name, with_weights=with_weights, model_impl=model_impl)
        return open_gguf(path, name=name)
    raise ModelError(f"There is no model {model!r}.{_nearest(model, cache_dir)} {_WHAT_WORKS}")


def _nearest(model: str, cache_dir: Path) -> str:
    """Return a question for the model that was meant: one that begins so, or has a similar name; empty for none."""
    names = list(dict.fromkeys([EMBEDDED_MODEL, *(name for name, _, _ in models_here(cache_dir))]))
    begins = [name for name in names if name.lower().startswith(model.lower())]
    found = begins or difflib.get_close_matches(model, names, n=1)
    return f" Did you mean {found[0]!r}?" if found else ""


def models_here(cache_dir: Path | None = None) -> Iterator[tuple[str, int, str]]:
    """Yield every model that was fetched: the name under which it can be served, its size in bytes and its state."""
    from gpu.checkpoint.hf_directory import weight_files
    from gpu.checkpoint.hub import cached_repositories, gguf_models

    if (embedded := (cache_dir or default_cache_dir()) / EMBEDDED_FILE).is_file():
        yield EMBEDDED_MODEL, embedded.stat().st_size, "complete"
    for repository, revision, partial in cached_repositories():
        at = "" if revision == "main" else f"@{revision}"
        for model in gguf_models(repository.files):
            yield f"{repository.name}:{model.tag or model.files[0].path}{at}", model.size, "complete"
        if any(file.path == "config.json" for file in repository.files):
            try:
                sizes = [path.stat().st_size for path in weight_files(repository.folder)]
                yield f"{repository.name}{at}", sum(sizes), "complete"
            except ModelError:
                yield f"{repository.name}{at}", 0, "without weights"
        if partial:
            yield repository.name, partial, "partly fetched"

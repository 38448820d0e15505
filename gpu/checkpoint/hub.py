"""Fetching a repository of the Hugging Face hub. The hub's library is imported only when it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.checkpoint.errors import ModelError
from gpu.checkpoint.progress import Progress, no_progress

if TYPE_CHECKING:
    from tqdm import tqdm

_DESCRIPTION_FILES = ["*.json", "*.jinja"]
# A repository's folders hold other formats of the same model, except the folders of modules.json, whose names begin
# with a number. Mistral's "consolidated" files repeat its weights.
_IGNORED = ["[!0-9]*/*", "*/*.safetensors", "consolidated*"]


def fetch_from_hub(repo_id: str, revision: str | None, *, with_weights: bool, progress: Progress = no_progress) -> Path:
    """Download what is missing of a repository and return its directory in Hugging Face's cache.

    Only safetensors, JSON and Jinja files are fetched: pickled weights are never touched. Without a network an earlier
    download is used. Raises `ModelError`.
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
    except Exception as error:  # the hub's library lets through whatever its HTTP client of the day raises
        raise ModelError(
            f"The repository {repo_id} cannot be fetched from the hub and is not in the local cache "
            f"({type(error).__name__}). Check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give a local directory."
        ) from error
    return Path(directory)


def _reporting_to(progress: Progress) -> type[tqdm[Any]]:
    """A tqdm class that draws nothing and tells `progress` the bytes of its bars.

    The hub's library draws one bar for what came over the network and one for what lies on disk, where it fetches
    deduplicated chunks: the one that is ahead counts.
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

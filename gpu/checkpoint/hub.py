"""Models of a Hugging Face hub: which files of a repository are the model, and their download.

1. Downloads go to Hugging Face's own cache (HF_HOME), which other tools share. HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE
   are read by the hub's library, which also lists files and keeps the small ones.
2. Large files are fetched here, because the library neither resumes after a process was killed nor compares the bytes
   with the sha256 that the hub states (huggingface_hub#3643). A file gets its name after the comparison.
3. The library's lock of a file is held during its download, so no two processes of any program write it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from gpu.checkpoint.config import ModelError
from gpu.checkpoint.gguf_file import SPLIT_NAME
from gpu.checkpoint.model_files import Progress, no_progress

logger = logging.getLogger(__name__)

_DESCRIPTION_FILES = ["*.json", "*.jinja"]
# A repository's folders hold other formats of the same model, except the folders of modules.json, which begin
# with a number. Mistral's "consolidated" files repeat its weights.
_IGNORED = ["[!0-9]*/*", "*/*.safetensors", "consolidated*"]
_CONNECTIONS = 4
_CHUNK = 2**20  # bytes
_MOST_AT_ONCE = 2**34  # bytes per request: content delivery networks refuse more than 50 GB
_TRIES = 5  # requests in a row that return no byte
_FIRST_PAUSE = 0.5  # seconds, doubled with each try
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TRANSIENT = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class HubFile:
    path: str  # in the repository
    size: int
    sha256: str | None = None  # only large files have one

    @classmethod
    def of(cls, listed: Any) -> HubFile:
        """Return a file of the hub's list. The sha256, which becomes a file's name, is checked."""
        sha256 = listed.lfs.sha256 if listed.lfs else ""
        return cls(listed.path, listed.size, sha256 if _SHA256.fullmatch(sha256) else None)


def fetch_from_hub(
    repo: str, tag: str | None, revision: str | None, *, with_weights: bool = True, progress: Progress = no_progress
) -> tuple[Path, str]:
    """Download a model's missing files. Return its GGUF file or directory, and its name for clients.

    `tag` is a quantization or the path of a GGUF file; without it, safetensors are preferred. Pickled weights are never
    fetched. Without a network an earlier download is used. Raises `ModelError`.
    """
    try:
        listed = _Repository.ask(repo, revision)
        ggufs = gguf_models(listed.files)
        has_safetensors = any("/" not in file.path and file.path.endswith(".safetensors") for file in listed.files)
        if tag is None and not ggufs and all(file.path != "config.json" for file in listed.files):
            raise ModelError(
                f"The repository {repo} has no model that can be served: neither a config.json with *.safetensors nor "
                f"a GGUF file with all its parts. It has {len(listed.files)} files."
            )
        if tag is None and (has_safetensors or not ggufs):
            return listed.fetch(_directory_files(listed.files, with_weights=with_weights), progress), repo
        chosen = choose_gguf(ggufs, tag, repo)
        logger.info("%s: the file is %s", repo, chosen.files[0].path)
        path = listed.fetch(chosen.files, progress) / chosen.files[0].path
        return path, f"{repo}:{chosen.tag}" if chosen.tag else repo
    except ModelError:
        raise
    except Exception as error:  # the hub's library passes on any error of its HTTP client
        raise ModelError(_in_words(error, repo, revision)) from error


def _directory_files(files: Sequence[HubFile], *, with_weights: bool) -> list[HubFile]:
    from huggingface_hub.utils import filter_repo_objects

    allowed = [*_DESCRIPTION_FILES, *(["*.safetensors"] if with_weights else [])]
    named = filter_repo_objects(files, allow_patterns=allowed, ignore_patterns=_IGNORED, key=lambda file: file.path)
    return list(named)


def _in_words(error: Exception, repo: str, revision: str | None) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"The repository {repo} is gated: accept its terms on its page, then set HF_TOKEN to a token of yours."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"There is no directory {repo} here and no such repository on the hub (or it is private and HF_TOKEN is "
            f"not set). A repository that works is 'Qwen/Qwen3-0.6B'."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"The repository {repo} has no revision {revision!r}; leave '@...' out for the newest."
    if isinstance(error, errors.HfHubHTTPError):
        code = error.response.status_code
        hint = "HF_TOKEN is missing, wrong, or may not read it." if code in (401, 403) else "Try again later."
        return f"The hub answers {code} for the repository {repo}. {hint}"
    if isinstance(error, OSError) and error.errno is not None:
        return f"The files of {repo} cannot be kept: {error}. Free disk space, or set HF_HOME to a writable folder."
    return (
        f"The repository {repo} cannot be fetched from the hub and is not in the local cache "
        f"({type(error).__name__}). Check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give a local directory."
    )


# --------------------------------------------------------------------------------------------------------------- choice
# Which GGUF file of a repository is the model.


_TAG = re.compile(r"(?<![A-Z0-9])(UD-)?((?:I?Q|TQ|MXFP|NVFP)\d\w*|(?:BF|F|FP)(?:16|32))(?![A-Z0-9])")
_NO_MODEL = re.compile("mmproj|imatrix", re.IGNORECASE)
_DYNAMIC = "UD-"


@dataclass(frozen=True)
class GGUFModel:
    """A GGUF file of a repository with its parts."""

    tag: str  # in capital letters, such as "Q4_K_M" or "UD-Q4_K_XL"; empty if its name has none
    files: tuple[HubFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def __str__(self) -> str:
        parts = f", {len(self.files)} parts" if len(self.files) > 1 else ""
        return f"{self.files[0].path} ({self.size / 1e9:.2f} GB{parts})"


def gguf_models(files: Iterable[HubFile]) -> list[GGUFModel]:
    """Return the GGUF models among a repository's files, except split models that lack a part."""
    found: dict[str, list[HubFile]] = {}
    for file in sorted(files, key=lambda file: file.path):
        if file.path.lower().endswith(".gguf") and not _NO_MODEL.search(PurePosixPath(file.path).name):
            split = SPLIT_NAME.fullmatch(file.path)
            found.setdefault(f"{split['stem']} {split['count']}" if split else file.path, []).append(file)
    models = []
    for parts in found.values():
        split = SPLIT_NAME.fullmatch(parts[0].path)
        if split is None or len(parts) == int(split["count"]):
            tags = _TAG.findall((split["stem"] if split else parts[0].path[:-5]).upper())
            models.append(GGUFModel("".join(tags[-1]) if tags else "", tuple(parts)))
    return models


def choose_gguf(models: Sequence[GGUFModel], tag: str | None, repo: str) -> GGUFModel:
    """Return the model of a quantization, or of a file's path. Raises `ModelError` with the list if there is no such
    model, or more than one.

    A tag selects the model with exactly this tag, else the only model with a tag that begins with it. Without a tag:
    Q4_K_M, then the largest Q4, then Q8_0, then the only model. Tags that begin with UD- are considered only if named,
    or if the repository has no others.
    """
    plain = [model for model in models if not model.tag.startswith(_DYNAMIC)]
    if tag is not None and tag.lower().endswith(".gguf"):
        end = f"/{tag}".lower()
        found = [[model for model in models if any(file.path == tag for file in model.files)]]
        found += [[model for model in models if any(f"/{file.path}".lower().endswith(end) for file in model.files)]]
    elif tag is not None:
        wanted = tag.upper()
        found = [[model for model in models if model.tag == wanted]]
        found += [[model for model in plain if model.tag.startswith(wanted)]]
        found += [[model for model in models if model.tag.startswith((wanted, _DYNAMIC + wanted))]]
    else:
        pool = [(model.tag.removeprefix(_DYNAMIC), model) for model in plain or models]
        largest = max((model.size for name, model in pool if name.startswith("Q4")), default=0)
        found = [[model for name, model in pool if name == "Q4_K_M"]]
        found += [[model for name, model in pool if name.startswith("Q4") and model.size == largest]]
        found += [[model for name, model in pool if name == "Q8_0"], [model for _, model in pool]]
    left = next(filter(None, found), [])
    if len(left) == 1:
        return left[0]
    works, named = left or models, f" for {tag!r}" if tag else ""
    hint = f" Name one, for example {repo}:{works[0].files[0].path}." if works else ""
    raise ModelError(
        f"The repository {repo} has {'more than one' if left else 'no'} GGUF file{named}. It has: "
        f"{', '.join(map(str, works)) or 'none'}.{hint}"
    )


# ------------------------------------------------------------------------------------------------------------- download


def cache_folder(repo: str) -> Path:
    """Return the folder of a repository in Hugging Face's cache; for a pattern, the pattern of all folders that fit."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def cached_repositories() -> Iterator[tuple[_Repository, str, int]]:
    """Yield every cached commit, its revision's name, and, once for each repository, the bytes of partial files."""
    pattern = cache_folder("*")
    for folder in sorted(pattern.parent.glob(pattern.name)):
        named = [path for path in (folder / "refs").rglob("*") if path.is_file()]
        refs = {path.read_text(): str(path.relative_to(folder / "refs")) for path in named}
        partial = sum(path.stat().st_size for path in (folder / "blobs").glob("*.incomplete"))
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        for snapshot in sorted((folder / "snapshots").glob("*")) or [folder / "none"]:
            yield _Repository.in_cache(repo, snapshot.name), refs.get(snapshot.name, snapshot.name), partial
            partial = 0


class _Stopped(Exception):
    """Another download of the same model failed."""


@dataclass
class _Repository:
    """The files of one commit of a repository."""

    name: str
    commit: str
    files: list[HubFile]
    is_cached: bool = False  # the files are those in the cache

    @classmethod
    def ask(cls, repo: str, revision: str | None) -> _Repository:
        """List a repository's files on the hub, or in the cache if the hub cannot be reached."""
        from huggingface_hub import HfApi, errors
        from huggingface_hub.hf_api import RepoFile

        api = HfApi()
        try:
            api.repo_info(repo, revision=revision)  # fails at once where the next two would try for half a minute
            commit = api.resolve_revision(repo, revision=revision).resolved
            tree = api.list_repo_tree(repo, recursive=True, revision=commit)
            return cls(repo, commit, [HubFile.of(each) for each in tree if isinstance(each, RepoFile)])
        except errors.RevisionNotFoundError:
            raise
        except Exception as error:  # the hub's library passes on any error of its HTTP client
            with suppress(errors.RevisionResolutionError):
                commit = api.resolve_revision(repo, revision=revision, local_files_only=True).resolved
                if (cached := cls.in_cache(repo, commit)).files:
                    kind = type(error).__name__
                    logger.warning("The hub cannot be reached for %s (%s): its files in the cache are used", repo, kind)
                    return cached
            raise

    @classmethod
    def in_cache(cls, repo: str, commit: str) -> _Repository:
        """Return the files that are in the cache."""
        found = cls(repo, commit, [], is_cached=True)
        for path in filter(Path.is_file, found.folder.rglob("*")):
            found.files.append(HubFile(path.relative_to(found.folder).as_posix(), path.stat().st_size))
        return found

    @property
    def folder(self) -> Path:
        return cache_folder(self.name) / "snapshots" / self.commit

    def fetch(self, files: Sequence[HubFile], progress: Progress) -> Path:
        """Download the missing files, and return the directory that holds all files by their paths."""
        from huggingface_hub import snapshot_download
        from tqdm.auto import tqdm

        class Silent(tqdm):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **{**kwargs, "disable": True})

        blobs = cache_folder(self.name) / "blobs"
        missing = {file.sha256: file for file in files if file.sha256 and not (blobs / file.sha256).exists()}
        if missing:
            _Download(self, blobs, missing, progress).run()
        folder = snapshot_download(  # fetches the small files, and links all files by their names
            self.name,
            revision=self.commit,
            allow_patterns=[escape(each.path) for each in files],
            local_files_only=self.is_cached,
            tqdm_class=Silent,
        )
        return Path(folder)


class _Download:
    """The download of large files, over several connections."""

    def __init__(self, repository: _Repository, blobs: Path, files: Mapping[str, HubFile], progress: Progress) -> None:
        self._repository = repository
        self._blobs = blobs
        self._files = files
        self._progress = progress
        self._lock = threading.Lock()  # guards `_done`
        self._done = 0  # bytes
        self._total = sum(file.size for file in files.values())
        self._stopped = threading.Event()

    def run(self) -> None:
        """Fetch all files. Raises `ModelError`, OSError, or what the hub's library raises."""
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._check_space()
        self._advance(0)
        pool = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="download")
        try:
            for future in as_completed([pool.submit(self._fetch, *entry) for entry in self._files.items()]):
                future.result()
        finally:
            self._stopped.set()
            pool.shutdown(cancel_futures=True)

    def _check_space(self) -> None:
        parts = sum(part.stat().st_size for part in map(self._part, self._files) if part.exists())
        needed, free = self._total - parts, shutil.disk_usage(self._blobs).free
        if needed > free:
            raise ModelError(
                f"{self._repository.name} needs {needed / 1e9:.2f} GB in {self._blobs}, which has {free / 1e9:.2f} GB "
                f"free. Free disk space, or set HF_HOME to a folder on another disk."
            )

    def _part(self, sha256: str) -> Path:
        return self._blobs / f"{sha256}.headrace.incomplete"

    def _advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._progress("Downloading the model", self._done, self._total)

    def _fetch(self, sha256: str, file: HubFile) -> None:
        part = self._part(sha256)
        with self._locked(sha256):
            if (self._blobs / sha256).exists():  # another process fetched it
                self._advance(file.size)
                return
            for _ in range(2):
                if (found := self._receive(file, part)) == sha256:
                    part.replace(self._blobs / sha256)
                    return
                part.unlink()
                self._advance(-file.size)
                logger.warning("%s was damaged in transfer: its sha256 is %s, not %s", file.path, found, sha256)
        raise ModelError(
            f"The hub states the sha256 {sha256} of {self._repository.name}/{file.path}, and sent other bytes twice. "
            f"Nothing was kept; check HF_ENDPOINT and proxies, or try again later."
        )

    @contextmanager
    def _locked(self, sha256: str) -> Iterator[None]:
        """Hold the lock under which the hub's library writes this file, too."""
        from huggingface_hub.utils import WeakFileLock

        folder = self._blobs.parents[1] / ".locks" / self._blobs.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(WeakFileLock(folder / f"{sha256}.lock", timeout=1))
                    break
                except TimeoutError:
                    if self._stopped.is_set():
                        raise _Stopped from None
                    self._progress("Waiting for another process that downloads the model", 0, None)
            yield

    def _receive(self, file: HubFile, part: Path) -> str:
        """Append the missing bytes to a file's partial download, and return the sha256 of the whole file."""
        digest = hashlib.sha256()
        with part.open("ab+") as sink:
            sink.seek(0)
            while chunk := sink.read(_CHUNK):
                digest.update(chunk)
                self._advance(len(chunk))
            failures = 0
            while (begin := sink.tell()) < file.size:
                error = self._request(file, sink, digest)
                failures = 0 if sink.tell() > begin else failures + 1
                if failures == _TRIES:
                    raise error or TimeoutError(f"no bytes of {file.path} were received")
                if error is not None and self._stopped.wait(_FIRST_PAUSE * 2**failures):
                    raise _Stopped
            os.fsync(sink.fileno())
        return digest.hexdigest()

    def _request(self, file: HubFile, sink: BinaryIO, digest: Any) -> Exception | None:
        """Append the bytes that one request returns. Return its error if a retry may succeed."""
        from huggingface_hub import errors, hf_hub_url
        from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        begin = sink.tell()
        end = min(file.size, begin + _MOST_AT_ONCE)
        headers = build_hf_headers() | {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        url = hf_hub_url(self._repository.name, file.path, revision=self._repository.commit)
        try:
            with get_session().stream("GET", url, headers=headers, timeout=HF_HUB_DOWNLOAD_TIMEOUT) as response:
                hf_raise_for_status(response)
                known = 0 if response.status_code == 206 else begin  # some servers send a file from its beginning
                for chunk in response.iter_raw():
                    if self._stopped.is_set():
                        raise _Stopped
                    new = chunk[known:][: file.size - sink.tell()]
                    known = max(0, known - len(chunk))
                    sink.write(new)
                    digest.update(new)
                    self._advance(len(new))
        except errors.HfHubHTTPError as error:
            if error.response.status_code not in _TRANSIENT:
                raise
            return error
        except (OSError, _Stopped):  # the disk is full
            raise
        except Exception as error:  # the HTTP client's: the connection broke, or a read took too long
            return error
        return None

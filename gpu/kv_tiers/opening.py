"""Open a tier from settings and a loaded model, or log why there is none.

A chunk's namespace identifies the model: every byte of the weights' files, the configuration, the library or torch
build that computes, the form of the weights, and a block's layout in memory. If one differs, no chunk is found.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import ConfigError
from gpu.checkpoint import ModelFiles
from gpu.checkpoint.gguf_file import GGUFFile, file_state
from gpu.checkpoint.model_files import model_digest, weight_paths
from gpu.cpu.library import load_library
from gpu.host import available_memory, processor_flags
from gpu.kv_cache import check_memory, size_text
from gpu.kv_tiers.chunks import HEADER_BYTES, Checksum, HostMemory, KVMemory, Signer, TorchMemory, read_key
from gpu.kv_tiers.stores import DiskStore, RamStore
from gpu.kv_tiers.tier import CHUNK_BYTES, BlockStore, KVTier

if TYPE_CHECKING:
    from gpu.runner.runner import WorkerOptions

logger = logging.getLogger(__name__)

_READ_BYTES = 2**20


def check_tiers(options: WorkerOptions, device: str) -> None:
    """Raise ConfigError for a tier that cannot save anything, or that is larger than the free memory."""
    if options.kv_cache_ram and device == "cpu":
        raise ConfigError(
            "kv_cache_ram",
            size_text(options.kv_cache_ram),
            allowed="it is for devices with memory of their own, and the CPU computes in the host's",
            hint="Leave it out, and set kv_cache_memory to make the KV cache itself larger",
        )
    check_memory(options.kv_cache_ram, available_memory(), "kv_cache_ram", "in the host's memory")


def digest_of_weights(files: ModelFiles) -> Callable[[], bytes]:
    """Begin to read every byte of the weights' files on a thread, at some GB per second. Call it before loading the
    weights.

    Return a function that waits for the digest. Call that when the weights are loaded: it raises OSError if a file was
    replaced or written to in between, so that the loaded weights may differ from the digest's.
    """
    paths = weight_paths(files)
    opened = files.tensors.states if isinstance(files.tensors, GGUFFile) else [file_state(p.stat()) for p in paths]
    pool = ThreadPoolExecutor(1, thread_name_prefix="weights-digest")
    future = pool.submit(lambda: Checksum(b"weights", _READ_BYTES).of_files(paths) + model_digest(files))
    pool.shutdown(wait=False)

    def wait() -> bytes:
        found = future.result()
        if [file_state(path.stat()) for path in paths] != opened:
            raise OSError("the model's files were changed while it was loaded; restart to store KV blocks")
        return found

    return wait


def open_tier(
    caches: Sequence[Any],
    num_groups: int,
    files: ModelFiles,
    options: WorkerOptions,
    compute_form: str,
    digest: Callable[[], bytes] | None,
) -> KVTier | None:
    """Return the tier that the options ask for; None if its directory cannot be used now, which is logged.

    An entry of a block table has a block for each of `num_groups` groups, all in the same `caches`. Raises ConfigError
    for a tier that can never be used.
    """
    memory: KVMemory = HostMemory(caches) if isinstance(caches[0], np.ndarray) else TorchMemory(caches)
    blocks_per_chunk = max(1, CHUNK_BYTES // (num_groups * memory.block_bytes))
    payload_bytes = blocks_per_chunk * num_groups * memory.block_bytes
    directory, key = options.kv_cache_dir, os.urandom(32)
    if directory is not None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            key = read_key(directory / "key")
        except (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
            hint = "Name a directory that this user may create and write to, or leave it out"
            raise ConfigError("kv_cache_dir", directory, allowed=f"it cannot be used ({error})", hint=hint) from None
        except OSError as error:
            logger.warning("no KV blocks are stored in %s: %s", directory, error)
            directory = None
    if directory is None and not options.kv_cache_ram:
        return None
    least = payload_bytes + HEADER_BYTES
    for setting, is_used in (("kv_cache_ram", options.kv_cache_ram), ("kv_cache_dir_size", directory)):
        if is_used and (limit := getattr(options, setting)) < least:
            tokens = blocks_per_chunk * options.block_size
            allowed = f"it must be at least {-(-least // 2**20)}MiB, which hold {tokens} tokens"
            raise ConfigError(setting, size_text(limit), allowed=allowed, hint="A smaller block_size needs less")
    layout = (num_groups, blocks_per_chunk, options.block_size, [(each.shape[1:], str(each.dtype)) for each in caches])
    form = repr((version("headrace"), compute_form, options.dtype, options.quantization, layout, _computed_by()))

    def open_stores() -> list[BlockStore]:
        stores: list[BlockStore] = []
        if options.kv_cache_ram:
            stores.append(RamStore(options.kv_cache_ram))
        if directory is not None:
            weights = b"" if digest is None else digest()
            namespace = blake2b(weights + form.encode(), key=key, digest_size=16).digest()
            signer = Signer(key, namespace, payload_bytes)
            stores.append(DiskStore(directory, signer, options.kv_cache_dir_size, key=key))
            logger.info(
                "KV blocks are stored in %s: %d MiB of %d MiB are used, in chunks of %d tokens",
                directory,
                stores[-1].num_bytes // 2**20,
                options.kv_cache_dir_size // 2**20,
                blocks_per_chunk * options.block_size,
            )
        return stores

    hash_key = blake2b(key, person=b"hashes", digest_size=32).digest()
    return KVTier(memory, hash_key, blocks_per_chunk, payload_bytes, open_stores)


def _computed_by() -> tuple[str, ...]:
    """Return the builds of library and torch, and the processor features they use: others may round differently."""
    library = load_library()
    found = [] if library is None else [blake2b(library.path.read_bytes(), digest_size=16).hexdigest()]
    if (torch := sys.modules.get("torch")) is not None:
        found += [torch.__version__, torch.backends.cpu.get_cpu_capability(), *sorted(processor_flags())]
        found += [os.environ.get(name, "") for name in ("MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")]
        if torch.cuda.is_available():
            found.append(torch.cuda.get_device_name())
    return tuple(found)

"""The way of a step's tokens back to the host. Used by the runner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages import TokenLogprobs
from engine.scheduler.plan import ModelRunnerOutput
from gpu.device.sampling import SamplingFeatures, logprob_entries
from gpu.device.upload import host_tensor
from gpu.kernels import LogprobTensors
from gpu.rows import StepShape
from gpu.sampling import NamedTokens


@dataclass
class DeviceStep:
    """The handle of a step that has been started, `engine.core.executor.StepHandle`."""

    shape: StepShape
    features: SamplingFeatures
    packed: torch.Tensor  # int32 [S], as of `record_step`: host memory that is being written
    logprobs: LogprobTensors | None  # likewise, of those that ask
    every: torch.Tensor | None  # likewise, float32 [A, vocab], of those that ask for all
    named_tokens: NamedTokens
    sums: torch.Tensor | None  # likewise, float32 [T], of the states, where not all tokens are sampled from
    copied: torch.cuda.Event | None = None  # None where nothing has to be waited for
    prompt_outputs: ModelRunnerOutput | None = None  # what prompts gave, if anybody asked

    def result(self) -> ModelRunnerOutput:
        if self.copied is not None:
            self.copied.synchronize()
        packed = self.packed.numpy()
        finite = packed >= 0
        token_ids = np.where(finite, packed, -1 - packed).astype(np.int64)
        states_finite = None if self.sums is None else np.isfinite(self.sums.numpy())
        output = self.shape.output(token_ids, finite, self._logprobs(token_ids), states_finite)
        if self.prompt_outputs is not None:
            output.prompt_logprobs = self.prompt_outputs.prompt_logprobs
            output.embeddings = self.prompt_outputs.embeddings
        return output

    def _logprobs(self, token_ids: NDArray[np.int64]) -> dict[int, TokenLogprobs]:
        if self.logprobs is None:
            return {}
        asking = self.features.asking.tolist()
        entries = logprob_entries(token_ids[asking], self.logprobs, self.features.num_logprobs.tolist())
        found = dict(zip(asking, entries, strict=True))
        if self.every is not None:
            rows_of = self.shape.sampling_rows
            for values, i in zip(self.every.numpy(), self.features.asking_all.tolist(), strict=True):
                sample = asking[i]
                found[sample].every = values.tobytes()
                found[sample] = self.named_tokens.told(int(rows_of[sample]), found[sample])
        return found


def start_download(
    shape: StepShape,
    features: SamplingFeatures,
    packed: torch.Tensor,
    logprobs: LogprobTensors | None,
    every: torch.Tensor | None,
    named_tokens: NamedTokens,
    sums: torch.Tensor | None,
) -> DeviceStep:
    """Start copying what a step gives."""
    copies = None if logprobs is None else LogprobTensors(*(_to_host(tensor) for tensor in logprobs))
    all_of_some, sums = (None if tensor is None else _to_host(tensor) for tensor in (every, sums))
    step = DeviceStep(shape, features, _to_host(packed), copies, all_of_some, named_tokens, sums)
    if packed.is_cuda:
        step.copied = torch.cuda.Event()
        step.copied.record()
    return step


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    # Copied on a CPU too: the next step writes to the same tensor.
    host = host_tensor(tuple(tensor.shape), tensor.dtype, tensor.device)
    return host.copy_(tensor, non_blocking=True)

"""The way of a step's tokens back to the host. Used by the runner."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages import TokenLogprobs
from engine.scheduler.plan import ModelRunnerOutput
from gpu.device.rows import StepShape
from gpu.device.sampling import SamplingFeatures
from gpu.device.upload import host_tensor
from gpu.kernels import LogprobTensors


def pack(token_ids: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """Tokens and whether they mean anything as one int32 [S]: -1 - token for one that does not."""
    return torch.where(finite, token_ids, -1 - token_ids).int()


@dataclass(frozen=True, kw_only=True)
class Extras:
    """What few steps bring besides tokens."""

    asking: NDArray[np.int64]  # places among the rows that sample
    num_logprobs: NDArray[np.int64]  # as many of the most likely tokens as each of them wants
    tensors: LogprobTensors


@dataclass
class DeviceStep:
    """The handle of a step that has been started, `engine.core.executor.StepHandle`."""

    plan_size: int
    shape: StepShape | None  # None: a plan without requests
    packed: torch.Tensor | None = None  # [S], host memory that is being written
    extras: Extras | None = None
    prompt_outputs: ModelRunnerOutput | None = None  # what prompts gave, if anybody asked
    copied: torch.cuda.Event | None = field(default=None)  # None where nothing has to be waited for

    def result(self) -> ModelRunnerOutput:
        if self.shape is None or self.packed is None:
            return ModelRunnerOutput(sampled_token_ids=[], logprobs={})
        if self.copied is not None:
            self.copied.synchronize()
        places = self.shape.order[self.shape.samples]
        packed = self.packed.numpy()
        finite = packed >= 0
        token_ids: list[list[int]] = [[] for _ in range(self.plan_size)]
        for place, token_id in zip(places.tolist(), np.where(finite, packed, -1 - packed).tolist(), strict=True):
            token_ids[place].append(token_id)
        output = ModelRunnerOutput(
            sampled_token_ids=token_ids,
            logprobs=self._logprobs(places, token_ids),
            not_finite=places[~finite].tolist(),
        )
        if self.prompt_outputs is not None:
            output.prompt_logprobs = self.prompt_outputs.prompt_logprobs
            output.embeddings = self.prompt_outputs.embeddings
        return output

    def _logprobs(self, places: NDArray[np.int64], token_ids: list[list[int]]) -> dict[int, list[TokenLogprobs]]:
        if self.extras is None:
            return {}
        indices = places[self.extras.asking]
        chosen, ranks, top_ids, top = (tensor.tolist() for tensor in self.extras.tensors)
        return {
            index: [
                TokenLogprobs(
                    token_ids[index][0],
                    chosen[row],
                    ranks[row],
                    list(zip(top_ids[row][:count], top[row][:count], strict=True)),
                )
            ]
            for row, (index, count) in enumerate(zip(indices.tolist(), self.extras.num_logprobs.tolist(), strict=True))
        }


def start_download(
    plan_size: int,
    shape: StepShape,
    packed: torch.Tensor,
    features: SamplingFeatures,
    num_logprobs: NDArray[np.int64],
    logprobs: LogprobTensors | None,
) -> DeviceStep:
    """Start copying what a step gives. `num_logprobs` is [S]."""
    extras = None
    if logprobs is not None:
        tensors = LogprobTensors(*(_to_host(tensor) for tensor in logprobs))
        extras = Extras(asking=features.asking, num_logprobs=num_logprobs[features.asking], tensors=tensors)
    step = DeviceStep(plan_size, shape, _to_host(packed), extras)
    if packed.is_cuda:
        step.copied = torch.cuda.Event()
        step.copied.record()
    return step


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    # Copied on a CPU too: the next step writes to the same tensor.
    host = host_tensor(tuple(tensor.shape), tensor.dtype, tensor.device)
    return host.copy_(tensor, non_blocking=True)

"""`DeviceRunner`: one plan in, one started step, and the download of its tokens.

Made by the worker and used by its thread alone. It does not wait: `submit` returns when the step has been started, and
the next may be submitted before it has ended; the device runs them one after the other, on one stream.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.executor import StepHandle
from engine.messages import TokenLogprobs
from engine.plan import ModelRunnerOutput, SchedulerOutput
from gpu.device.graphs import LARGEST, CudaGraphs, Graphs, Kind, StepGraphs, agreed
from gpu.device.inputs import (
    DeviceHiddenStates,
    DeviceInputs,
    DeviceSampler,
    SamplingFeatures,
    logprob_entries,
    model_inputs,
    samples_of,
)
from gpu.device.tables import DeviceRows, DeviceTables, Upload, host_tensor
from gpu.kernels import LogprobTensors, record_step
from gpu.models.decoder import CausalLM
from gpu.models.torch_model import TorchModel
from gpu.runner.prompt_outputs import PromptOutputs
from gpu.runner.rows import BatchSizes, RowTable, StepShape
from gpu.runner.runner import FinishedStep, cancellation_check
from gpu.sampling.sampler import NamedTokens

logger = logging.getLogger(__name__)

# A busy runner captures a graph that it lacks once in this many steps, so that streams are rarely delayed.
STEPS_BETWEEN_CAPTURES = 32


class DeviceRunner:
    """A `gpu.runner.runner.Runner` that starts steps on the device and does not wait for them.

    `graphs` makes graphs of steps and needs an attention backend that takes padding (`TritonAttention`); without it
    every step runs eagerly, on any backend.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_caches: list[torch.Tensor],
        sizes: BatchSizes,
        device: torch.device,
        *,
        vocab_size: int,
        max_num_batched_tokens: int = LARGEST,
        graphs: Graphs | None = None,
    ) -> None:
        self._model = model
        self.kv_caches = kv_caches
        self._tables = DeviceTables(sizes, vocab_size, device)
        self._upload = Upload(self._tables.buffer)
        self.rows = RowTable(sizes)
        self._device_rows = DeviceRows(self.rows, self._tables, self._upload)
        self._sampler = DeviceSampler(self._tables, self.rows, model.compute_logits)
        self._prompt_outputs = PromptOutputs(sizes.max_num_seqs)
        # The outputs of graphs.
        self._packed = torch.zeros(sizes.max_num_seqs, dtype=torch.int32, device=device)
        self._hidden: torch.Tensor | None = None
        self._graphs: StepGraphs | None = None
        if graphs is not None:
            self._graphs = StepGraphs(graphs, sizes.max_num_seqs, max_num_batched_tokens, self._run)
        self._max_num_seqs = sizes.max_num_seqs
        self._steps_until_capture = STEPS_BETWEEN_CAPTURES

    @property
    def num_missing_graphs(self) -> int:
        return 0 if self._graphs is None else self._graphs.num_missing

    @torch.inference_mode()
    def submit(self, plan: SchedulerOutput, abandoned: Callable[[], bool] | None = None) -> StepHandle:
        self._capture_in_passing()
        try:
            self.rows.apply(plan, self._device_rows)
            self._prompt_outputs.apply(plan)
            if not plan.request_ids:
                return FinishedStep(ModelRunnerOutput(sampled_token_ids=[], logprobs={}))
            shape = self.rows.shape(plan)
            step = self._start(plan, shape, abandoned)
        except BaseException:
            with suppress(Exception):  # the row table has these diffs, so the device needs them
                self._upload.send()
            self._upload.discard()
            self._device_rows.forget_sent()
            raise
        self.rows.advance(shape)
        return step

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Capture one graph, if any is missing. Return True if more are missing."""
        if self._graphs is None or not self.num_missing_graphs:
            return False
        # A capture runs the step once, and must change no request.
        self._device_rows.send_nobody()
        self._upload.send()
        try:
            self._graphs.capture_next()
        except Exception:  # graphs only save time: without them, steps run eagerly
            message = "CUDA graph capture failed; %d graphs missing, those steps run eagerly"
            logger.warning(message, self._graphs.num_missing, exc_info=True)
            self._graphs.give_up()
        return self._graphs.num_missing > 0

    def _capture_in_passing(self) -> None:
        self._steps_until_capture -= 1
        if not self._steps_until_capture:
            self._steps_until_capture = STEPS_BETWEEN_CAPTURES
            self.prepare()

    def _start(self, plan: SchedulerOutput, shape: StepShape, abandoned: Callable[[], bool] | None) -> DeviceStep:
        features = self._sampler.features(plan, shape)
        wants_prompts = self._prompt_outputs.is_asked
        is_plain = shape.is_decode and features.are_none and not wants_prompts
        graph = self._graphs.find("step", len(shape.rows)) if is_plain and self._graphs is not None else None
        self._device_rows.send_shape(shape, None if graph is None else graph[0])
        self._upload.send()

        logprobs = every = sums = None
        prompt_outputs = None
        if graph is not None:
            graph[1]()
        else:
            hidden = self._hidden_states(shape, cancellation_check(abandoned))
            if not shape.is_decode:
                num_tokens = int(shape.query_start_loc[-1])
                sums = hidden[:num_tokens].sum(-1, dtype=torch.float32)  # finite where the state is
            if wants_prompts:
                # Few requests want prompt outputs. The host reads them now, which waits for this step.
                prompt_outputs = ModelRunnerOutput(sampled_token_ids=[], logprobs={})
                states = DeviceHiddenStates(hidden, self._model.compute_logits)
                self._prompt_outputs.add_to(prompt_outputs, plan, shape, states)
            samples = samples_of(self._tables, len(shape.samples), all_decode=False)
            token_ids, finite, logprobs, every = self._sampler.sample(hidden, samples, features)
            record_step(self._tables, len(shape.rows), token_ids, finite, self._packed)
        packed = self._packed[: len(shape.samples)]
        step = start_download(shape, features, packed, logprobs, every, self.rows.named_tokens, sums)
        step.prompt_outputs = prompt_outputs
        return step

    def _hidden_states(self, shape: StepShape, check: Callable[[], None] | None) -> torch.Tensor:
        """Compute the hidden states of the step that was sent, by a graph if one has this many tokens."""
        num_tokens = int(shape.query_start_loc[-1])
        graph = None if self._graphs is None else self._graphs.find("hidden", num_tokens)
        if graph is None:
            return self._forward(model_inputs(self._tables, len(shape.rows), num_tokens, shape), check)
        if check is not None:
            check()
        graph[1]()
        assert self._hidden is not None
        return self._hidden

    def _run(self, kind: Kind, size: int) -> None:
        """Run what a graph of this kind and size contains."""
        if kind == "step":
            hidden = self._forward(model_inputs(self._tables, size, size, all_decode=True), None)
            token_ids, finite = self._sampler.sample_plainly(hidden, samples_of(self._tables, size, all_decode=True))
            record_step(self._tables, size, token_ids, finite, self._packed)
            return
        # No more requests than tokens: each has one at least.
        hidden = self._forward(model_inputs(self._tables, min(self._max_num_seqs, size), size), None)
        if self._hidden is None:  # the first is the largest
            self._hidden = torch.empty_like(hidden)
        self._hidden[:size].copy_(hidden)

    def _forward(self, inputs: DeviceInputs, check: Callable[[], None] | None) -> torch.Tensor:
        return self._model.forward(*inputs, self.kv_caches, check)


def make_device_runner(
    served: TorchModel, num_blocks: int, sizes: BatchSizes, max_num_batched_tokens: int, graphs: Graphs | None = None
) -> DeviceRunner:
    """Return a runner on the model's device, with a new KV cache. On a CUDA device, `graphs` None makes CUDA graphs."""
    model, device = served.model, served.device
    if graphs is None and device.type == "cuda":
        graphs = agreed(CudaGraphs(device), model.communicator, device)
    return DeviceRunner(
        model,
        model.allocate_kv_cache(num_blocks, served.kv_dtype, device),
        sizes,
        device,
        vocab_size=model.config.vocab_size,
        max_num_batched_tokens=max_num_batched_tokens,
        graphs=graphs,
    )


# ------------------------------------------------------------------------------------------------------------- download
# The way of a step's tokens back to the host. Used by the runner.


@dataclass
class DeviceStep:
    """An `engine.executor.StepHandle`: the handle of a step that has been started."""

    shape: StepShape
    features: SamplingFeatures
    packed: torch.Tensor  # int32 [S], from `record_step`: host memory that the device is writing
    logprobs: LogprobTensors | None  # likewise, for places that want them
    every: torch.Tensor | None  # likewise, float32 [A, vocab], for places that want every token's
    named_tokens: NamedTokens
    sums: torch.Tensor | None  # likewise, float32 [T], sums of hidden states; None if all tokens sample
    copied: torch.cuda.Event | None = None  # None: there is nothing to wait for
    prompt_outputs: ModelRunnerOutput | None = None  # if a request wants prompt outputs

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
                found[sample] = self.named_tokens.answer(int(rows_of[sample]), found[sample])
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
    """Start copying a step's results to the host."""
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

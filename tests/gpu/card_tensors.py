"""Tensors that behave as those of a CUDA device and lie on the CPU: what mixes both devices raises, as on a card, and
what is computed is right. Kernels of Triton do not run on them; torch computes instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map

CARD = torch.device("cuda:0")
_MOVES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class CardTensor(torch.Tensor):
    """A tensor of the device; `inner` is its memory. To torch's C++ it is a tensor on the meta device."""

    inner: torch.Tensor  # type: ignore[assignment]
    device = CARD
    is_cuda = True
    is_cpu = is_meta = False

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> CardTensor:
        with torch.inference_mode(inner.is_inference()):
            tensor = torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=torch.device("meta")
            )
        tensor.inner = inner
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = dict(kwargs or {})
        given = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        strangers = [each for each in given if not isinstance(each, CardTensor) and each.ndim]
        if strangers and function not in _MOVES:
            raise RuntimeError(f"{function} has tensors on {CARD} and on the CPU")
        device = kwargs.get("device")
        on_card = device is None or torch.device(device).type != "cpu"
        if function is torch.ops.aten.copy_.default:
            on_card = isinstance(args[0], CardTensor)
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        of = {id(each.inner): each for each in given if isinstance(each, CardTensor)}
        inner = tree_map(lambda each: each.inner if isinstance(each, CardTensor) else each, (args, kwargs))
        made = function(*inner[0], **inner[1])

        def outer(each: Any) -> Any:
            if not isinstance(each, torch.Tensor):
                return each
            if id(each) in of:
                return of[id(each)]
            if on_card:
                return CardTensor(each)
            return each.clone() if any(each is other for other in tree_iter(inner)) else each

        return tree_map(outer, made)


class _Card(TorchFunctionMode):
    """Makes tensors for the device where torch is asked for them."""

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], CardTensor):
            if function is torch.Tensor.tolist:
                return args[0].inner.tolist()
            if function is torch.Tensor.cpu:
                return args[0].inner.clone()
            if function is torch.Tensor.__setitem__ and not isinstance(args[2], torch.Tensor):
                args[0][args[1]].fill_(args[2])  # C++ would make a tensor on the meta device of it, without the number
                return None
        elif function is torch.Tensor.to and len(args) > 1 and args[1] == CARD:
            return CardTensor(args[0].to(*args[2:], **kwargs).clone())
        device = kwargs.get("device")
        has_card = any(isinstance(each, CardTensor) for each in tree_iter(args))
        if device is not None and torch.device(device) == CARD and not has_card:
            return CardTensor(function(*args, **kwargs | {"device": "cpu"}))
        return function(*args, **kwargs)


@contextmanager
def pretended_card() -> Iterator[None]:
    """Let this thread take `CARD` for a device, on which a `gpu.worker.Worker` can load a model."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("models.layers", "kernels.elementwise", "kernels.experts", "kernels.product"):
            patch.setattr(f"gpu.{module}.on_triton", lambda tensor: False)
        for name in ("gpu.executor.resolve_device", "gpu.worker.use_device"):
            patch.setattr(name, lambda device: str(CARD))
        for name in ("gpu.worker.free_memory", "gpu.model_loader.free_memory"):
            patch.setattr(name, lambda device: 2**30)
        patch.setattr("gpu.executor.device_name", lambda device: "no card")
        patch.setattr("gpu.model_loader.import_what_computes", lambda config, options: None)
        patch.setattr(
            "gpu.weights.tensors.to_device", lambda weights, device: ((name, each.to(CARD)) for name, each in weights)
        )
        for name in ("synchronize", "empty_cache"):
            patch.setattr(f"torch.cuda.{name}", lambda *given: None)
        with _Card():
            yield

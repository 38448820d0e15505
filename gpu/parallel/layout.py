"""How a model is divided among ranks: all that its layers know of that."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes of the groups, and which rank of the world this is.

    The layers of a model are divided among the stages of a pipeline, and each layer among the tensor ranks of its
    stage, which lie side by side. Raises ConfigError for sizes below 1.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False  # the tensor ranks of a stage have whole experts, and not a part of each
    rank: int = 0

    def __post_init__(self) -> None:
        for setting in ("tensor_parallel_size", "pipeline_parallel_size"):
            if (value := getattr(self, setting)) < 1:
                raise ConfigError(setting, value, allowed="it must be at least 1", hint=f"{setting}=1 works")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"there is no rank {self.rank} of {self.world_size}")

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tensor_parallel_size

    @property
    def pp_rank(self) -> int:
        return self.rank // self.tensor_parallel_size

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pipeline_parallel_size - 1

"""What the families with a mixture of experts have in common."""

from __future__ import annotations

from gpu.checkpoint.architecture import ClampedSwiGLUSpec, MoESpec, Part, Stack, SwiGLUSpec
from gpu.checkpoint.config import ModelConfig


def mixture_of_experts(
    config: ModelConfig,
    index: int,
    *,
    router: str,
    networks: tuple[str, str, str],
    inner: int,
    normalized: bool,
    bias: bool = False,
    stacks: tuple[Stack, Stack, Stack] | None = None,
    clamp: tuple[float, float] | None = None,
) -> MoESpec:
    """Of layer `index`. `router` and `networks` (gate, up, down) are names within it, the latter with the place of the
    expert's number; `stacks`, where there are some, of tensors within it. `clamp`: alpha and limit."""
    hidden, count = config.hidden_size, config.num_experts
    prefix = f"model.layers.{index}"
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    ggufs = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")

    def part(expert: int, place: int) -> Part:
        stack = stacks[place] if stacks else None
        return Part(
            f"{prefix}.{networks[place].format(expert)}",
            f"blk.{index}.{ggufs[place]}",
            shapes[place],
            bias=bias,
            expert=expert,
            stack=stack and Stack(f"{prefix}.{stack.name}", stack.start, stack.step),
        )

    def network(expert: int) -> SwiGLUSpec:
        gate, up, down = (part(expert, place) for place in range(3))
        return SwiGLUSpec(gate, up, down) if clamp is None else ClampedSwiGLUSpec(gate, up, down, *clamp)

    return MoESpec(
        router=Part(f"{prefix}.{router}", f"blk.{index}.ffn_gate_inp", (count, hidden), bias=bias),
        experts=tuple(map(network, range(count))),
        top_k=int(config.numbers["num_experts_per_tok"]),
        normalized=normalized,
    )

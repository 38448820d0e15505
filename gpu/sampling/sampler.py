"""The sampler: one step's logits in, one token per row out.

The model runner imports it. It promises that a row's token depends on nothing but that row's logits, parameters, seed
and position: every operation works through rows independently, and the randomness is counter-based (`noise`).

The order of operations is vLLM's, because clients tune their parameters to it:

0. tokens that the request's grammar does not allow get -inf, for whatever follows;
1. log-probabilities are taken from the raw logits; without a grammar, before tokens outside `allowed_token_ids` and in
   `bad_words` get -inf;
2. logit bias, and so much less for stop tokens that none comes while any other may, until min_tokens are there;
3. repetition, then frequency and presence penalties;
4. greedy rows: the largest logit, the lowest id where several are largest;
5. other rows: temperature, min-p, top-k, top-p, then the token at which the cumulative distribution, in order of token
   id, passes the row's one uniform number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.messages import TokenLogprobs
from engine.scheduler.plan import NewRequestData
from gpu.columns import Column, parameter
from gpu.sampling.greedy import largest
from gpu.sampling.logprobs import token_logprobs
from gpu.sampling.masks import apply_mask
from gpu.sampling.metadata import SamplingMetadata
from gpu.sampling.noise import uniform
from gpu.sampling.penalties import apply_penalties

if TYPE_CHECKING:
    from gpu.sampling.shards import Shards

# Below this a temperature is indistinguishable from greedy, but dividing by it could leave float32's range.
_MIN_TEMPERATURE = 1e-5


def _temperature(request: NewRequestData) -> float:
    params = request.sampling
    # With one token left to choose from there is nothing to draw: top_k 1 is greedy, also where logits tie.
    return 0.0 if params.greedy or params.top_k == 1 else max(params.temperature, _MIN_TEMPERATURE)


TEMPERATURE = Column("temperature", np.float32, 0.0, _temperature)  # 0 is greedy
FILTERS = (parameter("top_k", np.int64), parameter("top_p", np.float64), parameter("min_p", np.float64))


@dataclass(frozen=True, kw_only=True)
class SamplerOutput:
    """Parallel to the logits; S rows."""

    token_ids: NDArray[np.int64]  # [S], always a valid id
    # bool [S]. False where the logits hold NaN or +inf, or nothing but -inf: the token of that row means nothing.
    finite: NDArray[np.bool_]
    logprobs: dict[int, TokenLogprobs]  # by row, only for rows that asked


class Draw(Protocol):
    """How tokens are drawn: `gpu.cpu.sampling` has it by the library, `gpu.sampling.torch_draw` by torch."""

    def __call__(
        self, logits: NDArray[np.float32], *parameters: NDArray[Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """One token for each row of `logits`, [S, vocab], which are overwritten.

        The parameters are [S] each: temperature, top_k, top_p and min_p as their columns have them, and float64 numbers
        below 1, one for each draw. The filters are min-p first, then top-k, then top-p on what is left; what ties with
        the last one kept is kept.

        int64 [S], and bool [S], False where a row is no distribution and its token means nothing.
        """
        ...


def sample(
    logits: NDArray[np.float32], metadata: SamplingMetadata, draw: Draw, shards: Shards | None = None
) -> SamplerOutput:
    """Sample one token for each row of `logits` ([S, vocab], may be overwritten). With `shards` these are of a rank's
    own tokens, and all ranks sample together."""
    pick = largest
    if shards is not None:
        metadata = metadata.of_tokens(shards.first, shards.last)
        pick, draw = shards.largest, shards.draw
    greedy = metadata["temperature"] == 0.0
    num_logprobs = metadata["num_logprobs"]
    asking = np.flatnonzero(num_logprobs >= 0)
    raw_logits = logits[asking] if len(asking) else None
    if metadata.mask is not None:
        apply_mask(logits, metadata.mask)
        if raw_logits is not None:
            of_grammar = metadata["of_grammar"][asking]
            raw_logits[of_grammar] = logits[asking[of_grammar]]

    if (bias := metadata.bias) is not None:
        np.add.at(logits, (bias.rows, bias.token_ids), bias.values)  # a stop token may carry a bias too
    if metadata.penalties is not None:
        apply_penalties(logits, metadata.penalties)

    if greedy.all():
        token_ids, finite = pick(logits)
    elif not greedy.any():
        token_ids, finite = _drawn(logits, metadata, draw)
    else:
        token_ids = np.empty(len(greedy), dtype=np.int64)
        finite = np.empty(len(greedy), dtype=bool)
        chosen, drawn = np.flatnonzero(greedy), np.flatnonzero(~greedy)
        token_ids[chosen], finite[chosen] = pick(logits[chosen])
        token_ids[drawn], finite[drawn] = _drawn(logits[drawn], metadata.drawing(drawn), draw)

    logprobs: dict[int, TokenLogprobs] = {}
    if raw_logits is not None:
        if shards is not None:
            raw_logits = shards.whole(raw_logits)
        structs = token_logprobs(raw_logits, token_ids[asking], num_logprobs[asking])
        logprobs = dict(zip(asking.tolist(), structs, strict=True))
    return SamplerOutput(token_ids=token_ids, finite=finite, logprobs=logprobs)


def _drawn(
    logits: NDArray[np.float32], metadata: SamplingMetadata, draw: Draw
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    parameters = [metadata[column.name] for column in (TEMPERATURE, *FILTERS)]
    return draw(logits, *parameters, uniform(metadata["seed"], metadata.positions))

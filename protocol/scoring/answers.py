"""Logits to scores, the shapes of answers with scores, and their writers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from msgspec import UNSET, UnsetType

from engine.errors import InvalidRequest
from engine.messages import RequestOutput, TokenLogprobs
from protocol.answers import Answer, AnswerContext, encode
from protocol.openai.answers import PrefillAnswer
from protocol.openai.embeddings import EmbeddingBodyWriter, PrefillWriter
from protocol.scoring.requests import ClassifyRequest, PoolingRequest, RerankRequest, ScoreRequest, ScoringRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class LabelSet(NamedTuple):
    """The labels of the served model. A decoder has their tokens, and an instruction if its files have one."""

    names: tuple[str, ...]
    activation: Literal["sigmoid", "softmax", "identity"]
    token_ids: tuple[int, ...] = ()
    instruction: str | None = None

    def check_scores_pairs(self) -> None:
        """Raise `InvalidRequest` if a pair would have more than one score."""
        if len(self.names) > 2:
            raise InvalidRequest(
                f"The model has {len(self.names)} labels, so a pair has no single score. Use /v1/classify, or serve a "
                "model with one or two labels.",
                param="model",
            )

    def logits_of(self, embedding: bytes | None, logprobs: list[TokenLogprobs] | None) -> NDArray[np.float32] | None:
        """Return the logits in an output, one for each label. For a decoder they are log-probabilities."""
        import numpy as np  # here, because the server answers before it needs them

        if embedding is not None:
            return np.frombuffer(embedding, np.float32)
        if not logprobs or not self.token_ids:
            return None
        found = dict(logprobs[0].top)
        return np.array([found[token_id] for token_id in self.token_ids], np.float32)

    def probabilities(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the probability of each label, or the logits if the activation is identity. Shape: [..., labels]."""
        import numpy as np

        if self.activation == "identity":
            return logits
        if self.activation == "sigmoid":
            sure: NDArray[np.float32] = np.exp(-np.logaddexp(np.float32(0), -logits))
            return sure
        powers: NDArray[np.float32] = np.exp(logits - logits.max(axis=-1, keepdims=True))
        powers /= powers.sum(axis=-1, keepdims=True)
        return powers

    def scores(self, logits: NDArray[np.float32], *, raw: bool) -> NDArray[np.float32]:
        """Return one score for each row of logits [rows, labels]: the probability of the last label, or its logit.

        With two exclusive labels, the logit of the pair is the second logit minus the first.
        """
        is_choice = len(self.names) == 2 and self.activation != "sigmoid"
        logit = logits[:, 1] - logits[:, 0] if is_choice else logits[:, -1]
        if raw or self.activation == "identity":
            return logit
        return _SIGMOID.probabilities(logit)


_SIGMOID = LabelSet((), "sigmoid")


class RerankedText(Answer):
    text: str


class RerankedDocument(Answer):
    """`index` is the document's place in the request."""

    index: int
    relevance_score: float
    document: RerankedText | UnsetType = UNSET


class RerankMeta(Answer):
    """Fields that Cohere's clients read. Each request is billed as one search unit."""

    api_version: dict[str, str]
    billed_units: dict[str, int]


class Reranking(PrefillAnswer, kw_only=True):
    """The documents, most relevant first."""

    results: list[RerankedDocument]
    meta: RerankMeta


class Score(Answer, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float


class Classification(Answer):
    """The likeliest label, and the probabilities of all, in the order of the model's labels."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Pooled(Answer, kw_only=True):
    """`data` is one vector, or one for each token; or base64 of little-endian float32, row after row."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: list[Any] | str


class ScoreList(PrefillAnswer, kw_only=True):
    data: list[Score]


class ClassificationList(PrefillAnswer, kw_only=True):
    data: list[Classification]


class PooledList(PrefillAnswer, kw_only=True):
    data: list[Pooled]


# ------------------------------------------------------------------------------------------------------------- writers


R = TypeVar("R", bound=ScoringRequest)


class _ScoresWriter(PrefillWriter[R]):
    def __init__(self, request: R, labels: LabelSet, answer: AnswerContext) -> None:
        super().__init__(request, answer)
        self._labels = labels

    def _read(self, output: RequestOutput) -> NDArray[np.float32] | None:
        return self._labels.logits_of(output.embedding, output.logprobs)

    def _rows(self) -> NDArray[np.float32]:
        import numpy as np

        return np.stack(self._in_order())

    def _scores(self) -> list[float]:
        scores: list[float] = self._labels.scores(self._rows(), raw=self._request.raw_scores).tolist()
        return scores


class RerankWriter(_ScoresWriter[RerankRequest]):
    def body(self) -> bytes:
        """Return the response body: the `top_n` best documents. Equal scores keep the order of the request."""
        scores, texts = self._scores(), self._request.texts()
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._request.top_n or None]
        results = [
            RerankedDocument(i, scores[i], RerankedText(texts[i]) if self._request.return_documents else UNSET)
            for i in order
        ]
        meta = RerankMeta({"version": "2"}, {"search_units": 1})
        return encode(Reranking(results=results, meta=meta, **self._fields()))


class ScoreWriter(_ScoresWriter[ScoreRequest]):
    def body(self) -> bytes:
        data = [Score(index=index, score=score) for index, score in enumerate(self._scores())]
        return encode(ScoreList(data=data, **self._fields()))


class ClassificationWriter(_ScoresWriter[ClassifyRequest]):
    def body(self) -> bytes:
        rows, names = self._rows(), self._labels.names
        shown = rows if self._request.raw_scores else self._labels.probabilities(rows)
        likeliest = rows.argmax(axis=1).tolist()
        data = [
            Classification(index, names[best], probabilities, len(names))
            for index, (best, probabilities) in enumerate(zip(likeliest, shown.tolist(), strict=True))
        ]
        return encode(ClassificationList(data=data, **self._fields()))


class PoolingWriter(EmbeddingBodyWriter):
    _request: PoolingRequest

    def body(self) -> bytes:
        data = [Pooled(index=i, data=self._encoded(self._vectors(i, raw))) for i, raw in enumerate(self._in_order())]
        return encode(PooledList(data=data, **self._fields()))

    def _vectors(self, index: int, raw: bytes) -> NDArray[np.float32]:
        import numpy as np

        if self._request.task == "token_embed":
            size = len(raw) // len(self._answer.prompts[index])
            return np.stack([self._finished(raw[start : start + size]) for start in range(0, len(raw), size)])
        return self._finished(raw)

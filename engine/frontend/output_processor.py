"""The processing of the engine's outputs: text, stop strings, usage, and the figures of each request.

One OutputProcessor serves all requests of a front end, on the front end's thread, and fills their streams
(`engine.frontend.request_stream`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from engine.config import Clock
from engine.detokenizer import MarkedStopStrings, StopAutomaton, StopStrings, TokenDecoder, Vocabulary
from engine.errors import RequestFailed
from engine.frontend.request_stream import FAILURES, FinishedRequest, Observer, RequestStream
from engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EventKind,
    FinishReason,
    RequestEvent,
    RequestOutput,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)

# The maximum of log-probabilities that listeners get at one hand-over, at about two microseconds each. The others go to
# the readers, which are separate tasks.
LISTENED_LOGPROBS = 4096
MAX_EVENTS = 2048  # kept of one request; more than the chunks of a prompt of a hundred thousand tokens


class OutputProcessor:
    """All streams of a front end."""

    def __init__(self, vocabulary: Vocabulary, observer: Observer | None = None, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._vocabulary = vocabulary
        self._observer = observer or Observer()
        self._choices: dict[str, _Choice] = {}
        self._touched: dict[RequestStream, None] = {}  # streams with outputs that were not handed over yet, in order

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    def oldest_arrival(self) -> float | None:
        """Return the time when the oldest open request was sent to the engine; None if there is none."""
        first = next(iter(self._choices.values()), None)
        return None if first is None else first.stream.opened_time

    def open(
        self,
        requests: Sequence[EngineCoreRequest],
        children: Sequence[EngineCoreRequest],
        *,
        begins_message: bool = False,
    ) -> RequestStream:
        """Open the stream of one call: `requests` has one entry per prompt, `children` one per choice.

        With `begins_message` an answer begins a new text. Otherwise it continues the prompt's text: if a tokenizer
        strips the blank at the beginning of a text, the answer keeps it.
        """
        stream = RequestStream(requests, children, self._clock())
        n = len(children) // len(requests)
        stops = {stop: StopAutomaton(stop) for request in requests for stop in request.sampling.stop}
        for index, child in enumerate(children):
            sampling = child.sampling
            decoder = self._vocabulary.decoder(
                skip_special_tokens=sampling.skip_special_tokens,
                shown=sampling.shown_special_tokens,
                after=() if begins_message else child.prompt_token_ids,
            )
            self._choices[child.request_id] = _Choice(stream, index, child, decoder, stops, leads=index % n == 0)
        return stream

    def close(self, stream: RequestStream) -> list[str]:
        """Close a stream and report the request to the observer. Return the children that the engine has to abort."""
        unfinished = []
        for child_id in stream.child_ids:
            if (choice := self._choices.pop(child_id, None)) is not None:
                stream.longest_output = max(stream.longest_output, choice.num_output_tokens)
                unfinished.append(child_id)
        reason = stream.finish_reason
        if reason is None or (unfinished and reason not in FAILURES):
            reason = stream.leave_reason if stream.error is None else FinishReason.ERROR
        if stream.was_refused:
            reason = FinishReason.ABORT  # ERROR means errors of the server, which may alert operators
        if stream.first_token_time is None:
            self._observer.on_prompt(stream.num_prompt_tokens)
        self._observer.on_request_finished(self._finished(stream, reason))
        stream.finish_reason = reason
        stream.listen(None)  # breaks the cycle: most listeners refer to the stream
        return unfinished

    def _finished(self, stream: RequestStream, reason: FinishReason) -> FinishedRequest:
        now, scheduled, first_token = self._clock(), stream.first_scheduled_time, stream.first_token_time
        decoded = now if stream.finished_time is None or stream.num_unfinished else stream.finished_time
        return FinishedRequest(
            reason=reason,
            prompt_tokens=stream.num_prompt_tokens,
            output_tokens=stream.num_output_tokens,
            longest_output=stream.longest_output,
            cached_tokens=stream.num_cached_tokens,
            e2e_seconds=now - stream.arrival_time,
            queue_seconds=None if scheduled is None else scheduled - stream.arrival_time,
            prefill_seconds=None if scheduled is None or first_token is None else first_token - scheduled,
            decode_seconds=None if first_token is None else decoded - first_token,
            num_choices=stream.sampling.n,
            max_tokens=stream.sampling.max_tokens,
            num_preemptions=sum(event.kind is EventKind.PREEMPTED for _, event in stream.events),
        )

    def abort(self, stream: RequestStream) -> list[str]:
        """Finish a stream's choices at once. Return the children that the engine has to abort."""
        now = self._clock()
        unfinished = [child_id for child_id in stream.child_ids if child_id in self._choices]
        for child_id in unfinished:
            end = EngineCoreOutput(request_id=child_id, new_token_ids=[], finish_reason=FinishReason.ABORT)
            self._choices.pop(child_id).process(end, now)
        stream.hand_over()
        return unfinished

    def process(self, batch: EngineCoreOutputs) -> list[str]:
        """Put a step's tokens into their streams. Return the children that the engine must end, because a stop string
        was found or the stream has failed.

        Outputs of closed streams are dropped. `hand_over` wakes the readers; steps that come before it are merged.
        """
        stopped: list[str] = []
        # Choices that got their previous token in the same step have the same gap, so gaps are counted, not listed.
        # The gap is divided evenly among the tokens of one step.
        gaps: Counter[float] = Counter()
        num_generated = 0
        for output in batch.outputs:
            choice = self._choices.get(output.request_id)
            if choice is None:
                continue
            try:
                if output.events is not None:
                    choice.note(output.events)
                if output.prompt_logprobs is not None:
                    choice.prompt_logprobs += output.prompt_logprobs
                if not output.new_token_ids and output.finish_reason is None:
                    continue
                if output.new_token_ids and choice.stream.first_token_time is None:
                    self._observer.on_prompt(choice.stream.num_prompt_tokens)
                num_before, since = choice.num_output_tokens, choice.last_token_time
                finished = choice.process(output, batch.timestamp)
            except Exception as error:
                stopped += self._fail(choice.stream, error)
                continue
            self._touched[choice.stream] = None
            num_new = choice.num_output_tokens - num_before
            num_generated += num_new
            if num_new and since is None:
                since = batch.timestamp
                self._observer.on_first_token(since - choice.stream.arrival_time)
                num_new -= 1
            if num_new and since is not None:
                gaps[(batch.timestamp - since) / num_new] += num_new
            if finished:
                del self._choices[output.request_id]
                if output.finish_reason is None:
                    stopped.append(output.request_id)
        for seconds, count in gaps.items():
            self._observer.on_inter_token(seconds, count)
        self._observer.on_step(batch.stats, num_generated)
        return stopped

    def hand_over(self) -> list[str]:
        """Give readers the outputs that `process` has put into their streams. Return the children of failed streams,
        which the engine must end."""
        touched, self._touched = self._touched, {}
        left = LISTENED_LOGPROBS
        failed: list[str] = []
        for stream in touched:
            if stream.logprobs_per_token:
                left -= stream.num_pending_logprobs
            try:
                stream.hand_over(listened=left >= 0 or not stream.logprobs_per_token)
            except Exception as error:
                failed += self._fail(stream, error)
        return failed

    def _fail(self, stream: RequestStream, error: Exception) -> list[str]:
        """End a stream to which a step could not be delivered. Return its unfinished children."""
        logger.error("An output could not be delivered to request %s, which ends", stream.request_id, exc_info=error)
        failure = RequestFailed(f"a step could not be delivered ({type(error).__name__})")
        failure.__cause__ = error
        stream.listen(None)
        stream.fail(failure)
        self._touched.pop(stream, None)
        return [child_id for child_id in stream.child_ids if self._choices.pop(child_id, None) is not None]

    def fail_all(self, error: Exception) -> None:
        for choice in self._choices.values():
            choice.stream.fail(error)


class _Choice:
    """One choice of a request while it is generated."""

    __slots__ = (
        "_decoder",
        "_hide_stop_token",
        "_min_tokens",
        "_stops",
        "index",
        "last_token_time",
        "leads",
        "num_output_tokens",
        "num_prompt_tokens",
        "prompt_logprobs",
        "stream",
    )

    def __init__(
        self,
        stream: RequestStream,
        index: int,
        child: EngineCoreRequest,
        decoder: TokenDecoder,
        automata: Mapping[str, StopAutomaton],
        *,
        leads: bool,
    ) -> None:
        sampling = child.sampling
        self.stream = stream
        self.index = index
        self.leads = leads  # the first choice of its prompt; the other choices share its prefill
        self.num_prompt_tokens = len(child.prompt_token_ids)
        self.num_output_tokens = 0
        self.last_token_time: float | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []  # not yet handed over
        self._decoder = decoder
        self._stops: StopStrings | None = None
        if sampling.stop:
            stops = [automata[stop] for stop in sampling.stop]
            new_stops = MarkedStopStrings if sampling.shown_special_tokens else StopStrings
            self._stops = new_stops(stops, include_in_output=sampling.include_stop_str_in_output)
        self._hide_stop_token = not sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens

    def note(self, events: list[RequestEvent]) -> None:
        """Keep events of this choice for the request's timeline."""
        stream = self.stream
        if stream.first_scheduled_time is None:
            stream.first_scheduled_time = next(
                (event.time for event in events if event.kind is EventKind.SCHEDULED), None
            )
        if len(stream.events) < MAX_EVENTS:
            stream.events += [(self.index, event) for event in events]

    def process(self, output: EngineCoreOutput, timestamp: float) -> bool:
        """Decode a step's tokens and push the delta. Return True if the choice is finished."""
        stream = self.stream
        token_ids = output.new_token_ids
        text, num_used = self._decode(output)
        stop_string = self._stops.matched if self._stops else None
        finish_reason = FinishReason.STOP if stop_string is not None else output.finish_reason
        if finish_reason is not None and stop_string is None and self._stops:
            text += self._stops.flush()

        self.num_output_tokens += num_used
        stream.num_output_tokens += num_used
        if self.last_token_time is None:
            if self.leads and (token_ids or finish_reason is FinishReason.LENGTH):
                stream.num_cached_tokens += output.num_cached_tokens
            if stream.on_begin is not None:
                stream.on_begin()
        if token_ids:
            self.last_token_time = timestamp
            if stream.first_token_time is None:
                stream.first_token_time = timestamp
        if finish_reason is not None:
            stream.num_unfinished -= 1
            stream.longest_output = max(stream.longest_output, self.num_output_tokens)
            if stream.num_unfinished:
                self.note([RequestEvent(EventKind.FINISHED, timestamp, self.num_output_tokens)])
            stream.was_refused |= output.refusal is not None
            if stream.finish_reason not in FAILURES:  # a request fails with any of its choices
                stream.finish_reason = finish_reason
            stream.finished_time = timestamp
            if stream.on_end is not None:
                stream.on_end(self.num_output_tokens)
        stream.push(
            RequestOutput(
                request_id=stream.request_id,
                index=self.index,
                text=text,
                token_ids=token_ids[:num_used],
                logprobs=None if output.logprobs is None else output.logprobs[:num_used],
                finish_reason=finish_reason,
                stop_reason=output.stop_reason if stop_string is None else stop_string,
                num_prompt_tokens=self.num_prompt_tokens,
                num_cached_tokens=output.num_cached_tokens,
                num_output_tokens=self.num_output_tokens,
                error=output.error,
                prompt_logprobs=self.prompt_logprobs or None,
                embedding=output.embedding,
                refusal=output.refusal,
                rank_lost=output.rank_lost,
            )
        )
        self.prompt_logprobs = []
        return finish_reason is not None

    def _decode(self, output: EngineCoreOutput) -> tuple[str, int]:
        """Return the decided text of a step's tokens, and the number of tokens up to a stop string."""
        if self._stops is None and output.finish_reason is None and len(output.new_token_ids) == 1:  # mostly
            return self._decoder.feed_token(output.new_token_ids[0]), 1
        text = ""
        for position, token_id in enumerate(output.new_token_ids):
            is_last = position == len(output.new_token_ids) - 1
            stopped = output.finish_reason is FinishReason.STOP and not output.is_complete
            if is_last and stopped and self._hide_stop_token:
                break  # the stop token itself is counted, not shown
            piece = self._decoder.feed_token(token_id)
            if self._stops is None:
                text += piece
            elif self.num_output_tokens + position < self._min_tokens:
                text += piece  # not searched for stop strings before `min_tokens`
            else:
                text += self._stops.feed_text(piece)
                if self._stops.matched is not None:
                    return text, position + 1
        return text, len(output.new_token_ids)

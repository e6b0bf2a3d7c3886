"""State of one stream, sans-IO: verdicts in, chunks out, until it has finished."""

from __future__ import annotations

import dataclasses
import secrets
from typing import TYPE_CHECKING, Any

from coordinator.features import FeatureRelay
from coordinator.log import Log
from coordinator.request import ResolvedRequest
from coordinator.statistics import NOBODY, Drafting, StreamStatistics
from coordinator.text.output import OutputText
from coordinator.text.tokenizer import TextCodec
from outrider.errors import InvalidArgument
from outrider.results import Complete, Usage
from outrider.sampling.params import Finish
from outrider.serving.events import SealedChunk
from outrider.serving.messages import Verdict

if TYPE_CHECKING:
    from coordinator.records import Recorder


class Stream:
    """One choice of one request. Log, text, usage, logprobs and statistics always end at the same token."""

    def __init__(
        self,
        request: ResolvedRequest,
        choice: int,
        codec: TextCodec,
        *,
        deadline: float | None = None,
        has_client_deadline: bool = False,
    ) -> None:
        """`deadline` is in the event loop's time: its client's own, or the server's longest. Raises InvalidArgument
        when `resume_token_ids` go on past the end."""
        self.request = request
        self.choice = choice
        self.deadline = deadline
        self.has_client_deadline = has_client_deadline
        self.sampling = dataclasses.replace(request.sampling, choice=request.sampling.choice + choice)
        self.log = Log(request.prompt_ids, request.prompt_hash)
        self.statistics = StreamStatistics()
        self.features = FeatureRelay()
        self.keeps_steps = request.report_steps
        """Whether anybody wants records of its rounds."""
        self.recorder: Recorder | None = None
        """Where the stream is recorded."""
        self.finish = Finish.NONE
        self.matched_stop: int | str | None = None
        self._text = OutputText(
            codec,
            skip_special_tokens=request.skip_special_tokens,
            stop_strings=request.stop_strings,
            include_stop=request.include_stop,
            min_tokens=request.stopping.min_tokens,
        )
        self._replay(request.resume_token_ids)

    @property
    def finished(self) -> bool:
        return self.finish is not Finish.NONE

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Only the first choice asks for them, since all have one prompt, and only until they were sent."""
        return self.request.prompt_logprobs is not None and self.choice == 0 and not self.log.output_ids

    @property
    def num_remaining_tokens(self) -> int:
        return self.request.stopping.max_tokens - len(self.log.output_ids)

    @property
    def num_committed_tokens(self) -> int:
        """Here: without those that it was resumed from."""
        return len(self.log.output_ids) - len(self.request.resume_token_ids)

    def opening_fields(self, epoch: int) -> dict[str, Any]:
        """What opens a session on either kind of worker from the log as it stands, as a new incarnation."""
        return {
            "session_id": secrets.token_bytes(16),
            "epoch": epoch,
            "prompt_ids": self.request.prompt_ids,
            "committed_ids": tuple(self.log.output_ids),
            "sampling": self.sampling,
            "stopping": self.request.stopping,
            "tenant": self.request.tenant,
        }

    def commit(self, verdict: Verdict, *, by: Drafting = NOBODY) -> SealedChunk:
        """Appends the verdict's tokens up to where the text ends, and gives what the client should get of them."""
        assert not self.finished
        text = self._push(verdict.committed_ids)
        num_kept = len(self.log.output_ids) - (verdict.header.base_length - len(self.log.prompt_ids))
        kept, origins = verdict.committed_ids[:num_kept], verdict.origins[:num_kept]
        if not self.finished and verdict.finish is not Finish.NONE:
            text += self._end(verdict.finish, verdict.matched_stop_token_id)
        self.statistics.count(verdict.num_draft_tokens, origins, by)
        logprobs = verdict.logprobs.cut(num_kept) if self.request.logprobs else None
        return SealedChunk(self.choice, kept, text, origins, logprobs, num_draft_tokens=verdict.num_draft_tokens)

    def complete(self, total_ms: float) -> Complete:
        """The last event; usage counts resumed tokens too."""
        assert self.finished
        self.statistics.num_feature_bytes = self.features.num_bytes
        usage = Usage(len(self.log.prompt_ids), len(self.log.output_ids), self.statistics.num_cached_tokens)
        return Complete(
            index=self.choice,
            finish_reason=self.finish.name.lower(),
            matched_stop=self.matched_stop,
            usage=usage,
            timings=self.statistics.timings(total_ms),
            speculation=self.statistics.speculation(),
        )

    def _push(self, token_ids: tuple[int, ...]) -> str:
        """Text of the tokens; appends them to the log up to the one that completes a stop string."""
        text = ""
        for token_id in token_ids:
            self.log.append((token_id,))
            text += self._text.push(token_id)
            if self._text.matched_stop is not None:
                self._finish_by_string(self._text.matched_stop)
                break
        return text

    def _end(self, finish: Finish, matched_stop_token_id: int | None) -> str:
        text = self._text.flush()
        if self._text.matched_stop is not None:
            self._finish_by_string(self._text.matched_stop)
        else:
            self.finish, self.matched_stop = finish, matched_stop_token_id
        return text

    def _finish_by_string(self, stop: str) -> None:
        self.finish, self.matched_stop = Finish.STOP, stop

    def _replay(self, token_ids: tuple[int, ...]) -> None:
        """Counts the ids that the client has; their text was sent with them."""
        stopping = self.request.stopping
        for count, token_id in enumerate(token_ids, start=1):
            if self.finished:
                raise InvalidArgument(
                    f"resume_token_ids has {len(token_ids)} ids, but the text ends with the first {count - 1}",
                    field="resume_token_ids",
                    reason="RESUMED_PAST_THE_END",
                )
            self._push((token_id,))
            if not self.finished and token_id in stopping.stop_token_ids and count > stopping.min_tokens:
                self._end(Finish.STOP, token_id)
            elif not self.finished and count == stopping.max_tokens:
                self._end(Finish.LENGTH, None)

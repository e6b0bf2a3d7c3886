"""Text of one stream: ids in, certain text out, until a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.text.detokenizer import Detokenizer
from coordinator.text.stop_strings import StopStringMatcher
from coordinator.text.tokenizer import TextCodec


class OutputText:
    """Text released after n ids is a function of those n ids.

    As in vLLM, a stop string counts only when it completes after the first `min_tokens` tokens.
    """

    def __init__(
        self,
        codec: TextCodec,
        *,
        skip_special_tokens: bool,
        stop_strings: Sequence[str],
        include_stop: bool,
        min_tokens: int,
    ) -> None:
        self._detokenizer = Detokenizer(codec, skip_special_tokens=skip_special_tokens)
        self._matcher = StopStringMatcher(stop_strings, include=include_stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.match.stop if self._matcher.match is not None else None

    def push(self, token_id: int) -> str:
        """New certain text. After a match nothing may be pushed."""
        assert self.matched_stop is None
        self._num_tokens += 1
        return self._matcher.push(self._detokenizer.push(token_id), may_match=self._may_match)

    def flush(self) -> str:
        """The stream has ended otherwise: all that was held back. May still complete a stop string."""
        text = self._matcher.push(self._detokenizer.flush(), may_match=self._may_match)
        return text if self.matched_stop is not None else text + self._matcher.flush()

    @property
    def _may_match(self) -> bool:
        return self._num_tokens > self._min_tokens

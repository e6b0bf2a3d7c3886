"""The stream's log: the one truth that both workers cache."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from outrider.sampling.noise import extend_hash, hash_ids
from outrider.serving.messages import Header


class Log:
    """Prompt and committed output, append-only, with the rolling hash of every prefix from the prompt's end on."""

    def __init__(self, prompt_ids: Sequence[int], prompt_hash: int | None = None) -> None:
        """`prompt_hash` spares hashing a long prompt again."""
        self.prompt_ids = tuple(prompt_ids)
        self.output_ids: list[int] = []
        self._hashes = array("Q", [hash_ids(self.prompt_ids) if prompt_hash is None else prompt_hash])

    @property
    def length(self) -> int:
        """Committed ids, prompt included."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def prompt_hash(self) -> int:
        return self._hashes[0]

    def append(self, token_ids: Sequence[int]) -> None:
        prefix_hash = self._hashes[-1]
        for token_id in token_ids:
            prefix_hash = extend_hash(prefix_hash, token_id)
            self._hashes.append(prefix_hash)
        self.output_ids.extend(token_ids)

    def header(self, epoch: int, length: int | None = None) -> Header:
        """Of the whole log, or of its first `length` ids."""
        length = self.length if length is None else length
        return Header(epoch, length, self._hashes[length - len(self.prompt_ids)])

    def holds(self, header: Header) -> bool:
        """Whether `header` names a prefix of this log that reaches at least to the prompt's end."""
        return (
            len(self.prompt_ids) <= header.base_length <= self.length
            and self.header(header.epoch, header.base_length) == header
        )

    def since(self, length: int) -> tuple[int, ...]:
        """Output ids from position `length` on; `length` counts the prompt."""
        return tuple(self.output_ids[length - len(self.prompt_ids) :])

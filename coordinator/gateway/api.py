"""What the two APIs differ in, and what a request of either asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

from coordinator.gateway.fields import Fields
from coordinator.gateway.logprobs import Spelling
from outrider.client import Client, Prompt
from outrider.results import Chunk

F = TypeVar("F", bound=Fields)


class Api(ABC, Generic[F]):
    """One of the two. Stateless."""

    path: ClassVar[str]
    fields: type[F]
    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    @abstractmethod
    def prompts(self, fields: F) -> Sequence[Prompt]:
        """At least one. Raises InvalidArgument."""

    async def echoes(self, fields: F, prompts: Sequence[Prompt], client: Client) -> Sequence[str]:
        """What the texts of each prompt begin with."""
        return [""] * len(prompts)

    @abstractmethod
    def options(self, fields: F) -> dict[str, Any]:
        """Of `outrider.Client.generate`. Raises InvalidArgument."""

    @abstractmethod
    def logprobs(self, fields: F, chunk: Chunk, spelling: Spelling, offset: int) -> dict[str, Any]:
        """Of a chunk that has some. `offset`: of its first token within the text, in characters."""

    @abstractmethod
    def join_logprobs(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Of consecutive chunks, at least one."""

    @abstractmethod
    def piece(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """Of a streamed choice: what is new of the text."""

    @abstractmethod
    def whole(self, text: str) -> dict[str, Any]:
        """Of a choice that is complete."""

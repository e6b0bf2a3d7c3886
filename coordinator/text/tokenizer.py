"""Text to ids and back, from what a worker described: a `tokenizers` JSON, or the toy alphabet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from outrider.errors import InvalidArgument
from outrider.toy_text import NUM_ASCII, toy_char, toy_id


class TextCodec(Protocol):
    """What the coordinator asks of a tokenizer. Safe to use from several threads."""

    @property
    def max_token_chars(self) -> int:
        """No token spans more input code points than this, as far as the vocabulary tells."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def each(self, token_ids: Sequence[int]) -> list[bytes]:
        """What each token writes, special ones too; one may be part of a code point."""

    def is_special(self, token_id: int) -> bool: ...


class ToyCodec:
    """One code point per id."""

    max_token_chars: int = 1

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Raises InvalidArgument for a code point without an id."""
        ids = [toy_id(char) for char in text]
        for char, token_id in zip(text, ids, strict=True):
            if not 0 <= token_id < self._vocab_size:
                raise InvalidArgument(
                    f"text holds {char!r}, which the toy vocabulary of {self._vocab_size} ids cannot write: it has "
                    f"{toy_char(0)!r} to {toy_char(self._vocab_size - 1)!r}, one code point per id"
                    + ("; vocab=128 has all of ASCII but the space" if self._vocab_size < NUM_ASCII else ""),
                    field="text",
                    reason="TEXT_NOT_IN_VOCABULARY",
                )
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(toy_char, token_ids))

    def each(self, token_ids: Sequence[int]) -> list[bytes]:
        return [toy_char(token_id).encode() for token_id in token_ids]

    def is_special(self, token_id: int) -> bool:
        return False


class TokenizerCodec:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, tokenizer_json: bytes) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer_json.decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special = frozenset(
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )

    @cached_property
    def max_token_chars(self) -> int:
        # a token's own spelling is never shorter than the text it stands for, but a normalizer may have shortened the
        # text before: a factor of four covers composition and whitespace folding of real tokenizers
        longest = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)
        return longest * (4 if self._tokenizer.normalizer is not None else 1)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def each(self, token_ids: Sequence[int]) -> list[bytes]:
        """Takes up to a second when it is first asked."""
        return [
            b"" if self._tokenizer.id_to_token(token_id) is None else self._bytes.decode_bytes([token_id])
            for token_id in token_ids
        ]

    @cached_property
    def _bytes(self) -> LLTokenizer:
        return LLTokenizer(self._tokenizer.to_str())

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special


def make_codec(tokenizer_json: bytes, vocab_size: int) -> TextCodec:
    """The codec of a described worker; an empty JSON means the toy alphabet."""
    return TokenizerCodec(tokenizer_json) if tokenizer_json else ToyCodec(vocab_size)

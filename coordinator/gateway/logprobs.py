"""Logprobs in the two shapes that OpenAI has for them, with the text and bytes of each token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from outrider.client import Client
from outrider.results import Chunk

LOWEST = -9999.0
"""In the place of minus infinity, which JSON cannot say; OpenAI's and vLLM's value."""
MAX_REMEMBERED = 65_536

Spelling = Mapping[int, bytes]


class Spellings:
    """What tokens write, asked once: the bytes of a token never change under one fingerprint of a model."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    async def of(self, chunk: Chunk, client: Client, model: str, fingerprint: str) -> Spelling:
        """Of every token that the chunk's logprobs name."""
        ids = set(chunk.token_ids)
        if chunk.logprobs is not None:
            ids.update(token_id for row in chunk.logprobs.top for token_id, _ in row)
        found = {token_id: known for token_id in ids if (known := self._known.get((fingerprint, token_id))) is not None}
        missing = sorted(ids - found.keys())
        if missing:
            told = zip(missing, await client.token_bytes(missing, model=model), strict=True)
            found.update(told)
        for token_id in ids:
            self._known[fingerprint, token_id] = found[token_id]
            self._known.move_to_end((fingerprint, token_id))
        while len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        return found


def chat_logprobs(chunk: Chunk, spelling: Spelling) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions."""
    assert chunk.logprobs is not None
    rows = chunk.logprobs.top or ((),) * len(chunk.token_ids)
    content = [
        _entry(token_id, logprob, spelling) | {"top_logprobs": [_entry(i, value, spelling) for i, value in row]}
        for token_id, logprob, row in zip(chunk.token_ids, chunk.logprobs.token_logprobs, rows, strict=True)
    ]
    return {"content": content, "refusal": None}


def _entry(token_id: int, logprob: float, spelling: Spelling) -> dict[str, Any]:
    written = spelling[token_id]
    return {"token": written.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(written)}


def completion_logprobs(chunk: Chunk, spelling: Spelling, offset: int) -> dict[str, Any]:
    """`choices[].logprobs` of completions. The token that was taken is among the top ones, as one more where it is not
    as likely as they are. `offset`: of the chunk's first token within the text, in characters."""
    assert chunk.logprobs is not None
    tokens = [spelling[token_id].decode(errors="replace") for token_id in chunk.token_ids]
    taken = [_finite(value) for value in chunk.logprobs.token_logprobs]
    offsets = [offset + sum(map(len, tokens[:index])) for index in range(len(tokens))]
    rows = chunk.logprobs.top or ((),) * len(tokens)
    return {
        "tokens": tokens,
        "token_logprobs": taken,
        "top_logprobs": [
            _top(row, spelling) | {token: value} for row, token, value in zip(rows, tokens, taken, strict=True)
        ],
        "text_offset": offsets,
    }


def _top(row: Iterable[tuple[int, float]], spelling: Spelling) -> dict[str, float]:
    """Of two tokens that read alike, parts of a code point, the likelier one stays."""
    told: dict[str, float] = {}
    for token_id, logprob in row:
        told.setdefault(spelling[token_id].decode(errors="replace"), _finite(logprob))
    return told


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)

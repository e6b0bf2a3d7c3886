"""Between a draft model and a target whose tokenizers differ: which ids mean the same, and one text in the other's ids.

Two ways to draft, both exact whatever is lost in translation (Timor et al. 2025, arXiv:2502.05202):
token by token over the ids that both have, with q renormalised over these and zero elsewhere, or by text, the draft's
own words spelt in the target's ids as one-hot guesses.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

import numpy as np

from outrider.lm.vocabulary import Vocabulary

Encode = Callable[[str], list[int]]
"""Text to ids, nothing added before or after it."""

LONG_CHUNK_BYTES = 256
LOOK_BEHIND_TOKENS = 4


class TokenMap:
    """The ids that stand for the same bytes in both vocabularies, one to one.

    draft_ids, target_ids: int64[K], in step, draft_ids ascending. Special ids go with special ids of one text only.
    Where a vocabulary has several ids for the same bytes, the lowest one is meant.
    """

    def __init__(self, draft: Vocabulary, target: Vocabulary) -> None:
        meanings = _ids_by_meaning(target)
        pairs = [(own, meanings[m]) for m, own in _ids_by_meaning(draft).items() if m in meanings]
        pairs.sort()
        self.draft_ids = np.array([own for own, _ in pairs], np.int64)
        self.target_ids = np.array([other for _, other in pairs], np.int64)
        self._to_draft = {other: own for own, other in pairs}
        self._to_target = dict(pairs)

    def __len__(self) -> int:
        return len(self.draft_ids)

    def to_draft(self, target_id: int) -> int | None:
        """The draft model's id of a target id; None where it has none."""
        return self._to_draft.get(target_id)

    def to_target(self, draft_id: int) -> int | None:
        """The target's id of a draft id; None where it has none."""
        return self._to_target.get(draft_id)

    def widen(self, logits: np.ndarray, target_vocab_size: int) -> np.ndarray:
        """float32[V of the draft] -> float32[target_vocab_size]: -inf for every id that the draft cannot say."""
        widened = np.full(target_vocab_size, -np.inf, np.float32)
        widened[self.target_ids] = logits[self.draft_ids]
        return widened


class Translator:
    """What a draft worker knows of both tokenizers. One for all its sessions.

    encode_draft, encode_target: the two tokenizers. bos_id: begins every text of the draft model; None: nothing does.
    """

    def __init__(
        self,
        draft: Vocabulary,
        target: Vocabulary,
        encode_draft: Encode,
        encode_target: Encode,
        *,
        target_vocab_size: int,
        bos_id: int | None = None,
    ) -> None:
        self.draft = draft
        self.target = target
        self.token_map = TokenMap(draft, target)
        self.encode_draft = encode_draft
        self.target_vocab_size = target_vocab_size
        self.bos_id = bos_id
        self._encode_target = encode_target

    def spell(self, target_ids: Sequence[int], draft_ids: Sequence[int]) -> list[int]:
        """Target ids of the text of `draft_ids`, following `target_ids`.

        The text is spelt together with the last few tokens before it, so that a word is not cut where the draft model
        began; where that would spell these differently, it is spelt alone. It ends before a special id that the
        target does not have and before bytes that are no whole character.
        """
        spelt: list[int] = []
        text = b""
        for draft_id in [*draft_ids, None]:
            if draft_id is not None and draft_id not in self.draft.special_ids:
                text += self.draft.bytes_of.get(draft_id, b"")
                continue
            spelt += self._spell_text([*target_ids, *spelt], _whole_characters(text)[0])
            mark = None if draft_id is None else self.token_map.to_target(draft_id)
            if mark is None:
                break
            spelt.append(mark)
            text = b""
        return spelt

    def _spell_text(self, target_ids: Sequence[int], text: str) -> list[int]:
        before: list[int] = []
        for token_id in reversed(target_ids[-LOOK_BEHIND_TOKENS:]):
            if token_id in self.target.special_ids:
                break
            before.insert(0, token_id)
        behind, is_whole = _whole_characters(b"".join(self.target.bytes_of.get(i, b"") for i in before))
        together = self._encode_target(behind + text)
        if is_whole and together[: len(before)] == before:
            return together[len(before) :]
        return self._encode_target(text)


class DraftContext:
    """A growing list of target ids in the draft model's ids: a pure function of the list, whatever steps it grew in.

    Text is cut into chunks, each encoded by itself and once: after a line's end, and at a space once a chunk is long.
    Only the last chunk may change as the text grows.
    """

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        self._num_taken = 0
        self._closed: list[int] = [] if translator.bos_id is None else [translator.bos_id]
        self._open = bytearray()
        self._num_scanned = 1

    def follow(self, target_ids: Sequence[int]) -> tuple[list[int], int, bool]:
        """(draft ids of the text, how many of these are final, whether it ends with a whole character).

        target_ids: those of the last call and what came after them.
        """
        translator = self._translator
        for token_id in target_ids[self._num_taken :]:
            if token_id in translator.target.special_ids:
                self._close(len(self._open))
                mark = translator.token_map.to_draft(token_id)
                # a model whose texts begin with a mark of its own has it from the start
                if mark is not None and self._closed != [mark]:
                    self._closed.append(mark)
            else:
                self._open += translator.target.bytes_of.get(token_id, b"")
                self._cut()
        self._num_taken = len(target_ids)
        text, is_whole = _whole_characters(bytes(self._open))
        return [*self._closed, *translator.encode_draft(text)], len(self._closed), is_whole

    def _cut(self) -> None:
        while self._num_scanned < len(self._open):
            before, here = self._open[self._num_scanned - 1 : self._num_scanned + 1]
            ends_line = before == ord("\n") and here not in b" \n\r\t"
            ends_word = self._num_scanned >= LONG_CHUNK_BYTES and here == ord(" ") and before not in b" \n\r\t"
            if ends_line or ends_word:
                self._close(self._num_scanned)
            else:
                self._num_scanned += 1

    def _close(self, length: int) -> None:
        text, self._open, self._num_scanned = bytes(self._open[:length]), self._open[length:], 1
        self._closed += self._translator.encode_draft(text.decode(errors="replace"))


def _ids_by_meaning(vocabulary: Vocabulary) -> dict[tuple[bool, bytes], int]:
    """Lowest id by (special, bytes)."""
    found: dict[tuple[bool, bytes], int] = {}
    for token_id in sorted(vocabulary.bytes_of, reverse=True):
        if meaning := vocabulary.bytes_of[token_id]:
            found[token_id in vocabulary.special_ids, meaning] = token_id
    return found


def _whole_characters(text: bytes) -> tuple[str, bool]:
    """The text up to an unfinished last character, and whether there is none. Other bad bytes are replaced."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return decoder.decode(text), not decoder.getstate()[0]

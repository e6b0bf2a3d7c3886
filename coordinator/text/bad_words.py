"""Words that an output must not hold, as sequences of ids: what vLLM's `bad_words` become, with every spelling kept.

A word in running text is written with a space before it, and most tokenizers have ids of their own for that, so each
word counts twice. (vLLM leaves out the second spelling where it has another number of ids; here it stays banned.)
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.checks import refuse
from coordinator.text.tokenizer import TextCodec
from outrider.errors import InvalidArgument

MAX_WORDS = 256
MAX_WORD_CHARS = 256
FIELD = "sampling.bad_words"


def bad_word_ids(words: Sequence[str], codec: TextCodec) -> tuple[tuple[int, ...], ...]:
    """Ids of each word with and without a space before it, without repetitions. Raises InvalidArgument."""
    if len(words) > MAX_WORDS:
        refuse(FIELD, f"{len(words)} words", f"at most {MAX_WORDS}")
    sequences: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        field, bare = f"{FIELD}[{index}]", word.lstrip()
        if not bare or len(word) > MAX_WORD_CHARS:
            length = f"{len(word)} code points long and {len(bare)} without leading space"
            refuse(field, length, f"from 1 to {MAX_WORD_CHARS}")
        spellings = (_encode(bare, codec, field), _encode_if_possible(" " + bare, codec))
        sequences.update(dict.fromkeys(ids for ids in spellings if ids))
    return tuple(sequences)


def _encode(text: str, codec: TextCodec, field: str) -> tuple[int, ...]:
    try:
        ids = tuple(codec.encode(text, add_special_tokens=False))
    except InvalidArgument as error:
        raise InvalidArgument(f"{field}: {error.message}", field=field, reason=error.reason) from None
    if not ids:
        raise InvalidArgument(f"{field}: the model's tokenizer makes nothing of it", field=field)
    return ids


def _encode_if_possible(text: str, codec: TextCodec) -> tuple[int, ...]:
    """Nothing where the vocabulary has no space: such an output cannot hold one either."""
    try:
        return tuple(codec.encode(text, add_special_tokens=False))
    except InvalidArgument:
        return ()

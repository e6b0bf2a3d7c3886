"""Bad words become ids with and without a space before them, whatever the tokenizer makes of either."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from coordinator.text.bad_words import bad_word_ids
from coordinator.text.tokenizer import TokenizerCodec
from outrider.errors import InvalidArgument

VOCAB = {"f": 0, "o": 1, "Ġ": 2, "fo": 3, "foo": 4, "Ġf": 5, "Ġfoo": 6, "x": 7}


def codec(*merges: tuple[str, str]) -> TokenizerCodec:
    tokenizer = Tokenizer(models.BPE(vocab=VOCAB, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return TokenizerCodec(tokenizer.to_str().encode())


WHOLE = (("f", "o"), ("fo", "o"), ("Ġ", "foo"))


@pytest.mark.parametrize("word", ["foo", " foo", "\n foo"])
def test_both_spellings_whatever_the_words_own_space(word: str) -> None:
    assert bad_word_ids([word], codec(*WHOLE)) == ((4,), (6,))


def test_spellings_of_different_lengths_are_both_kept() -> None:
    assert bad_word_ids(["foo"], codec(("f", "o"), ("fo", "o"))) == ((4,), (2, 4))
    assert bad_word_ids(["fo", "foo"], codec(("Ġ", "f"))) == ((0, 1), (5, 1), (0, 1, 1), (5, 1, 1))


def test_repeated_words_count_once() -> None:
    assert bad_word_ids(["foo", " foo", "foo"], codec(*WHOLE)) == ((4,), (6,))


def test_a_word_that_leaves_no_ids_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="makes nothing of it") as refusal:
        bad_word_ids(["foo", "Q"], codec(*WHOLE))
    assert refusal.value.field == "sampling.bad_words[1]"

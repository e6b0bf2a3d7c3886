"""Text to the tokens that wrote it, where both do not go in step."""

from hypothesis import given
from hypothesis import strategies as st

from outrider.cli.attribution import Attribution
from outrider.sampling.params import Origin

A, C, B, P = Origin.ACCEPTED, Origin.CORRECTION, Origin.BONUS, Origin.PLAIN


def test_text_that_comes_later_and_in_other_pieces() -> None:
    attribution = Attribution()
    attribution.add([b"Hel", b"lo "], [P, A])
    assert attribution.pieces("He") == [("He", P)]
    assert attribution.pieces("") == []
    attribution.add([b"you"], [C])
    assert attribution.pieces("llo y") == [("l", P), ("lo ", A), ("y", C)]
    assert attribution.pieces("ou") == [("ou", C)]


def test_a_character_is_the_work_of_the_token_that_completes_it() -> None:
    attribution, letter = Attribution(), "é".encode()
    attribution.add([b"a" + letter[:1], letter[1:] + b"b"], [A, B])
    assert attribution.pieces("aéb") == [("a", A), ("éb", B)]


def test_tokens_that_write_nothing_and_a_space_that_is_not_written() -> None:
    attribution = Attribution()
    attribution.add([b"<s>", b" Hi", b"</think>", b"", b" you"], [P, A, B, B, C])
    assert attribution.pieces("Hi you") == [("Hi", A), (" you", C)]


def test_bytes_that_are_no_text_do_not_lead_astray() -> None:
    attribution = Attribution()
    attribution.add([b"a", b"\xf0", b"b"], [P, A, C])
    assert attribution.pieces("a\ufffdb") == [("a", P), ("\ufffd", A), ("b", C)]
    assert attribution.pieces("more") == [("more", C)], "text without a token is the last one's"


@given(st.lists(st.tuples(st.text(min_size=1, max_size=4), st.sampled_from(Origin)), max_size=8), st.data())
def test_joined_it_is_the_text(tokens: list[tuple[str, Origin]], data: st.DataObject) -> None:
    text = "".join(piece for piece, _ in tokens)
    cut = data.draw(st.integers(0, len(text)))
    attribution = Attribution()
    attribution.add([piece.encode() for piece, _ in tokens], [origin for _, origin in tokens])
    pieces = attribution.pieces(text[:cut]) + attribution.pieces(text[cut:])
    told = [(character, origin) for piece, origin in pieces for character in piece]
    assert told == [(character, origin) for piece, origin in tokens for character in piece]

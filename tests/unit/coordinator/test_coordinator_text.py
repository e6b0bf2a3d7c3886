"""Detokenizer and stop strings against decoding and searching everything at once; chat templates."""

import itertools
import random

import pytest
from conftest import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from coordinator.text.chat import ChatTemplate
from coordinator.text.detokenizer import Detokenizer
from coordinator.text.output import OutputText
from coordinator.text.stop_strings import StopStringMatcher
from coordinator.text.tokenizer import TextCodec, TokenizerCodec, ToyCodec
from outrider.errors import InvalidArgument
from outrider.toy_text import toy_char, toy_id

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Its naïve café façade costs 5 € — or £4.",
    "def greet(name):\n    return f'Hello, {name}!'  # 你好，世界",
    "Emoji: 😀😃👩‍👩‍👧 and flags 🇪🇪; Кириллица, العربية, हिन्दी.",
]


def byte_level_tokenizer() -> Tokenizer:
    """A real byte-level BPE, small enough that most code points beyond ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """The Llama 2 shape: words with U+2581 for spaces, single bytes for the rest, the first space stripped."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "s", "at", "▁", "é"]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTE_LEVEL = TokenizerCodec(byte_level_tokenizer().to_str().encode())
BYTE_FALLBACK = TokenizerCodec(byte_fallback_tokenizer().to_str().encode())
NUM_BYTE_LEVEL_IDS = byte_level_tokenizer().get_vocab_size()


@settings(max_examples=scaled(2000), deadline=None)
@given(st.lists(st.integers(0, NUM_BYTE_LEVEL_IDS - 1), max_size=60), st.booleans())
def test_incremental_text_equals_decoding_at_once_for_any_ids(ids: list[int], skip: bool) -> None:
    detokenizer, text = Detokenizer(BYTE_LEVEL, skip_special_tokens=skip), ""
    for count, token_id in enumerate(ids, start=1):
        text += detokenizer.push(token_id)
        assert BYTE_LEVEL.decode(ids[:count], skip_special_tokens=skip).startswith(text)
    assert text + detokenizer.flush() == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@settings(max_examples=scaled(1000), deadline=None)
@given(st.text(max_size=60))
def test_real_text_comes_back_in_whole_code_points(text: str) -> None:
    for codec in (BYTE_LEVEL, BYTE_FALLBACK):
        ids = codec.encode(text, add_special_tokens=False)
        if codec is BYTE_FALLBACK and codec.decode(ids, skip_special_tokens=True) != text:
            continue
        detokenizer = Detokenizer(codec)
        pieces = [detokenizer.push(token_id) for token_id in ids]
        assert "".join(pieces) + detokenizer.flush() == text
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_long_runs_of_invalid_bytes_neither_stall_nor_differ() -> None:
    lead, tail = (BYTE_LEVEL.encode(c, add_special_tokens=False) for c in ("€", "A"))
    assert len(lead) > 1, "the test wants a code point of several tokens"
    ids = lead[1:] * 100 + lead + tail
    detokenizer = Detokenizer(BYTE_LEVEL)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)
    assert max(map(len, pieces[:100])) < 40


def test_a_special_token_within_a_code_point_is_skipped_as_in_decoding_at_once() -> None:
    first, *rest = BYTE_LEVEL.encode("€", add_special_tokens=False)
    special = byte_level_tokenizer().token_to_id("<|end|>")
    assert BYTE_LEVEL.is_special(special)
    assert not BYTE_LEVEL.is_special(byte_level_tokenizer().token_to_id("<tool>"))
    detokenizer = Detokenizer(BYTE_LEVEL)
    assert detokenizer.push_all([first, special, *rest]) == "€"


PIECES = st.lists(st.text(alphabet="ab€", max_size=4), max_size=20)
STOPS = st.lists(st.text(alphabet="ab€", min_size=1, max_size=5), max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """The slow twin: grow the text code point by code point; the first end with a stop string wins, longest first."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return end - len(stop), end, stop
    return None


@settings(max_examples=scaled(5000), deadline=None)
@given(PIECES, STOPS, st.booleans())
def test_stop_strings_cut_where_a_search_of_the_whole_text_does(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    matcher, released, num_pushed = StopStringMatcher(stops, include=include), "", 0
    for piece in pieces:
        released += matcher.push(piece)
        num_pushed += 1
        so_far = "".join(pieces[:num_pushed])
        assert so_far.startswith(released) or matcher.match
        if matcher.match:
            break
        held = so_far[len(released) :]
        assert not held or any(stop.startswith(held) for stop in stops), "held back what can become nothing"
    whole = "".join(pieces)
    expected = first_stop(whole, stops)
    if expected is None:
        assert matcher.match is None
        assert released + matcher.flush() == whole
    else:
        start, end, stop = expected
        assert matcher.match is not None
        assert matcher.match.stop == stop
        assert released == whole[: end if include else start]
        assert len("".join(pieces[: num_pushed - 1])) < end <= len("".join(pieces[:num_pushed])), "matched too late"


def test_a_stop_string_may_begin_before_min_tokens_but_not_end_there() -> None:
    codec = ToyCodec(94)

    def run(min_tokens: int) -> tuple[str, str | None]:
        text = OutputText(
            codec, skip_special_tokens=True, stop_strings=["BC"], include_stop=False, min_tokens=min_tokens
        )
        out = ""
        for char in "ABCABC":
            out += text.push(toy_id(char))
            if text.matched_stop:
                return out, text.matched_stop
        return out + text.flush(), None

    assert run(0) == ("A", "BC")
    assert run(2) == ("A", "BC")
    assert run(3) == ("ABCA", "BC")
    assert run(6) == ("ABCABC", None)


@pytest.mark.parametrize("codec", [BYTE_LEVEL, ToyCodec(200)])
def test_released_text_is_a_function_of_the_ids_alone(codec: TextCodec) -> None:
    rng = random.Random(3)
    ids = [rng.randrange(200) for _ in range(80)]

    def released(count: int) -> str:
        text = OutputText(
            codec, skip_special_tokens=True, stop_strings=["never there"], include_stop=False, min_tokens=0
        )
        return "".join(text.push(token_id) for token_id in ids[:count])

    texts = [released(count) for count in range(81)]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


def test_toy_alphabet_is_one_to_one() -> None:
    assert [toy_id(toy_char(i)) for i in range(5000)] == list(range(5000))
    assert toy_id(" ") < 0
    assert toy_char(0) == "!"
    assert toy_char(94) == "\u4e00"
    with pytest.raises(InvalidArgument, match="'c'"):
        ToyCodec(64).encode("Ac", add_special_tokens=True)


TEMPLATE = """{% for message in messages %}
{% if message['role'] not in ['user', 'assistant'] %}{{ raise_exception('role ' + message['role']) }}{% endif %}
<|{{ message['role'] }}|>{{ message['content'] | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def test_chat_templates_render_as_transformers_does() -> None:
    template = ChatTemplate(TEMPLATE, {"eos_token": "</s>"})
    messages = [{"role": "user", "content": " hi <b> "}, {"role": "assistant", "content": "yo"}]
    expected = "<|user|>hi <b></s>\n<|assistant|>yo</s>\n"
    assert template.render(messages, add_generation_prompt=False).strip("\n") == expected.strip("\n")
    assert template.render(messages, add_generation_prompt=True).endswith("</s>\n<|assistant|>")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].nothing.more }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set _ = messages.append(1) %}",
        "{{ 1 + 'a' }}",
    ],
)
def test_what_a_template_must_not_do_is_refused_by_name(source: str) -> None:
    with pytest.raises(InvalidArgument, match=r"chat\.messages"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], add_generation_prompt=True)


SPACED = """{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' + tone | default('') }}{% endif %}"""


@pytest.mark.parametrize("source", [TEMPLATE, SPACED], ids=["trims", "keeps-spaces"])
def test_continued_messages_and_template_variables_render_as_transformers_does(source: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = ChatTemplate(source, {"eos_token": "</s>"})
    assert template.kwargs_names == ({"tone"} if source is SPACED else set())
    kwargs = {"tone": "kind"} if source is SPACED else {}
    for last in ("", "x", "The answer is", "The answer is ", "\n lead and trail \n\n", "<|user|>", "</s>", "hi"):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": last}]
        for goes_on in (False, True):
            (expected,), _ = utils.render_jinja_template(
                [messages],
                chat_template=source,
                continue_final_message=goes_on,
                add_generation_prompt=not goes_on,
                eos_token="</s>",
                **kwargs,
            )
            text = template.render(
                messages, add_generation_prompt=not goes_on, continue_final_message=goes_on, kwargs=kwargs
            )
            assert text == expected


def test_a_template_that_drops_the_last_message_cannot_continue_it() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(InvalidArgument, match="nothing can be continued") as refusal:
        template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert refusal.value.field == "chat.continue_final_message"


def test_bytes_of_each_token_make_up_the_text() -> None:
    text = "naïve 😀 你好<|end|> façade"
    for codec in (BYTE_LEVEL, BYTE_FALLBACK):
        ids = codec.encode(text.replace("<|end|>", ""), add_special_tokens=False)
        assert any("\ufffd" in codec.decode([token_id], skip_special_tokens=False) for token_id in ids)
        whole = b"".join(codec.each(ids)).decode()
        assert whole.strip() == codec.decode(ids, skip_special_tokens=False).strip()
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert b"".join(BYTE_LEVEL.each(ids)).decode() == text
    assert BYTE_LEVEL.each([NUM_BYTE_LEVEL_IDS + 5]) == [b""]
    assert ToyCodec(400).each([0, 300]) == [toy_char(0).encode(), toy_char(300).encode()]


@pytest.mark.parametrize("vocab_size", [64, 94])
def test_a_toy_that_cannot_write_a_letter_says_which_one_can(vocab_size: int) -> None:
    with pytest.raises(InvalidArgument, match="cannot write: it has") as caught:
        ToyCodec(vocab_size).encode("é", add_special_tokens=True)
    assert ("vocab=128 has all of ASCII" in caught.value.message) == (vocab_size < 94)
    assert len(ToyCodec(128).encode("Hello~", add_special_tokens=True)) == 6

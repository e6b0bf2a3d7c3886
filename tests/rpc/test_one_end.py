"""Text, usage, logprobs, origins and statistics end at one token: any finish, any cut, any rule, half code points too.

Random requests over a toy whose tokens are pieces of UTF-8: with and without drafts, resumed at random places, several
choices at once.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from conftest import scaled
from stack import in_process_stack
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import outrider
from outrider.lm.interface import LoadedModel
from outrider.lm.toy import load_toy
from outrider.sampling.params import Origin

PIECES = [
    *(bytes([byte]) for byte in "aé€\U0001f600b".encode()), b"ab", b" ", b"\n", b"STOP", b"ST", b"OP", "é".encode(),
    b"a" + "€".encode()[:1], "\U0001f600".encode()[2:] + b"!", b".", b"x", b"yz", "ß".encode(), b"Q", b"0", b"1", b"2",
]  # fmt: skip
SPECIAL = ["<end>", "<pad>"]
VOCAB = len(dict.fromkeys(PIECES)) + len(SPECIAL)
EOS = VOCAB - 2


def byte_level_tokenizer() -> Tokenizer:
    """Ids are pieces of bytes, as in byte-level BPE; the last ids are special."""
    characters = {0x21 + i: chr(0x21 + i) for i in range(94)}
    others = [byte for byte in range(256) if byte not in characters and not (0xA1 <= byte <= 0xFF and byte != 0xAD)]
    characters.update({byte: chr(byte) for byte in range(0xA1, 0x100) if byte != 0xAD})
    characters.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    pieces = list(dict.fromkeys(PIECES))
    vocab = {"".join(characters[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    assert tokenizer.get_vocab_size() == VOCAB
    assert tokenizer.decode(list(range(len(pieces)))).encode(errors="replace").startswith("aé€\U0001f600b".encode())
    return tokenizer


TOKENIZER = byte_level_tokenizer()


def model(agreement: float) -> LoadedModel:
    loaded = load_toy(f"toy:vocab={VOCAB},seed=6,scale=1.6,eos={EOS},agreement={agreement}")
    description = dataclasses.replace(loaded.description, tokenizer_json=TOKENIZER.to_str().encode())
    return dataclasses.replace(loaded, description=description)


@pytest.fixture
async def client() -> AsyncIterator[outrider.Client]:
    async with in_process_stack(model(1.0), model(0.85)) as stack, outrider.Client(stack.address) as client:
        yield client


def random_options(rng: random.Random) -> dict[str, Any]:
    max_tokens = rng.choice((1, 2, 5, 24, 40))
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": rng.choice((0, 0, min(3, max_tokens), max_tokens)),
        "temperature": rng.choice((0.0, 0.8, 1.2)),
        "seed": rng.randrange(2**64),
        "repetition_penalty": rng.choice((1.0, 1.2)),
        "frequency_penalty": rng.choice((0.0, 0.4)),
        "logprobs": True,
        "top_logprobs": rng.choice((0, 2)),
        "skip_special_tokens": rng.random() < 0.7,
        "ignore_eos": rng.random() < 0.3,
        "include_stop_str_in_output": rng.random() < 0.5,
        "stop": rng.sample(["STOP", "a", "é", "€x", "\ufffd", "b.", "Q0", "!", "<end>", " "], rng.choice((0, 1, 3))),
    }
    if rng.random() < 0.3:
        options["stop_token_ids"] = rng.sample(range(VOCAB), 2)
    return options


def check_identities(answer: Any, resumed: tuple[int, ...], options: dict[str, Any]) -> None:
    spec, ids = answer.speculation, answer.token_ids
    assert answer.usage.completion_tokens == len(resumed) + len(ids)
    assert len(ids) == len(answer.origins)
    if ids:
        assert len(ids) == len(answer.logprobs.token_logprobs)
        assert [len(row) for row in answer.logprobs.top] == [options["top_logprobs"]] * len(answer.logprobs.top)
    counted = Counter(answer.origins)
    assert spec.num_accepted_draft_tokens == counted[Origin.ACCEPTED] == sum(spec.num_accepted_tokens_per_pos)
    assert spec.num_correction_tokens == counted[Origin.CORRECTION]
    assert spec.num_bonus_tokens == counted[Origin.BONUS]
    assert spec.num_plain_tokens == counted[Origin.PLAIN]
    assert sum(counted.values()) == len(ids)
    assert spec.num_spec_steps == sum(spec.acceptance_histogram) == sum(spec.gamma_histogram[1:])
    assert spec.num_draft_tokens == sum(spec.num_draft_tokens_per_pos)
    assert spec.num_draft_tokens == sum(i * n for i, n in enumerate(spec.gamma_histogram))
    assert spec.num_accepted_draft_tokens == sum(i * n for i, n in enumerate(spec.acceptance_histogram))
    plain_rounds = spec.gamma_histogram[0] if spec.gamma_histogram else 0
    assert spec.num_plain_tokens == plain_rounds


def check_text(text: str, ids: tuple[int, ...], answer: Any, options: dict[str, Any]) -> None:
    """`text` and `ids` are the whole output."""
    full = TOKENIZER.decode(list(ids), skip_special_tokens=options["skip_special_tokens"])
    stop_ids = {*options.get("stop_token_ids", ()), *(() if options["ignore_eos"] else (EOS,))}
    if answer.finish_reason == "length":
        assert len(ids) == options["max_tokens"]
        assert text == full
    elif isinstance(answer.matched_stop, str):
        assert answer.matched_stop in options["stop"]
        end = full.find(answer.matched_stop) + len(answer.matched_stop)
        kept = text if options["include_stop_str_in_output"] else text + answer.matched_stop
        assert full.startswith(kept)
        assert end > 0
        assert len(ids) > options["min_tokens"]
    else:
        assert answer.matched_stop == ids[-1]
        assert ids[-1] in stop_ids
        assert len(ids) > options["min_tokens"]
        assert text == full
    assert not stop_ids & set(ids[:-1])


async def test_everything_ends_at_one_token(client: outrider.Client) -> None:
    rng = random.Random(3)
    finishes: Counter[str] = Counter()
    num_cuts = num_drafted = num_replaced = 0
    for number in range(scaled(400)):
        options = random_options(rng)
        prompt = [rng.randrange(VOCAB - 2) for _ in range(3)]
        plain = await client.complete(prompt, num_speculative_tokens=0, **options)
        answers = [(plain, ())]
        for drafting in ({"num_speculative_tokens": rng.choice((1, 3, 8)), "drafter": "model"}, {}):
            answer = await client.complete(prompt, **drafting, **options)
            assert (answer.token_ids, answer.text) == (plain.token_ids, plain.text), (number, options)
            assert (answer.finish_reason, answer.matched_stop) == (plain.finish_reason, plain.matched_stop)
            assert answer.logprobs == plain.logprobs
            answers.append((answer, ()))
            num_drafted += answer.speculation.num_draft_tokens
        # what had been sent with the first n ids, by the plain run's chunks of one token each
        sent = [""]
        for chunk in plain.chunks:
            assert len(chunk.token_ids) == 1
            sent.append(sent[-1] + chunk.text)
        for cut in {0, len(plain.token_ids), rng.randrange(len(plain.token_ids) + 1)}:
            resumed = plain.token_ids[:cut]
            rest = await client.complete(
                prompt, resume_token_ids=resumed, num_speculative_tokens=rng.choice((0, 3)),
                acceptance="coupled", prompt_hash=plain.started.prompt_hash, **options,
            )  # fmt: skip
            assert rest.token_ids == plain.token_ids[cut:], (number, cut, options)
            assert sent[cut] + rest.text == plain.text, (number, cut, options)
            assert (rest.finish_reason, rest.matched_stop) == (plain.finish_reason, plain.matched_stop)
            answers.append((rest, resumed))
            num_cuts += 1
        check_text(plain.text, plain.token_ids, plain, options)
        for answer, resumed in answers:
            check_identities(answer, resumed, options)
        finishes[f"{plain.finish_reason} {type(plain.matched_stop).__name__}"] += 1
        num_replaced += "\ufffd" in plain.text
    assert set(finishes) == {"length NoneType", "stop str", "stop int"}, finishes
    assert num_drafted > 0
    assert num_replaced > 0, "INCONCLUSIVE: no half code point"


@pytest.mark.parametrize("rule", ["token", "block"])
async def test_sampled_rules_and_several_choices_account_for_every_token(client: outrider.Client, rule: str) -> None:
    rng = random.Random(rule)
    num_drafted = 0
    for _ in range(scaled(150)):
        options = random_options(rng) | {"acceptance": rule, "temperature": 1.0}
        prompt = [rng.randrange(VOCAB - 2) for _ in range(3)]
        gamma = {"num_speculative_tokens": rng.choice((1, 4))}
        whole = await client.complete(prompt, **gamma, **options)
        cut = rng.randrange(len(whole.token_ids) + 1)
        resumed = whole.token_ids[:cut]
        rest = await client.complete(prompt, resume_token_ids=resumed, **gamma, **options)
        for answer, before in ((whole, ()), (rest, resumed)):
            check_identities(answer, before, options)
            num_drafted += answer.speculation.num_draft_tokens
        check_text(whole.text, whole.token_ids, whole, options)
        if cut == len(whole.token_ids):
            assert (rest.token_ids, rest.text, rest.finish_reason) == ((), "", whole.finish_reason)
        ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
        texts = dict.fromkeys(ids, "")
        completes = {}
        async for event in client.generate(prompt, n=3, **gamma, **options):
            if isinstance(event, outrider.Chunk):
                assert event.index not in completes
                ids[event.index] += event.token_ids
                texts[event.index] += event.text
            elif isinstance(event, outrider.Complete):
                completes[event.index] = event
        assert completes.keys() == ids.keys()
        for index, complete in completes.items():
            assert complete.usage.completion_tokens == len(ids[index])
            check_text(texts[index], tuple(ids[index]), complete, options)
    assert num_drafted > 0, "INCONCLUSIVE"

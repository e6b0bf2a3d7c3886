"""Texts of a given form through the services: valid whatever γ, drafter and rule, and drafts that still stand."""

import asyncio
import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from conftest import scaled
from stack import in_process_stack

from coordinator.drafting import DraftSide
from outrider import Client, Completion
from outrider.errors import Internal, InvalidArgument, OutriderError
from outrider.toy_text import toy_char, toy_id

TARGET, DRAFT = "toy:vocab=128,seed=1", "toy:vocab=128,seed=1,agreement=0.8"
STOP = 127
PROMPT = [1, 2, 3]
KIND = {"enum": ["river", "lake"]}


def an_object(optional: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SCHEMAS = (
    an_object(kind=KIND, is_long={"type": "boolean"}),
    an_object(name={"type": "string", "maxLength": 8}, kind=KIND, is_long={"type": "boolean"}),
    an_object(
        year={"type": "integer", "minimum": 1000, "maximum": 2999},
        code={"type": "string", "pattern": "^[A-C]{2}-[0-9]{1,3}$"},
    ),
    an_object(kinds={"type": "array", "items": KIND, "minItems": 1, "maxItems": 3}),
    an_object(at=an_object(x={"type": "integer", "minimum": -9, "maximum": 9}, y={"type": "null"}), kind=KIND),
    an_object(kind=KIND, note={"type": "string", "maxLength": 6}, optional=("note",)),
    an_object(value={"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 5}, {"const": 7}]}),
    {
        "$defs": {"one": an_object(k=KIND)},
        "type": "array",
        "items": {"$ref": "#/$defs/one"},
        "minItems": 1,
        "maxItems": 2,
    },
)
"""Of bounded length: with enough tokens every text of them ends."""
RULES_THAT_OVERFLOW_A_STACK = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4500)) + 'r4500: "a"'
GAMMAS = (0, 3, 8)


async def texts(
    client: Client, prompts: list[Any], schemas: Sequence[dict[str, Any]] = (), **options: Any
) -> list[Completion]:
    """schemas: taken in turn."""

    async def one(index: int, prompt: Any) -> Completion:
        form = {"json_schema": schemas[index % len(schemas)]} if schemas else {}
        return await client.complete(prompt, **{"seed": index, **form, **options})

    return await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))


async def json_texts(client: Client, prompts: list[Any], **options: Any) -> list[Completion]:
    """Each of its schema, which is looked at."""
    answers = await texts(client, prompts, SCHEMAS, **options)
    for answer, schema in zip(answers, itertools.cycle(SCHEMAS), strict=False):
        assert answer.finish_reason == "stop", answer.text
        jsonschema.validate(json.loads(text_of(answer)), schema)
    return answers


def text_of(answer: Completion) -> str:
    """Without the stop token, which a toy spells like any other."""
    return answer.text.removesuffix(toy_char(STOP))


def drafted_and_accepted(answers: list[Completion]) -> tuple[int, int]:
    told = [answer.speculation for answer in answers]
    return sum(one.num_draft_tokens for one in told), sum(one.num_accepted_draft_tokens for one in told)


@pytest.mark.parametrize("rule", ["greedy", "coupled", "token", "block"])
async def test_json_of_a_toy_is_valid_and_drafts_are_masked_too(rule: str) -> None:
    options: dict[str, Any] = {"temperature": 0.0} if rule == "greedy" else {"acceptance": rule}
    prompts = [[1 + index % 90, 2, 3 + index % 7] for index in range(scaled(200))]
    by_gamma = {}
    async with in_process_stack(TARGET, DRAFT) as stack, Client(stack.address) as client:
        for gamma in GAMMAS:
            by_gamma[gamma] = await json_texts(
                client, prompts, max_tokens=120, stop_token_ids=[STOP], num_speculative_tokens=gamma, drafter="model",
                **options,
            )  # fmt: skip
    if rule in ("greedy", "coupled"):
        assert len({tuple(answer.token_ids for answer in answers) for answers in by_gamma.values()}) == 1
    assert drafted_and_accepted(by_gamma[8])[0] > 0, "INCONCLUSIVE"
    drafted, accepted = drafted_and_accepted(by_gamma[3])
    assert drafted > 0, "INCONCLUSIVE"
    assert accepted > drafted / 3, "most of a JSON text is given by its schema: masked drafts agree on it"


@pytest.mark.slow
async def test_json_of_a_real_model_is_valid_and_the_same_at_every_gamma() -> None:
    questions = ["a river", "a lake", "the Nile", "the longest river", "a small lake", "a river in France"]
    prompts = [
        [{"role": "user", "content": f"Describe {questions[index % 6]} as JSON, number {index}."}]
        for index in range(scaled(200))
    ]
    by_gamma = {}
    heads = {"heads": ("smollm2-135m-eagle3",)}
    async with in_process_stack("smollm2-135m", None, target_worker=heads) as stack, Client(stack.address) as client:
        for gamma in GAMMAS:
            by_gamma[gamma] = await json_texts(
                client, prompts, max_tokens=96, temperature=0.0, num_speculative_tokens=gamma
            )
    for gamma in (3, 8):
        drafted, accepted = drafted_and_accepted(by_gamma[gamma])
        assert 0 < accepted <= drafted, "INCONCLUSIVE"
    ids = [[answer.token_ids for answer in answers] for answers in by_gamma.values()]
    assert ids[0] == ids[1] == ids[2]


async def test_other_forms_and_every_drafter() -> None:
    async with in_process_stack(TARGET, DRAFT, draft_worker={"drafters": ("model", "tree")}) as stack:
        async with Client(stack.address) as client:
            for drafter in ("model", "tree", "lookup", "suffix", "auto"):
                common = {"max_tokens": 60, "stop_token_ids": [STOP], "drafter": drafter}
                for answer in await texts(client, [PROMPT] * 4, regex="(ab|cd){2,6}", **common):
                    assert re.fullmatch("(ab|cd){2,6}", text_of(answer))
                for answer in await texts(client, [PROMPT] * 4, grammar='start: "(" start ")" | /[xy]/', **common):
                    assert re.fullmatch(r"\(*[xy]\)*", text_of(answer)) or answer.finish_reason == "length"


async def test_a_form_ends_the_text_within_a_draft() -> None:
    async with in_process_stack(TARGET, "toy:vocab=128,seed=1") as stack, Client(stack.address) as client:
        answer = await client.complete(
            PROMPT, regex="a{3}", temperature=0.0, max_tokens=60, stop_token_ids=[STOP], num_speculative_tokens=8
        )
        assert (text_of(answer), answer.finish_reason, answer.usage.completion_tokens) == ("aaa", "stop", 4)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"json_schema": {"type": "objct"}}, "structured_output.json_schema"),
        ({"regex": "(("}, "structured_output.regex"),
        ({"grammar": "start: foo"}, "structured_output.grammar"),
        ({"regex": "a" * 65_537}, "structured_output.regex"),
        ({"json_schema": {"type": "integer", "multipleOf": 99_999_999}}, "structured_output.json_schema"),
        ({"grammar": RULES_THAT_OVERFLOW_A_STACK}, "structured_output.grammar"),
        ({"regex": "a", "stop_token_ids": []}, "stopping.stop_token_ids"),
        ({"regex": "a", "min_tokens": 2}, "stopping.min_tokens"),
        ({"regex": "a", "bad_words": ["b"]}, "sampling.bad_words"),
        ({"regex": "a", "allowed_token_ids": [1]}, "sampling.allowed_token_ids"),
    ],
)
async def test_what_cannot_be_kept_is_refused(options: dict[str, Any], field: str) -> None:
    async with in_process_stack(TARGET, None) as stack, Client(stack.address) as client:
        with pytest.raises(InvalidArgument) as caught:
            await client.complete(PROMPT, **{"max_tokens": 8, "stop_token_ids": [STOP], **options})
    assert caught.value.field == field


async def test_a_form_that_takes_too_long_is_refused_and_hurts_nobody() -> None:
    async with in_process_stack(TARGET, DRAFT, num_targets=2) as stack, Client(stack.address) as client:
        other = asyncio.create_task(client.complete(PROMPT, max_tokens=400, ignore_eos=True, seed=1))
        with pytest.raises(InvalidArgument) as caught:
            await client.complete(PROMPT, regex="(a{1000}){1000}", max_tokens=8, stop_token_ids=[STOP])
        assert (caught.value.field, caught.value.reason) == ("structured_output", "GRAMMAR_TOO_COMPLEX")
        assert len((await other).token_ids) == 400


@pytest.mark.parametrize("form", [{"regex": "[A-C]{3}&B"}, {"grammar": f'start: /[A-C]{{3}}/ <[{toy_id("&")}]> "B"'}])
async def test_a_form_with_a_stop_token_inside_is_its_clients_error_and_no_workers(
    form: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether draft or target finds it: with one draft a round the draft worker is asked right where it is."""
    lost: list[OutriderError] = []
    lose = DraftSide._lose
    monkeypatch.setattr(
        DraftSide, "_lose", lambda side, error, *more: lost.append(error) or lose(side, error, *more)
    )  # fmt: skip
    drafters = {"draft_worker": {"drafters": ("model", "tree")}, "target_worker": {"heads": ("toy:agreement=0.8",)}}
    async with in_process_stack(TARGET, DRAFT, **drafters) as stack, Client(stack.address) as client:
        others: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "num_speculative_tokens": 3, "drafter": "model"}
        asked: dict[str, Any] = {"stop_token_ids": [STOP, toy_id("&")], "max_tokens": 60, **form}
        drafting = [(0, "model"), *itertools.product((1, 5), ("model", "tree", "toy"))]
        for rule, (gamma, drafter) in itertools.product(("coupled", "token", "block"), drafting):
            with pytest.raises(InvalidArgument, match="structured_output") as caught:
                await client.complete(
                    PROMPT, acceptance=rule, drafter=drafter, num_speculative_tokens=gamma, **asked
                )  # fmt: skip
            assert (caught.value.field, caught.value.reason) == ("stopping.stop_token_ids", "NO_TOKEN_LEFT")
        answer = await client.complete(PROMPT, **others)
        assert answer.speculation.num_draft_tokens > 0
        assert not [error for error in lost if isinstance(error, Internal | InvalidArgument)]


async def test_a_text_of_another_form_is_not_resumed() -> None:
    async with in_process_stack(TARGET, None) as stack, Client(stack.address) as client:
        options: dict[str, Any] = {"regex": "ab*", "max_tokens": 8, "stop_token_ids": [STOP], "seed": 1}
        with pytest.raises(InvalidArgument) as caught:
            await client.complete(PROMPT, resume_token_ids=[toy_id("b"), toy_id("b")], **options)
    assert caught.value.field == "resume_token_ids"
    assert "structured_output" in caught.value.message

"""OpenAI's own Python client against the gateway: its texts are those of `outrider.Client`, whatever way they come."""

import asyncio
import json
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio
from gateway_stack import KEY, TARGET, Front, front

from outrider import Completion
from outrider.results import Chunk

MODEL = TARGET
MESSAGES: list[Any] = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
PROMPT = "abc"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["river", "lake"]}, "long": {"type": "boolean"}},
    "required": ["kind", "long"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served() -> AsyncIterator[Front]:
    async with front() as running:
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def expected(served: Front, prompt: Any, **options: Any) -> Completion:
    answer = await served.client.complete(prompt, **options)
    assert answer.token_ids
    return answer


async def test_models_are_listed_and_found(served: Front) -> None:
    listed = [model async for model in await served.openai.models.list()]
    info = await served.client.model_info()
    assert [model.id for model in listed] == [info.model]
    found = await served.openai.models.retrieve(info.model)
    assert found == listed[0]
    assert found.model_extra is not None
    assert found.model_extra["max_model_len"] == info.context_length
    with pytest.raises(openai.NotFoundError) as unknown:
        await served.openai.models.retrieve("org/nobody")
    assert unknown.value.code == "model_not_found"


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"seed": 7, "temperature": 1.0}], ids=["greedy", "seeded"])
async def test_chat_says_what_our_client_says(served: Front, options: dict[str, Any]) -> None:
    plain = await expected(served, MESSAGES, max_tokens=24, **options)
    answer = await served.openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=24, **options
    )
    (choice,) = answer.choices
    assert choice.message.content == plain.text
    assert (choice.message.role, choice.finish_reason) == ("assistant", plain.finish_reason)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens
    assert answer.usage.completion_tokens == len(plain.token_ids)
    assert answer.object == "chat.completion"
    assert answer.system_fingerprint == plain.started.model_fingerprint


async def test_streamed_chat_is_the_same_text_and_ends_with_usage_and_metrics(served: Front) -> None:
    plain = await expected(served, MESSAGES, max_tokens=24, seed=7)
    stream = await served.openai.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=24,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"num_speculative_tokens": 3, "drafter": "model"},
    )
    pieces = [piece async for piece in stream]
    *texts, last = pieces
    assert "".join(piece.choices[0].delta.content or "" for piece in texts) == plain.text
    assert texts[0].choices[0].delta.role == "assistant"
    assert all(piece.choices[0].delta.role is None for piece in texts[1:])
    assert [piece.choices[0].finish_reason for piece in texts if piece.choices[0].finish_reason] == ["length"]
    assert all(piece.usage is None for piece in texts)
    assert not last.choices
    assert last.usage is not None
    assert last.usage.completion_tokens == 24
    assert last.model_extra is not None
    told = last.model_extra["metrics"]["speculative_decoding"]
    assert told["num_draft_tokens"] > 0
    assert told["num_spec_tokens"] == 3
    assert len(told["acceptance_histogram"]) == 4
    assert sum(told["acceptance_histogram"]) == told["num_spec_steps"] > 0
    assert sum(i * n for i, n in enumerate(told["acceptance_histogram"])) == told["num_accepted_draft_tokens"]
    assert told["mean_acceptance_length"] == 1 + told["num_accepted_draft_tokens"] / told["num_spec_steps"]
    assert told["draft_acceptance_rate"] == told["num_accepted_draft_tokens"] / told["num_draft_tokens"]


async def test_completions_say_what_our_client_says_streamed_and_not(served: Front) -> None:
    plain = await expected(served, PROMPT, max_tokens=24, seed=3)
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "seed": 3}
    whole = await served.openai.completions.create(**options)
    stream = await served.openai.completions.create(**options, stream=True)
    streamed = "".join([piece.choices[0].text async for piece in stream])
    assert whole.choices[0].text == streamed == plain.text
    ids = await served.client.tokenize(PROMPT)
    by_ids = await served.openai.completions.create(**{**options, "prompt": ids})
    assert by_ids.choices[0].text == plain.text


async def test_n_choices_and_several_prompts_are_numbered_through(served: Front) -> None:
    choices: dict[int, str] = {}
    async for event in served.client.generate(PROMPT, max_tokens=8, seed=5, n=2):
        if isinstance(event, Chunk):
            choices[event.index] = choices.get(event.index, "") + event.text
    other = await expected(served, "xy", max_tokens=8, seed=5)
    options: dict[str, Any] = {"model": MODEL, "prompt": [PROMPT, "xy"], "max_tokens": 8, "seed": 5, "n": 2}
    whole = await served.openai.completions.create(**options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in whole.choices]
    assert texts[:3] == [choices[0], choices[1], other.text]
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3 + 2, 4 * 8)
    stream = await served.openai.completions.create(**options, stream=True, stream_options={"include_usage": True})
    streamed, usage = [""] * 4, None
    async for piece in stream:
        usage = piece.usage or usage
        for choice in piece.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_chat_logprobs_are_those_of_our_client_with_text_and_bytes(served: Front) -> None:
    plain = await expected(served, MESSAGES, max_tokens=12, seed=2, logprobs=True, top_logprobs=3)
    assert plain.logprobs is not None
    options: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "seed": 2}
    whole = await served.openai.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    told = whole.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [entry.logprob for entry in told.content] == pytest.approx(plain.logprobs.token_logprobs)
    assert b"".join(bytes(entry.bytes or ()) for entry in told.content).decode() == plain.text
    assert "".join(entry.token for entry in told.content) == plain.text
    for entry, row in zip(told.content, plain.logprobs.top, strict=True):
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx([value for _, value in row])
    stream = await served.openai.chat.completions.create(**options, logprobs=True, top_logprobs=3, stream=True)
    streamed = []
    async for piece in stream:
        if (part := piece.choices[0].logprobs) is not None and part.content:
            streamed += part.content
    assert [entry.token for entry in streamed] == [entry.token for entry in told.content]


async def test_completion_logprobs_have_offsets_into_the_text(served: Front) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "seed": 2, "logprobs": 2}
    whole = await served.openai.completions.create(**options)
    told = whole.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.text_offset == list(range(12))
    assert "".join(told.tokens) == whole.choices[0].text
    assert told.top_logprobs is not None
    assert {len(row) for row in told.top_logprobs} == {2, 3}, "one more where it is unlikely"
    for row, token, logprob in zip(told.top_logprobs, told.tokens, told.token_logprobs or (), strict=True):
        assert row[token] == logprob
        assert len(row) == 2 or logprob == min(row.values())
    alone = await served.openai.completions.create(**{**options, "logprobs": 0})
    assert alone.choices[0].logprobs is not None
    assert [list(row) for row in alone.choices[0].logprobs.top_logprobs or ()] == [[token] for token in told.tokens]
    stream = await served.openai.completions.create(**options, stream=True)
    offsets: list[int] = []
    async for piece in stream:
        if piece.choices[0].logprobs is not None:
            offsets += piece.choices[0].logprobs.text_offset or ()
    assert offsets == told.text_offset


async def test_stop_strings_end_the_text_and_are_told(served: Front) -> None:
    plain = await expected(served, PROMPT, max_tokens=24, temperature=0.0)
    stop = plain.text[4:6]
    for given in (stop, [stop, "~~~~"]):
        answer = await served.openai.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, stop=given
        )
        (choice,) = answer.choices
        assert choice.text == plain.text[: plain.text.index(stop)]
        assert choice.finish_reason == "stop"
        assert choice.model_extra is not None
        assert choice.model_extra["stop_reason"] == stop


async def test_an_end_of_the_models_own_is_no_stop_reason() -> None:
    """As vLLM has it: told is an id that the request named."""
    ends_at_7, ends_at_9 = {"logit_bias": {"7": 100}}, {"logit_bias": {"9": 100}}
    async with front(f"{TARGET},eos=7", None) as ending:
        options: dict[str, Any] = {"model": f"{TARGET},eos=7", "prompt": PROMPT, "max_tokens": 8, "seed": 3}
        for extra, reason in (
            (ends_at_7, None),
            ({**ends_at_7, "stop_token_ids": [9]}, None),
            ({**ends_at_9, "stop_token_ids": [9]}, 9),
        ):
            whole = await ending.openai.completions.create(**options, extra_body=extra)
            pieces = await ending.openai.completions.create(**options, extra_body=extra, stream=True)
            last = [piece.choices[0] async for piece in pieces][-1]
            for choice in (whole.choices[0], last):
                assert choice.finish_reason == "stop"
                assert (choice.model_extra or {})["stop_reason"] == reason


async def test_a_text_may_begin_with_its_prompt(served: Front) -> None:
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "seed": 3, "n": 2}
    ids = await served.client.tokenize("xy")
    for prompts in ([PROMPT, "xy"], [[int(i) for i in await served.client.tokenize(PROMPT)], ids]):
        plain = await served.openai.completions.create(prompt=prompts, **options)
        echoed = await served.openai.completions.create(prompt=prompts, **options, echo=True)
        wanted = [PROMPT + choice.text for choice in plain.choices[:2]]
        wanted += ["xy" + choice.text for choice in plain.choices[2:]]
        assert [choice.text for choice in echoed.choices] == wanted
        assert echoed.usage is not None
        assert plain.usage is not None
        assert echoed.usage.completion_tokens == plain.usage.completion_tokens
        streamed = [""] * 4
        async for piece in await served.openai.completions.create(prompt=prompts, **options, echo=True, stream=True):
            streamed[piece.choices[0].index] += piece.choices[0].text
        assert streamed == wanted


async def test_every_chunk_tells_the_usage_so_far_and_no_more(served: Front) -> None:
    """What was cached is known at the end, and not said to be 0 before."""
    options: dict[str, Any] = {"model": MODEL, "prompt": "usage!" * 16, "max_tokens": 12, "seed": 1}
    first = await served.openai.completions.create(**options)
    stream = await served.openai.completions.create(
        **options, stream=True, extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    )
    told = [piece.usage async for piece in stream]
    assert all(usage is not None for usage in told)
    counts = [usage.completion_tokens for usage in told if usage is not None]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    *before, end, last = [usage.prompt_tokens_details for usage in told if usage is not None]
    assert before
    assert set(before) == {None}
    assert end == last
    assert last is not None
    assert last.cached_tokens
    assert first.usage is not None


async def test_the_version_is_told(served: Front) -> None:
    assert (await served.http.get("/version")).json() == {"version": version("outrider")}


async def test_sampling_parameters_of_openai_and_vllm_are_passed_on(served: Front) -> None:
    ours: dict[str, Any] = {
        "temperature": 0.8, "top_p": 0.95, "presence_penalty": 0.5, "frequency_penalty": 0.25, "seed": 11,
        "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
        "stop_token_ids": [90], "bad_words": ["!"], "logit_bias": {5: 3.0, 6: -100.0},
        "include_stop_str_in_output": True, "skip_special_tokens": False, "priority": 1, "acceptance": "coupled",
        "max_speculative_tokens": 4, "drafter": "lookup",
    }  # fmt: skip
    of_openai = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed")
    plain = await expected(served, MESSAGES, max_tokens=16, **ours)
    extra = {name: value for name, value in ours.items() if name not in (*of_openai, "logit_bias")}
    answer = await served.openai.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=16,
        logit_bias={"5": 3, "6": -100},
        user="somebody",
        extra_body=extra,
        **{name: ours[name] for name in of_openai},
    )
    assert answer.choices[0].message.content == plain.text
    neutral = await expected(served, MESSAGES, max_tokens=16, seed=11)
    assert neutral.text != plain.text


async def test_a_schema_holds_and_its_text_is_our_clients(served: Front) -> None:
    options: dict[str, Any] = {"max_tokens": 64, "stop_token_ids": [127], "seed": 4}
    plain = await expected(served, MESSAGES, json_schema=SCHEMA, **options)
    form: Any = {"type": "json_schema", "json_schema": {"name": "water", "strict": True, "schema": SCHEMA}}
    answers = [
        await served.openai.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=64,
            seed=4,
            response_format=form,
            extra_body={"stop_token_ids": [127], "num_speculative_tokens": num_drafts},
        )
        for num_drafts in (0, 3)
    ]
    for answer in answers:
        text = answer.choices[0].message.content
        assert text == plain.text
        jsonschema.validate(json.loads(text[:-1]), SCHEMA)  # a toy spells its stop token too
    told = answers[1].model_extra
    assert told is not None
    assert told["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("form", "alike"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"regex": "a{3,5}b"}}, {"regex": "a{3,5}b"}),
        ({"guided_regex": "a{3,5}b"}, {"regex": "a{3,5}b"}),
        ({"structured_outputs": {"choice": ["a.c", "x|y"]}}, {"regex": r"a\.c|x\|y"}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"guided_grammar": 'start: "(" /[a-c]+/ ")"'}, {"grammar": 'start: "(" /[a-c]+/ ")"'}),
        ({"response_format": {"type": "text"}}, {}),
    ],
)
async def test_other_forms_are_ours_too(served: Front, form: dict[str, Any], alike: dict[str, Any]) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "seed": 9, "stop_token_ids": [127]}
    plain = await expected(served, PROMPT, **options, **alike)
    answer = await served.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, seed=9,
                                                    extra_body={"stop_token_ids": [127], **form})  # fmt: skip
    assert answer.choices[0].text == plain.text


async def test_steps_tell_where_each_token_came_from(served: Front) -> None:
    asked: dict[str, Any] = {"report_steps": True, "num_speculative_tokens": 3, "drafter": "model"}
    options: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "seed": 7}
    whole = await served.openai.chat.completions.create(**options, extra_body=asked)
    assert whole.choices[0].model_extra is not None
    steps = whole.choices[0].model_extra["steps"]
    tokens = [token for step in steps for token in step["tokens"]]
    assert bytes(b for token in tokens for b in token["bytes"]).decode() == whole.choices[0].message.content
    assert {token["origin"] for token in tokens} <= {"accepted", "correction", "bonus", "plain"}
    assert any(token["origin"] == "accepted" for token in tokens)
    assert whole.model_extra is not None
    told = whole.model_extra["metrics"]["speculative_decoding"]
    assert sum(told["per_step_accepted"]) == told["num_accepted_draft_tokens"]
    assert sum(told["per_step_drafted"]) == told["num_draft_tokens"]
    assert whole.model_extra["outrider"] == whole.model_extra["outrider"] | {
        "seed": 7, "acceptance": "coupled", "drafter": "model", "num_speculative_tokens": 3,
    }  # fmt: skip
    stream = await served.openai.chat.completions.create(**options, extra_body=asked, stream=True)
    streamed = []
    async for piece in stream:
        streamed += (piece.choices[0].model_extra or {}).get("steps", [])
    assert [token for step in streamed for token in step["tokens"]] == tokens
    assert all(step["round_ms"] > 0 for step in streamed)


async def test_a_fresh_seed_is_told_and_says_the_text_again(served: Front) -> None:
    first = await served.openai.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=16, extra_body={"acceptance": "coupled"}
    )
    assert first.model_extra is not None
    again = await expected(served, PROMPT, max_tokens=16, seed=first.model_extra["outrider"]["seed"])
    assert again.text == first.choices[0].text


async def test_each_of_several_prompts_tells_its_own_seed(served: Front) -> None:
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 16, "extra_body": {"acceptance": "coupled"}}
    prompts = [PROMPT, PROMPT[::-1]]
    whole = await served.openai.completions.create(prompt=prompts, **options)
    seeds = [(choice.model_extra or {})["outrider"]["seed"] for choice in whole.choices]
    assert len(set(seeds)) == 2
    for prompt, seed, choice in zip(prompts, seeds, whole.choices, strict=True):
        assert (await expected(served, prompt, max_tokens=16, seed=seed)).text == choice.text
    texts, streamed_seeds = ["", ""], {}
    async for piece in await served.openai.completions.create(prompt=prompts, **options, stream=True):
        texts[piece.choices[0].index] += piece.choices[0].text
        if "outrider" in (piece.model_extra or {}):
            streamed_seeds[piece.choices[0].index] = (piece.model_extra or {})["outrider"]["seed"]
    for index, prompt in enumerate(prompts):
        assert (await expected(served, prompt, max_tokens=16, seed=streamed_seeds[index])).text == texts[index]


async def test_the_request_id_is_the_callers_and_finds_the_trace(served: Front) -> None:
    raw = await served.openai.completions.with_raw_response.create(
        model=MODEL, prompt=PROMPT, max_tokens=4, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().id == "cmpl-mine-1"
    assert await served.client.trace("mine-1")


async def test_cached_tokens_are_told(served: Front) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "cached!" * 16, "max_tokens": 4}
    await served.openai.completions.create(**options)
    again = await served.openai.completions.create(**options)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens > 0


async def test_the_sync_client_works_alike(served: Front) -> None:
    plain = await expected(served, MESSAGES, max_tokens=12, seed=1)

    def ask() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as client:
            options: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "seed": 1}
            whole = client.chat.completions.create(**options).choices[0].message.content
            pieces = client.chat.completions.create(**options, stream=True)
            return whole, "".join(piece.choices[0].delta.content or "" for piece in pieces)

    assert await asyncio.to_thread(ask) == (plain.text, plain.text)

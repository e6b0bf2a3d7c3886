"""Every field is validated: each bad value with its status, its field and its limit in the message."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from coordinator.model import ServedModel
from coordinator.request import ResolvedRequest, resolve, resolve_request_id
from coordinator.text.chat import ChatTemplate
from coordinator.text.tokenizer import ToyCodec
from outrider.errors import OutriderError
from outrider.lm.interface import ModelDescription
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import AcceptanceRule
from outrider.settings import CoordinatorSettings
from outrider.v1 import generation_pb2 as pb

CONTEXT = 100
VOCAB = 64
DESCRIPTION = ModelDescription(
    model="toy",
    model_fingerprint="m",
    tokenizer_fingerprint="t",
    vocab_size=VOCAB,
    context_length=CONTEXT,
    eos_token_ids=(7,),
    generation_defaults={"temperature": 0.6, "top_k": 20},
)
MODEL = ServedModel(DESCRIPTION, ToyCodec(VOCAB), None, max_draft_tokens=16, drafters=("model", "lookup"))
SETTINGS = CoordinatorSettings()


def request(change: Callable[[pb.GenerateRequest], object] = lambda r: None) -> pb.GenerateRequest:
    message = pb.GenerateRequest(text="ABC")
    change(message)
    return message


def resolved(change: Callable[[pb.GenerateRequest], object] = lambda r: None, **settings: object) -> ResolvedRequest:
    return resolve(request(change), MODEL, SETTINGS.model_copy(update=settings), request_id="r")


def set_fields(section: str = "", **values: object) -> Callable[[pb.GenerateRequest], None]:
    def change(message: pb.GenerateRequest) -> None:
        target = getattr(message, section) if section else message
        for name, value in values.items():
            if isinstance(value, list):
                getattr(target, name).extend(value)
            elif isinstance(value, dict):
                getattr(target, name).update(value)
            else:
                setattr(target, name, value)

    return change


def ids(values: list[int]) -> Callable[[pb.GenerateRequest], None]:
    return lambda message: message.token_ids.CopyFrom(pb.TokenIds(ids=values))


def every_id_stops(message: pb.GenerateRequest) -> None:
    set_fields("stopping", stop_token_ids=list(range(VOCAB)), min_tokens=1)(message)


def resumes_with_prompt_logprobs(message: pb.GenerateRequest) -> None:
    set_fields("output", prompt_logprobs=0)(message)
    set_fields(resume_token_ids=[1])(message)


def resumes_past_a_stop_token(message: pb.GenerateRequest) -> None:
    set_fields("stopping", stop_token_ids=[3], min_tokens=4)(message)
    set_fields(resume_token_ids=[1, 3, 1])(message)


def allowed(token_ids: list[int], **values: object) -> Callable[[pb.GenerateRequest], None]:
    def change(message: pb.GenerateRequest) -> None:
        message.sampling.allowed_token_ids.CopyFrom(pb.TokenIds(ids=token_ids))
        set_fields("sampling", **values)(message)

    return change


BAD = "INVALID_ARGUMENT"
REFUSED = [
    # change, status, field, what the message must name
    (lambda m: m.ClearField("text"), BAD, "prompt", "text, token_ids, chat"),
    (set_fields(text=""), BAD, "text", "at least one token"),
    (ids([]), BAD, "token_ids.ids", "at least one token"),
    (set_fields(text="A" * CONTEXT), BAD, "text", f"{CONTEXT} tokens.*at most {CONTEXT - 1}"),
    (set_fields(text="A" * 10_000_000), BAD, "text", f"at least 10000000 tokens.*at most {CONTEXT - 1}"),
    (ids([1] * CONTEXT), BAD, "token_ids.ids", f"at most {CONTEXT - 1}"),
    (ids([1, VOCAB]), BAD, "token_ids.ids", f"id {VOCAB} at index 1.*below {VOCAB}"),
    (set_fields(text="A€"), BAD, "text", "'€'"),
    (lambda m: m.chat.messages.add(role="user", content="A"), BAD, "chat", "no chat template"),
    (set_fields("sampling", temperature=math.nan), BAD, "sampling.temperature", "NaN.*0.01 to 100"),
    (set_fields("sampling", temperature=-1), BAD, "sampling.temperature", "-1.*0.01 to 100"),
    (set_fields("sampling", temperature=math.inf), BAD, "sampling.temperature", "inf.*0.01 to 100"),
    (set_fields("sampling", temperature=0.001), BAD, "sampling.temperature", "0.001.*0.01 to 100"),
    (set_fields("sampling", temperature=101), BAD, "sampling.temperature", "101.*0.01 to 100"),
    (set_fields("sampling", top_p=0), BAD, "sampling.top_p", "above 0 and at most 1"),
    (set_fields("sampling", top_p=2), BAD, "sampling.top_p", "above 0 and at most 1"),
    (set_fields("sampling", top_p=math.nan), BAD, "sampling.top_p", "NaN.*above 0 and at most 1"),
    (set_fields("sampling", min_p=-0.1), BAD, "sampling.min_p", "from 0 to 1"),
    (set_fields("sampling", min_p=1.1), BAD, "sampling.min_p", "from 0 to 1"),
    (set_fields("sampling", repetition_penalty=0), BAD, "sampling.repetition_penalty", "from 0.01 to 10"),
    (set_fields("sampling", repetition_penalty=1e-40), BAD, "sampling.repetition_penalty", "from 0.01 to 10"),
    (set_fields("sampling", repetition_penalty=11), BAD, "sampling.repetition_penalty", "from 0.01 to 10"),
    (set_fields("sampling", presence_penalty=2.1), BAD, "sampling.presence_penalty", "from -2 to 2"),
    (set_fields("sampling", frequency_penalty=math.nan), BAD, "sampling.frequency_penalty", "NaN.*from -2 to 2"),
    (set_fields("sampling", logit_bias={VOCAB: 1.0}), BAD, "sampling.logit_bias", f"below {VOCAB}"),
    (set_fields("sampling", logit_bias={3: 101.0}), BAD, r"sampling.logit_bias[3]", "from -100 to 100"),
    (set_fields("sampling", logit_bias={3: math.nan}), BAD, r"sampling.logit_bias[3]", "NaN.*from -100 to 100"),
    (allowed([]), BAD, "sampling.allowed_token_ids", "empty.*at least one"),
    (allowed([1, VOCAB]), BAD, "sampling.allowed_token_ids", f"id {VOCAB} at index 1.*below {VOCAB}"),
    (set_fields("sampling", bad_words=["A"] * 257), BAD, "sampling.bad_words", "257 words.*at most 256"),
    (set_fields("sampling", bad_words=["A", ""]), BAD, "sampling.bad_words[1]", "from 1 to 256"),
    (set_fields("sampling", bad_words=["  "]), BAD, "sampling.bad_words[0]", "0 without leading space.*from 1"),
    (set_fields("sampling", bad_words=["A" * 257]), BAD, "sampling.bad_words[0]", "257.*from 1 to 256"),
    (set_fields("sampling", bad_words=["A€"]), BAD, "sampling.bad_words[0]", "'€'"),
    (allowed([32], bad_words=["A"]), BAD, "sampling.allowed_token_ids", "at least one"),
    (
        set_fields("sampling", bad_words=[chr(33 + i) for i in range(VOCAB)]),
        BAD,
        "sampling.bad_words",
        "always be a next token",
    ),
    (set_fields("stopping", max_tokens=0), BAD, "stopping.max_tokens", "at least 1"),
    (set_fields("stopping", max_tokens=-5), BAD, "stopping.max_tokens", "-5.*at least 1"),
    (set_fields("stopping", max_tokens=98), BAD, "stopping.max_tokens", "98.*3 tokens leave 97.*100"),
    (set_fields("stopping", min_tokens=-1), BAD, "stopping.min_tokens", "from 0 to max_tokens"),
    (set_fields("stopping", max_tokens=5, min_tokens=6), BAD, "stopping.min_tokens", "6.*which is 5"),
    (set_fields("stopping", stop=["x"] * 17), BAD, "stopping.stop", "17 strings.*at most 16"),
    (set_fields("stopping", stop=["A", ""]), BAD, "stopping.stop[1]", "from 1 to 256"),
    (set_fields("stopping", stop=["A" * 257]), BAD, "stopping.stop[0]", "257.*from 1 to 256"),
    (set_fields("stopping", stop_token_ids=[VOCAB]), BAD, "stopping.stop_token_ids", f"below {VOCAB}"),
    (set_fields("output", top_logprobs=3), BAD, "output.top_logprobs", "needs output.logprobs"),
    (set_fields("output", logprobs=True, top_logprobs=21), BAD, "output.top_logprobs", "at most 20"),
    (set_fields("output", prompt_logprobs=21), BAD, "output.prompt_logprobs", "21.*at most 20"),
    (resumes_with_prompt_logprobs, BAD, "output.prompt_logprobs", "resume_token_ids to be empty"),
    (set_fields("output", n=0), BAD, "output.n", "from 1 to 16"),
    (set_fields("output", n=17), BAD, "output.n", "from 1 to 16"),
    (set_fields("speculation", num_speculative_tokens=17), BAD, "speculation.num_speculative_tokens", "17.*0 to 16"),
    (set_fields("speculation", num_speculative_tokens=-1), BAD, "speculation.num_speculative_tokens", "0 to 16"),
    (set_fields("speculation", max_speculative_tokens=0), BAD, "speculation.max_speculative_tokens", "1 to 16"),
    (set_fields("speculation", max_speculative_tokens=17), BAD, "speculation.max_speculative_tokens", "1 to 16"),
    (
        set_fields("speculation", num_speculative_tokens=5, max_speculative_tokens=4),
        BAD,
        "speculation.num_speculative_tokens",
        "5, above speculation.max_speculative_tokens, which is 4",
    ),
    (set_fields("speculation", drafter="eagle"), BAD, "speculation.drafter", "'eagle'.*auto, model, lookup"),
    (set_fields("speculation", acceptance=9), BAD, "speculation.acceptance", "9.*TOKEN.*BLOCK.*COUPLED"),
    (set_fields(resume_token_ids=[1, VOCAB]), BAD, "resume_token_ids", f"index 1.*below {VOCAB}"),
    (set_fields(resume_token_ids=[1] * 98), BAD, "resume_token_ids", "98 ids.*which is 97"),
    (set_fields(resume_choice=16), BAD, "resume_choice", "16.*from 0 to 15"),
    (every_id_stops, BAD, "stopping.min_tokens", "every id is a stop token"),
    (resumes_past_a_stop_token, BAD, "resume_token_ids", "id 3 at index 1 is a stop token.*min_tokens, 4"),
    (set_fields(prompt_hash=5), "FAILED_PRECONDITION", "prompt_hash", "0x5"),
    (set_fields(lora_adapter="x"), BAD, "lora_adapter", "LoRA"),
    (set_fields(tools_json="[]"), BAD, "tools_json", "tools"),
    (set_fields(image_urls=["x"]), BAD, "image_urls", "images"),
    (
        set_fields("structured_output", json_schema='{"multipleOf": 99999999}'),
        BAD,
        "structured_output.json_schema",
        "multipleOf.*above 10000",
    ),
]


def name_of(value: Any) -> str:
    """The same in every process, unlike a function's address."""
    return getattr(value, "__name__", value)[:40]


@pytest.mark.parametrize(("change", "status", "field", "names"), REFUSED, ids=name_of)
def test_bad_values_are_refused_by_name(
    change: Callable[[pb.GenerateRequest], object], status: str, field: str, names: str
) -> None:
    with pytest.raises(OutriderError, match=names) as refusal:
        resolved(change)
    assert refusal.value.status == status
    assert refusal.value.field == field
    assert field.split("[")[0].split(".")[0] in str(refusal.value)


def test_resuming_several_choices_is_refused() -> None:
    message = request(set_fields(resume_token_ids=[1]))
    message.output.n = 2
    with pytest.raises(OutriderError, match=r"output\.n to be 1") as refusal:
        resolve(message, MODEL, SETTINGS, request_id="r")
    assert refusal.value.field == "resume_token_ids"


def test_a_choice_of_several_is_resumed_by_its_number() -> None:
    message = request(set_fields(resume_token_ids=[1], resume_choice=2))
    assert resolve(message, MODEL, SETTINGS, request_id="r").sampling.choice == 2
    message.ClearField("resume_token_ids")
    message.output.n = 2
    with pytest.raises(OutriderError, match=r"output\.n to be 1") as refusal:
        resolve(message, MODEL, SETTINGS, request_id="r")
    assert refusal.value.field == "resume_choice"


def test_stop_ids_alone_are_no_way_on_before_min_tokens() -> None:
    message = request(allowed([7]))
    assert resolve(message, MODEL, SETTINGS, request_id="r").sampling.allowed_token_ids == (7,)
    message.stopping.min_tokens = 1
    with pytest.raises(OutriderError, match="always be a next token") as refusal:
        resolve(message, MODEL, SETTINGS, request_id="r")
    assert refusal.value.field == "sampling.allowed_token_ids"


@pytest.mark.parametrize(("masks", "resumed"), [(allowed([1, 2]), [1, 5]), (allowed([1, 2], bad_words=['"#']), [1, 2])])
def test_ids_that_the_masks_rule_out_cannot_be_resumed(masks: Callable[..., None], resumed: list[int]) -> None:
    message = request(masks)
    message.resume_token_ids.extend(resumed)
    with pytest.raises(OutriderError, match=r"id . at index 1 is forbidden there") as refusal:
        resolve(message, MODEL, SETTINGS, request_id="r")
    assert refusal.value.reason == "RESUMED_IMPOSSIBLE"


def test_masks_are_resolved_to_ids() -> None:
    """The toy's alphabet has no space, so a word has one spelling there."""
    sampling = resolved(allowed([9, 3, 9], bad_words=["A", " AB", "AB"])).sampling
    assert sampling.allowed_token_ids == (3, 9)
    assert sampling.bad_words == ((32,), (32, 33))


@pytest.mark.parametrize("bad", ["a b", "ä", "x" * 129, "a\nb"])
def test_bad_request_ids_are_refused(bad: str) -> None:
    with pytest.raises(OutriderError, match="128 characters") as refusal:
        resolve_request_id(pb.GenerateRequest(request_id=bad))
    assert refusal.value.field == "request_id"


def test_request_ids_are_kept_or_made() -> None:
    assert resolve_request_id(pb.GenerateRequest(request_id="a.B:9_-")) == "a.B:9_-"
    made = {resolve_request_id(pb.GenerateRequest()) for _ in range(3)}
    assert len(made) == 3


def test_edges_of_the_ranges_are_taken_as_they_are() -> None:
    def change(m: pb.GenerateRequest) -> None:
        set_fields("sampling", temperature=0.01, top_p=1.0, min_p=1.0, repetition_penalty=10, presence_penalty=-2)(m)
        set_fields("sampling", logit_bias={VOCAB - 1: -100.0}, top_k=0)(m)
        set_fields("stopping", max_tokens=97, min_tokens=97, stop=["A" * 256], stop_token_ids=[VOCAB - 1])(m)
        set_fields("speculation", num_speculative_tokens=16)(m)

    request = resolved(change)
    assert request.sampling.temperature == 0.01
    assert request.sampling.top_k == 0, "given as 0, so the model's default of 20 must not come back"
    assert request.sampling.logit_bias == {VOCAB - 1: -100.0}
    assert request.stopping.max_tokens == request.stopping.min_tokens == 97
    assert request.stopping.stop_token_ids == {VOCAB - 1, 7}
    assert request.num_speculative_tokens == request.max_draft_tokens == 16


def test_absent_fields_mean_the_models_defaults() -> None:
    request = resolved()
    assert request.prompt_ids == (32, 33, 34)
    assert request.prompt_hash == hash_ids((32, 33, 34))
    assert (request.sampling.temperature, request.sampling.top_k) == (0.6, 20)
    assert (request.sampling.top_p, request.sampling.min_p, request.sampling.repetition_penalty) == (1.0, 0.0, 1.0)
    assert request.stopping.max_tokens == 97, "256 does not fit, so what the context leaves"
    assert request.num_speculative_tokens is None
    assert request.max_draft_tokens == 16
    assert request.skip_special_tokens
    assert resolved(set_fields("stopping", ignore_eos=True)).stopping.stop_token_ids == frozenset()


def test_the_rule_is_block_unless_a_seed_asks_for_its_text_again() -> None:
    assert resolved().sampling.acceptance is AcceptanceRule.BLOCK
    assert resolved(acceptance="token").sampling.acceptance is AcceptanceRule.TOKEN
    seeded = resolved(set_fields("sampling", seed=0))
    assert seeded.sampling.acceptance is AcceptanceRule.COUPLED
    assert seeded.sampling.seed == 0
    both = request(set_fields("sampling", seed=5))
    both.speculation.acceptance = AcceptanceRule.TOKEN  # type: ignore[assignment]
    assert resolve(both, MODEL, SETTINGS, request_id="r").sampling.acceptance is AcceptanceRule.TOKEN
    assert resolved().sampling.seed != resolved().sampling.seed
    assert resolved(set_fields("sampling", seed=2**64 - 1)).sampling.seed == 2**64 - 1


def test_a_seed_that_is_drawn_is_a_number_in_every_language() -> None:
    seeds = [resolved().sampling.seed for _ in range(64)]
    assert len(set(seeds)) == 64
    assert all(int(float(seed)) == seed < 2**53 for seed in seeds)


def test_a_server_wide_number_of_drafts_gives_way_to_the_requests_own() -> None:
    assert resolved(num_speculative_tokens=3).num_speculative_tokens == 3
    own = set_fields("speculation", num_speculative_tokens=0)
    assert resolved(own, num_speculative_tokens=3).num_speculative_tokens == 0
    adaptive = set_fields("speculation", max_speculative_tokens=5)
    assert resolved(adaptive, num_speculative_tokens=3).num_speculative_tokens is None
    with pytest.raises(OutriderError, match="at most 16"):
        resolved(num_speculative_tokens=20)


def test_text_gets_the_beginning_of_sequence_id_once() -> None:
    model = replace(MODEL, description=replace(DESCRIPTION, bos_token_id=5))
    assert resolve(request(), model, SETTINGS, request_id="r").prompt_ids == (5, 32, 33, 34)
    assert resolve(request(ids([32])), model, SETTINGS, request_id="r").prompt_ids == (32,)
    own = request(set_fields(text="&A"))  # the toy's id 5 is "&"
    assert resolve(own, model, SETTINGS, request_id="r").prompt_ids == (5, 32)


def test_chat_goes_through_the_template() -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    model = replace(MODEL, chat_template=ChatTemplate(source, {}))
    message = pb.GenerateRequest()
    message.chat.messages.add(role="user", content="AB")
    assert resolve(message, model, SETTINGS, request_id="r").prompt_ids == (32, 33, 0)
    message.chat.add_generation_prompt = False
    assert resolve(message, model, SETTINGS, request_id="r").prompt_ids == (32, 33)
    message.chat.messages.add(content="x")
    with pytest.raises(OutriderError, match=r"messages\[1\]\.role is empty"):
        resolve(message, model, SETTINGS, request_id="r")
    message.chat.ClearField("messages")
    with pytest.raises(OutriderError, match="at least one message"):
        resolve(message, model, SETTINGS, request_id="r")


@pytest.mark.parametrize("role", ["usr", "robot", "User", "content", "x" * 1000])
def test_a_role_that_nobody_knows_is_refused_though_the_template_would_write_it_out(role: str) -> None:
    source = (
        "{% for m in messages %}{{ m.role[0] | upper }}{{ m.content }}{% endfor %}{% if 'content' == tone %}{% endif %}"
    )
    model = replace(MODEL, chat_template=ChatTemplate(source, {}))
    message = pb.GenerateRequest()
    for known in ("system", "developer", "user", "assistant", "tool", "function"):
        message.chat.messages.add(role=known, content="A")
    assert resolve(message, model, SETTINGS, request_id="r").prompt_ids
    message.chat.messages.add(role=role, content="A")
    with pytest.raises(OutriderError) as caught:
        resolve(message, model, SETTINGS, request_id="r")
    assert caught.value.field == "chat.messages[6].role"
    known = "system, developer, user, assistant, tool, function"
    assert caught.value.message.endswith(f", must be one of {known}")
    assert len(caught.value.message) < 250


def test_roles_that_a_template_tells_apart_are_its_own() -> None:
    source = (
        "{% for m in messages %}{% set role = m['role'] %}{% if m['role'] == 'ipython' or m.role in ['observation'] %}"
        "{% elif role == 'context' or m.content == 'A' %}{% endif %}{{ m.content }}{% endfor %}"
    )
    model = replace(MODEL, chat_template=ChatTemplate(source, {}))
    message = pb.GenerateRequest()
    for known in ("ipython", "observation", "context"):
        message.chat.messages.add(role=known, content="A")
    assert resolve(message, model, SETTINGS, request_id="r").prompt_ids
    message.chat.messages.add(role="A", content="A")
    with pytest.raises(OutriderError, match="function, context, ipython, observation"):
        resolve(message, model, SETTINGS, request_id="r")


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{% if mode is defined %}{{ mode }}{% endif %}{{ tone }}!{% endif %}"
)


def chat(messages: list[str], **fields: object) -> ResolvedRequest:
    model = replace(MODEL, chat_template=ChatTemplate(TEMPLATE, {"eos_token": "$"}))
    message = pb.GenerateRequest()
    for content in messages:
        message.chat.messages.add(role="user", content=content)
    for name, value in fields.items():
        setattr(message.chat, name, value)
    return resolve(message, model, SETTINGS, request_id="r")


def codes(text: str) -> tuple[int, ...]:
    return tuple(ord(char) - 33 for char in text)


def test_the_template_gets_what_the_request_sets() -> None:
    assert chat(["AB"], chat_template_kwargs='{"mode": 1, "tone": "X"}').prompt_ids == codes("AB$1X!")
    assert chat(["AB"], chat_template_kwargs="{}").prompt_ids == codes("AB$!")
    assert chat(["AB"]).prompt_ids == codes("AB$!")


def test_the_last_message_is_left_open() -> None:
    assert chat(["AB", "CD"], continue_final_message=True).prompt_ids == codes("AB$CD")
    assert chat(["AB", "AB"], continue_final_message=True, add_generation_prompt=False).prompt_ids == codes("AB$AB")


@pytest.mark.parametrize(
    ("fields", "field", "names"),
    [
        ({"chat_template_kwargs": '{"tune": 1}'}, "chat.chat_template_kwargs", "'tune'.*mode, tone"),
        ({"chat_template_kwargs": '{"messages": []}'}, "chat.chat_template_kwargs", "'messages'"),
        ({"chat_template_kwargs": '{"eos_token": "x"}'}, "chat.chat_template_kwargs", "'eos_token'"),
        ({"chat_template_kwargs": '{"raise_exception": 1}'}, "chat.chat_template_kwargs", "'raise_exception'"),
        ({"chat_template_kwargs": "[1]"}, "chat.chat_template_kwargs", "list, must be an object"),
        ({"chat_template_kwargs": "{'mode': 1}"}, "chat.chat_template_kwargs", "no JSON"),
        ({"chat_template_kwargs": '{"mode": NaN}'}, "chat.chat_template_kwargs", "NaN"),
        ({"chat_template_kwargs": '{"mode": 1, "mode": 2}'}, "chat.chat_template_kwargs", "twice"),
        ({"chat_template_kwargs": '{"mode": ' + "[" * 40 + "]" * 40 + "}"}, "chat.chat_template_kwargs", "32 levels"),
        ({"chat_template_kwargs": "[" * 60_000}, "chat.chat_template_kwargs", "no JSON"),
        ({"chat_template_kwargs": '{"mode": "' + "x" * 70_000 + '"}'}, "chat.chat_template_kwargs", "at most 65536"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "chat.continue_final_message", "exclude"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_options_of_a_conversation_are_refused(fields: dict[str, object], field: str, names: str) -> None:
    with pytest.raises(OutriderError, match=names) as refusal:
        chat(["AB"], **fields)
    assert (refusal.value.status, refusal.value.field) == (BAD, field)

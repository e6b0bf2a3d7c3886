"""A `GenerateRequest` checked and resolved: every field validated, refused by name with its limit, nothing clamped.

Reads the wire message by its field names only; what comes out is plain data.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from coordinator.checks import check_ids, refuse, within
from coordinator.model import ServedModel
from coordinator.prompt import prompt_ids
from coordinator.structured_output import check_it_can_end, resolve_grammar
from coordinator.text.bad_words import bad_word_ids
from outrider.errors import FailedPrecondition, InvalidArgument
from outrider.sampling.history import History
from outrider.sampling.masks import BadWords, TokenSet, is_masked, leaves_a_token
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import MAX_CHOICES, AcceptanceRule, SamplingParams, StoppingParams
from outrider.serving.request_context import REQUEST_ID_FORM
from outrider.settings import CoordinatorSettings

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_TOP_LOGPROBS = 20
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 10.0
FRESH_SEED_BITS = 53
"""A seed is told as a JSON number too, of which JavaScript and others keep no more. Given ones may have 64 bits."""
AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """Every value decided. `drafter` "" is auto; `num_speculative_tokens` None is adaptive up to the maximum; choices
    are numbered from `sampling.choice` on.

    A stream never moves to weights of another `model_fingerprint`.
    """

    request_id: str
    model: str
    model_fingerprint: str = ""
    vocab_size: int = 0
    """0: not known."""
    prompt_ids: tuple[int, ...]
    prompt_hash: int
    sampling: SamplingParams
    stopping: StoppingParams
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    num_choices: int = 1
    priority: int = 0
    num_speculative_tokens: int | None = None
    max_speculative_tokens: int = 0
    drafter: str = ""
    report_steps: bool = False
    resume_token_ids: tuple[int, ...] = ()
    tenant: str = "default"
    record: bool | None = None
    """Whether the client wants a record of it kept; None: as the operator wants."""
    has_fresh_seed: bool = False
    """The seed was drawn for this request: no earlier stream can have had it."""

    @property
    def learns_from_others(self) -> bool:
        """Whether what earlier streams came to may decide anything here. Under TOKEN and BLOCK one that had the same
        seed has thrown the very coins of this one."""
        return self.sampling.decides_by_match or self.has_fresh_seed

    @property
    def num_cached_tokens(self) -> int:
        """That a target holds of one stream at most: its last token is never computed."""
        return len(self.prompt_ids) + self.stopping.max_tokens - 1

    @property
    def max_draft_tokens(self) -> int:
        """Drafts that one round may carry."""
        fixed = self.num_speculative_tokens
        return self.max_speculative_tokens if fixed is None else fixed


def resolve_request_id(request: Any) -> str:
    """The request's own id or a new one. Raises InvalidArgument."""
    given = request.request_id
    if given and not REQUEST_ID_FORM.fullmatch(given):
        raise InvalidArgument(
            "request_id must be 1 to 128 characters of [A-Za-z0-9._:-]", field="request_id", reason="BAD_REQUEST_ID"
        )
    return given or secrets.token_hex(16)


def resolve(
    request: Any, model: ServedModel, settings: CoordinatorSettings, *, request_id: str, tenant: str = "default"
) -> ResolvedRequest:
    """Raises InvalidArgument or FailedPrecondition naming the field."""
    _refuse_unsupported(request)
    output = _resolve_output(request.output)
    sampling = _resolve_sampling(request, model, settings)
    goes_on = request.HasField("prompt_hash") or len(request.resume_token_ids) > 0
    speculation = _resolve_speculation(request.speculation, model, settings, goes_on=goes_on)
    stop_strings = _resolve_stop_strings(request.stopping)
    ids = prompt_ids(request, model)
    stopping = _resolve_stopping(request.stopping, len(ids), model, settings)
    check_it_can_end(sampling.grammar, stopping)
    _check_masks(sampling, stopping, model.description.vocab_size)
    prompt_hash = hash_ids(ids)
    resumed = _resolve_resume(request, prompt_hash, sampling, stopping, output["num_choices"], model)
    return ResolvedRequest(
        request_id=request_id,
        model=model.name,
        model_fingerprint=model.description.model_fingerprint,
        vocab_size=model.description.vocab_size,
        prompt_ids=ids,
        prompt_hash=prompt_hash,
        sampling=sampling,
        stopping=stopping,
        stop_strings=stop_strings,
        include_stop=request.stopping.include_stop_str_in_output,
        priority=request.priority,
        resume_token_ids=resumed,
        tenant=tenant,
        has_fresh_seed=not request.sampling.HasField("seed"),
        **output,
        **speculation,
    )


def _refuse_unsupported(request: Any) -> None:
    for field, what in (("lora_adapter", "LoRA adapters"), ("tools_json", "tools"), ("image_urls", "images")):
        if getattr(request, field):
            raise InvalidArgument(f"{field}: {what} are not supported", field=field, reason="NOT_SUPPORTED")


def _resolve_sampling(request: Any, model: ServedModel, settings: CoordinatorSettings) -> SamplingParams:
    options = request.sampling
    defaults = model.description.generation_defaults

    def pick(name: str, neutral: float) -> float:
        return getattr(options, name) if options.HasField(name) else defaults.get(name, neutral)

    temperature = pick("temperature", 1.0)
    if not (temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE):
        refuse("sampling.temperature", temperature, f"0 (greedy) or from {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}")
    top_p = pick("top_p", 1.0)
    if not 0 < top_p <= 1:
        refuse("sampling.top_p", top_p, "above 0 and at most 1")
    return SamplingParams(
        temperature=temperature,
        top_k=int(pick("top_k", 0)),
        top_p=top_p,
        min_p=within("sampling.min_p", pick("min_p", 0.0), 0, 1),
        repetition_penalty=_repetition_penalty(pick("repetition_penalty", 1.0)),
        presence_penalty=within("sampling.presence_penalty", pick("presence_penalty", 0.0), -2, 2),
        frequency_penalty=within("sampling.frequency_penalty", pick("frequency_penalty", 0.0), -2, 2),
        logit_bias=_logit_bias(options.logit_bias, model.description.vocab_size),
        seed=options.seed if options.HasField("seed") else secrets.randbits(FRESH_SEED_BITS),
        choice=_resume_choice(request),
        acceptance=_acceptance(request.speculation.acceptance, options.HasField("seed"), settings),
        allowed_token_ids=_allowed_token_ids(options, model.description.vocab_size),
        bad_words=BadWords(bad_word_ids(options.bad_words, model.codec)),
        grammar=resolve_grammar(request),
    )


def _allowed_token_ids(options: Any, vocab_size: int) -> TokenSet:
    ids = options.allowed_token_ids.ids
    if options.HasField("allowed_token_ids") and not ids:
        raise InvalidArgument(
            "sampling.allowed_token_ids is empty: give at least one id, or leave it unset to allow all",
            field="sampling.allowed_token_ids",
        )
    check_ids("sampling.allowed_token_ids", ids, vocab_size)
    return TokenSet(sorted(set(ids)))


def _check_masks(sampling: SamplingParams, stopping: StoppingParams, vocab_size: int) -> None:
    if leaves_a_token(sampling, stopping, vocab_size):
        return
    field = "sampling.allowed_token_ids" if sampling.allowed_token_ids else "sampling.bad_words"
    raise InvalidArgument(
        f"{field}: at least one allowed id must be no bad word's last one and, with stopping.min_tokens, no stop id: "
        "there must always be a next token",
        field=field,
        reason="NO_TOKEN_LEFT",
    )


def _repetition_penalty(value: float) -> float:
    return within("sampling.repetition_penalty", value, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)


def _logit_bias(bias: Any, vocab_size: int) -> dict[int, float]:
    for token_id, value in bias.items():
        within(f"sampling.logit_bias[{token_id}]", value, -100, 100)
    check_ids("sampling.logit_bias", tuple(bias), vocab_size)
    return dict(sorted(bias.items()))


def _acceptance(number: int, has_seed: bool, settings: CoordinatorSettings) -> AcceptanceRule:
    if not number:
        return AcceptanceRule.COUPLED if has_seed else AcceptanceRule[settings.acceptance.upper()]
    try:
        return AcceptanceRule(number)
    except ValueError:
        names = ", ".join(f"{rule.name} ({rule.value})" for rule in AcceptanceRule)
        raise InvalidArgument(
            f"speculation.acceptance is {number}, must be one of {names}", field="speculation.acceptance"
        ) from None


def _resolve_stopping(
    options: Any, num_prompt_tokens: int, model: ServedModel, settings: CoordinatorSettings
) -> StoppingParams:
    context = model.description.context_length
    left = context - num_prompt_tokens
    max_tokens = min(settings.default_max_tokens, left)
    if options.HasField("max_tokens"):
        max_tokens = options.max_tokens
        if max_tokens < 1:
            refuse("stopping.max_tokens", max_tokens, "at least 1")
        if max_tokens > left:
            raise InvalidArgument(
                f"stopping.max_tokens is {max_tokens}, but the prompt's {num_prompt_tokens} tokens leave {left} of the "
                f"model's context of {context}",
                field="stopping.max_tokens",
                reason="CONTEXT_EXCEEDED",
            )
    min_tokens = options.min_tokens if options.HasField("min_tokens") else 0
    if not 0 <= min_tokens <= max_tokens:
        refuse("stopping.min_tokens", min_tokens, f"from 0 to max_tokens, which is {max_tokens}")
    stop_ids = tuple(options.stop_token_ids)
    check_ids("stopping.stop_token_ids", stop_ids, model.description.vocab_size)
    own = () if options.ignore_eos else model.description.eos_token_ids
    stopping = StoppingParams(max_tokens, min_tokens, frozenset((*stop_ids, *own)))
    if min_tokens and len(stopping.stop_token_ids) >= model.description.vocab_size:
        raise InvalidArgument(
            f"stopping.min_tokens is {min_tokens}, but every id is a stop token: no text is that long",
            field="stopping.min_tokens",
        )
    return stopping


def _resolve_stop_strings(options: Any) -> tuple[str, ...]:
    stops = tuple(options.stop)
    if len(stops) > MAX_STOP_STRINGS:
        refuse("stopping.stop", f"{len(stops)} strings", f"at most {MAX_STOP_STRINGS}")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            refuse(f"stopping.stop[{index}]", f"{len(stop)} code points long", f"from 1 to {MAX_STOP_CHARS}")
    return stops


def _resolve_output(options: Any) -> dict[str, Any]:
    if options.top_logprobs > MAX_TOP_LOGPROBS:
        refuse("output.top_logprobs", options.top_logprobs, f"at most {MAX_TOP_LOGPROBS}")
    if options.top_logprobs and not options.logprobs:
        raise InvalidArgument("output.top_logprobs needs output.logprobs", field="output.top_logprobs")
    prompt_logprobs = options.prompt_logprobs if options.HasField("prompt_logprobs") else None
    if (prompt_logprobs or 0) > MAX_TOP_LOGPROBS:
        refuse("output.prompt_logprobs", prompt_logprobs, f"at most {MAX_TOP_LOGPROBS}")
    num_choices = options.n if options.HasField("n") else 1
    if not 1 <= num_choices <= MAX_CHOICES:
        refuse("output.n", num_choices, f"from 1 to {MAX_CHOICES}")
    return {
        "logprobs": options.logprobs,
        "top_logprobs": options.top_logprobs,
        "prompt_logprobs": prompt_logprobs,
        "skip_special_tokens": options.skip_special_tokens if options.HasField("skip_special_tokens") else True,
        "num_choices": num_choices,
        "record": options.record if options.HasField("record") else None,
    }


def _resolve_speculation(
    options: Any, model: ServedModel, settings: CoordinatorSettings, *, goes_on: bool
) -> dict[str, Any]:
    """goes_on: the text was begun before, with a drafter that was there then. What is lost with a drafter, or while it
    has not come up yet, is speed: its name is taken as it is, and drafts come once somebody offers them."""
    cap = model.max_draft_tokens
    fixed = settings.num_speculative_tokens
    if options.HasField("num_speculative_tokens"):
        fixed = int(within("speculation.num_speculative_tokens", options.num_speculative_tokens, 0, cap))
        if options.HasField("max_speculative_tokens") and fixed > options.max_speculative_tokens:
            raise InvalidArgument(
                f"speculation.num_speculative_tokens is {fixed}, above speculation.max_speculative_tokens, which is "
                f"{options.max_speculative_tokens}: give one of the two",
                field="speculation.num_speculative_tokens",
            )
    elif options.HasField("max_speculative_tokens"):
        fixed = None
    if fixed is not None and fixed > cap:
        raise FailedPrecondition(
            f"this server is set to {fixed} drafts a round, its workers carry at most {cap}; give "
            "speculation.num_speculative_tokens, or raise max_draft_tokens of the workers",
            field="speculation.num_speculative_tokens",
        )
    maximum = min(settings.max_speculative_tokens, cap)
    if options.HasField("max_speculative_tokens"):
        maximum = int(within("speculation.max_speculative_tokens", options.max_speculative_tokens, 1, cap))
    drafter = "" if options.drafter == AUTO else options.drafter
    if drafter and drafter not in model.drafters and not (goes_on or model.may_offer_more):
        groups = [f"{', '.join(names)} ({who})" for who, names in model.offered.items()]
        known = ", ".join((AUTO, *(groups or model.drafters)))
        why = "" if model.draft_model else "; no draft worker is connected that could draft for this model"
        refuse("speculation.drafter", repr(options.drafter)[:80], f"one of {known}{why}")
    return {
        "num_speculative_tokens": fixed,
        "max_speculative_tokens": maximum,
        "drafter": drafter,
        "report_steps": options.report_steps,
    }


def _resolve_resume(
    request: Any,
    prompt_hash: int,
    sampling: SamplingParams,
    stopping: StoppingParams,
    num_choices: int,
    model: ServedModel,
) -> tuple[int, ...]:
    num_resumed = len(request.resume_token_ids)
    if request.model_fingerprint not in ("", model.description.model_fingerprint):
        raise FailedPrecondition(
            f"model_fingerprint is {request.model_fingerprint[:80]!r}, but model {model.name!r} has other weights by "
            "now: a text cannot go on under them, begin it anew without model_fingerprint",
            field="model_fingerprint",
            reason="MODEL_CHANGED",
        )
    if request.HasField("prompt_hash") and request.prompt_hash != prompt_hash:
        raise FailedPrecondition(
            f"prompt_hash is {request.prompt_hash:#x}, but this prompt hashes to {prompt_hash:#x}: resume with the "
            "very same prompt",
            field="prompt_hash",
            reason="PROMPT_CHANGED",
        )
    if num_resumed and request.output.HasField("prompt_logprobs"):
        raise InvalidArgument(
            "output.prompt_logprobs needs resume_token_ids to be empty: they came before the first token",
            field="output.prompt_logprobs",
        )
    if num_resumed and num_choices > 1:
        raise InvalidArgument("resume_token_ids needs output.n to be 1: resume one choice", field="resume_token_ids")
    if num_resumed > stopping.max_tokens:
        limit = f"at most stopping.max_tokens, which is {stopping.max_tokens}"
        refuse("resume_token_ids", f"{num_resumed} ids", limit)
    resumed = tuple(request.resume_token_ids)
    check_ids("resume_token_ids", resumed, model.description.vocab_size)
    history = History(())
    for index, token_id in enumerate(resumed):
        if is_masked(token_id, sampling, stopping, history):
            stops_too_soon = index < stopping.min_tokens and token_id in stopping.stop_token_ids
            forbids = (
                f"a stop token, which stopping.min_tokens, {stopping.min_tokens}, forbids there"
                if stops_too_soon
                else "forbidden there by sampling.allowed_token_ids or sampling.bad_words"
            )
            raise InvalidArgument(
                f"resume_token_ids: id {token_id} at index {index} is {forbids}: resume with the very same options",
                field="resume_token_ids",
                reason="RESUMED_IMPOSSIBLE",
            )
        history.push(token_id)
    return resumed


def _resume_choice(request: Any) -> int:
    choice = int(within("resume_choice", request.resume_choice, 0, MAX_CHOICES - 1))
    if choice and request.output.HasField("n") and request.output.n > 1:
        raise InvalidArgument("resume_choice needs output.n to be 1: resume one choice", field="resume_choice")
    return choice

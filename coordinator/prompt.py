"""Prompts to ids: plain text, ids as they are, or a conversation in the model's template."""

from __future__ import annotations

from typing import Any

from coordinator.checks import check_ids
from coordinator.model import ServedModel
from coordinator.strict_json import parse_json
from coordinator.text.chat import ROLES, ChatTemplate
from outrider.errors import InvalidArgument

MAX_KWARGS_BYTES = 65_536
MAX_KWARGS_DEPTH = 32


def prompt_ids(request: Any, model: ServedModel) -> tuple[int, ...]:
    """Ids of the request's prompt, at least one, leaving room for at least one more. Raises InvalidArgument."""
    context = model.description.context_length
    match request.WhichOneof("prompt"):
        case "text":
            field, ids = "text", text_ids(request.text, model)
        case "chat":
            field, ids = "chat", chat_ids(request.chat, model)
        case "token_ids":
            field, ids = "token_ids.ids", tuple(request.token_ids.ids)
            _check_size(field, len(ids), model, exact=True)
            check_ids(field, ids, model.description.vocab_size)
        case _:
            raise InvalidArgument("prompt is missing: set one of text, token_ids, chat", field="prompt")
    if not ids:
        raise InvalidArgument(f"{field}: the prompt is empty, it needs at least one token", field=field)
    _check_size(field, len(ids), model, exact=True)
    assert len(ids) < context
    return ids


def text_ids(text: str, model: ServedModel) -> tuple[int, ...]:
    """As the model's own tokenizer does it, with its beginning-of-sequence id, if any."""
    if not text:
        raise InvalidArgument("text: the prompt is empty, it needs at least one token", field="text")
    _check_size("text", len(text) // model.codec.max_token_chars, model, exact=False)
    ids = tuple(model.codec.encode(text, add_special_tokens=True))
    bos = model.description.bos_token_id
    return ids if bos is None or ids[:1] == (bos,) else (bos, *ids)


def chat_ids(chat: Any, model: ServedModel) -> tuple[int, ...]:
    """The rendered template, which writes its special tokens itself."""
    if model.chat_template is None:
        raise InvalidArgument(
            f"chat: model {model.name!r} has no chat template; send text or token_ids",
            field="chat",
            reason="NO_TEMPLATE",
        )
    if not chat.messages:
        raise InvalidArgument("chat.messages is empty, it needs at least one message", field="chat.messages")
    # a template that writes out whatever it is given would take a misspelt role for one
    roles = {*ROLES, *model.chat_template.own_roles}
    for index, message in enumerate(chat.messages):
        if message.role not in roles:
            raise _no_role(f"chat.messages[{index}].role", message.role, model.chat_template)
    size = sum(len(message.content) for message in chat.messages)
    _check_size("chat", size // model.codec.max_token_chars, model, exact=False)
    goes_on = chat.continue_final_message
    add = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not goes_on
    if add and goes_on:
        raise InvalidArgument(
            "chat.continue_final_message and chat.add_generation_prompt exclude each other: one goes on with the last "
            "message, the other opens a new one",
            field="chat.continue_final_message",
        )
    text = model.chat_template.render(
        [{"role": message.role, "content": message.content} for message in chat.messages],
        add_generation_prompt=add,
        continue_final_message=goes_on,
        kwargs=_template_kwargs(chat.chat_template_kwargs, model.chat_template.kwargs_names),
    )
    return tuple(model.codec.encode(text, add_special_tokens=False))


def _no_role(field: str, role: str, template: ChatTemplate) -> InvalidArgument:
    known = ", ".join((*ROLES, *sorted(template.own_roles)))
    what = f"is {role!r:.80}, must be" if role else "is empty: give"
    return InvalidArgument(f"{field} {what} one of {known}", field=field)


def _template_kwargs(source: str, known: frozenset[str]) -> dict[str, Any]:
    field = "chat.chat_template_kwargs"
    if not source:
        return {}
    num_bytes = len(source.encode())
    if num_bytes > MAX_KWARGS_BYTES:
        raise InvalidArgument(f"{field} has {num_bytes} bytes, at most {MAX_KWARGS_BYTES} are taken", field=field)
    try:
        kwargs = parse_json(source)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{field} is no JSON: {error}", field=field) from None
    if not isinstance(kwargs, dict):
        raise InvalidArgument(f"{field} is a JSON {type(kwargs).__name__}, must be an object", field=field)
    if _depth(kwargs) > MAX_KWARGS_DEPTH:
        raise InvalidArgument(f"{field} is nested deeper than {MAX_KWARGS_DEPTH} levels", field=field)
    unknown = sorted(kwargs.keys() - known)
    if unknown:
        names = ", ".join(sorted(known)) or "nothing"
        raise InvalidArgument(
            f"{field} sets {unknown[0]!r:.80}; what a request can set in this model's chat template is {names}",
            field=field,
            reason="CHAT_TEMPLATE_UNKNOWN_NAME",
        )
    return kwargs


def _depth(value: Any) -> int:
    """Levels of objects and arrays, level by level so that depth costs no stack."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [x for item in level for x in (item.values() if isinstance(item, dict) else item)]
    return depth


def _check_size(field: str, num_tokens: int, model: ServedModel, *, exact: bool) -> None:
    """With `exact` false, `num_tokens` is a lower bound that spares tokenizing what cannot fit."""
    context = model.description.context_length
    if num_tokens >= context:
        raise InvalidArgument(
            f"{field}: the prompt has {'' if exact else 'at least '}{num_tokens} tokens, the model's context of "
            f"{context} holds at most {context - 1} and one more to generate",
            field=field,
            reason="PROMPT_TOO_LONG",
        )

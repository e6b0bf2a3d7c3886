"""Conversations to prompt text, with the model's own template in a sandbox, as transformers' `apply_chat_template`."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import InvalidArgument

Message = Mapping[str, str]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""OpenAI's: templates that write out any role know them by their name alone, and those that do not refuse them."""
OWN_NAMES = frozenset({"messages", "add_generation_prompt", "continue_final_message", "tools"})
_END_OF_FINAL_MESSAGE = "OUTRIDER_END_OF_FINAL_MESSAGE "
"""Put behind the last message, and cut off with all that the template adds after it. A template that trims its messages
trims the space at its end, which tells that the text before is to be trimmed as well."""


class ChatTemplate:
    """A compiled template. Raises InvalidArgument when it refuses a conversation."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        self.own_roles = frozenset(_roles_compared_with(environment.parse(source))) - set(ROLES)
        """Of turns, that this template knows beside `ROLES`."""
        read = jinja2.meta.find_undeclared_variables(environment.parse(source))
        self.kwargs_names = frozenset(read - environment.globals.keys() - special_tokens.keys() - OWN_NAMES)
        """What a request may set: variables that the template reads and that are not given by us or the model."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """`kwargs` must be of `kwargs_names`. With `continue_final_message` the text ends with the last message."""
        turns = [dict(message) for message in messages]
        if continue_final_message:
            turns[-1]["content"] += _END_OF_FINAL_MESSAGE
        text = self._render(turns, add_generation_prompt, kwargs or {})
        return _cut_after(messages[-1]["content"], text) if continue_final_message else text

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool, kwargs: Mapping[str, Any]) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special_tokens, **kwargs
            )
        except Exception as error:  # a template is code of others: whatever it trips over, this conversation led there
            raise InvalidArgument(
                f"chat.messages: the model's chat template refuses this conversation: {error}",
                field="chat.messages",
                reason="CHAT_TEMPLATE_REFUSED",
            ) from error


def _roles_compared_with(template: nodes.Template) -> Iterator[str]:
    """Texts that it holds the role of a message against."""
    for comparison in template.find_all(nodes.Compare):
        parts = list(comparison.find_all((nodes.Const, nodes.Getattr, nodes.Name)))
        texts = [part.value for part in parts if isinstance(part, nodes.Const) and isinstance(part.value, str)]
        names = [part.attr if isinstance(part, nodes.Getattr) else getattr(part, "name", "") for part in parts]
        if "role" in texts or "role" in names:
            yield from (text for text in texts if text not in ("", "role"))


def _cut_after(content: str, text: str) -> str:
    """`text` up to the end of the last message, its trailing space kept where the template keeps it."""
    tag = _END_OF_FINAL_MESSAGE
    if content.strip() not in text or tag.strip() not in text:
        raise InvalidArgument(
            "chat.continue_final_message: the model's chat template does not write the last message out as it is, so "
            "that nothing can be continued",
            field="chat.continue_final_message",
            reason="CHAT_TEMPLATE_REFUSED",
        )
    end = text.rindex(tag.strip())
    return text[:end] if text.startswith(tag, end) else text[:end].rstrip()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML, which templates do not expect
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)

"""Flags that several client commands share: the server's address, and the options of a request."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from typing import Annotated, Any, Literal

import typer

from outrider.cli.console import err
from outrider.cli.flags import flag_of, keyword
from outrider.cli.stack import DEFAULT_MODEL
from outrider.client import GenerateOptions
from outrider.drafts import heads_of
from outrider.errors import InvalidArgument
from outrider.settings import PREFIX

DEFAULT_ADDRESS = "127.0.0.1:50050"
AUTO_DRAFT = "auto"
AUTO_HEADS = "auto"
TOY_AGREEMENT, TOY_COST = 0.8, 0.1
"""Of the draft that a toy target gets when the user names none: how its logits correlate with the target's, and its
share of the target's `pass_ms` and `token_ms`."""

Address = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        envvar="OUTRIDER_ADDRESS",
        help="host:port of the coordinator; several with commas between, or dns:///HOST:PORT for all behind a name.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print for machines: JSON on stdout.")]
Target = Annotated[str, typer.Option("--target", help="Target: bundle, hub id, folder, GGUF file or toy:key=value,...")]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        help=f"Draft, in the same forms; `none` for no draft worker. auto: none beside heads, {DEFAULT_MODEL} without; "
        f"for a toy target the same toy at {TOY_COST:g} of its pass_ms and token_ms, with agreement {TOY_AGREEMENT}: "
        "the correlation of logits, so that fewer drafts than that are accepted.",
    ),
]

Heads = Annotated[
    str,
    typer.Option(
        "--heads",
        help="Heads that draft inside the target worker, comma separated: names, folders, hub ids, name=any of these, "
        "or `none`. auto: those of OUTRIDER_HEADS, or the one that comes with the target.",
    ),
]

# Meanings and ranges are the server's to judge: it refuses with the name of the field.
_REQUEST: dict[str, tuple[Any, str]] = {
    "temperature": (float, "0 is greedy. Absent: the model's default."),
    "top_k": (int, "Keep this many of the likeliest tokens; 0: all."),
    "top_p": (float, "Keep the likeliest tokens with this mass."),
    "min_p": (float, "Drop tokens less likely than this share of the likeliest."),
    "seed": (int, "Key of all random choices; the acceptance rule is then coupled unless given."),
    "repetition_penalty": (float, "Over prompt and output; 1 is off."),
    "presence_penalty": (float, "Over output; 0 is off."),
    "frequency_penalty": (float, "Over output; 0 is off."),
    "max_tokens": (int, "Longest answer in tokens."),
    "min_tokens": (int, "No stop token before this many."),
    "stop": (list[str], "End before this string; may be given several times."),
    "bad_words": (list[str], "Never in the answer; may be given several times."),
    "allowed_token_ids": (list[int], "Only these ids in the answer; may be given several times."),
    "json_schema": (str, "The answer is JSON of this schema; {} allows any JSON."),
    "regex": (str, "The answer matches this regular expression as a whole."),
    "grammar": (str, "The answer follows this grammar, in llguidance's dialect of Lark."),
    "ignore_eos": (bool, "Go on past the model's end of sequence."),
    "num_speculative_tokens": (int, "Drafts a round; 0: plain decoding. Absent: adaptive."),
    "max_speculative_tokens": (int, "Cap of the adaptive number of drafts."),
    "drafter": (str, "auto, or a drafter that `outrider models info` lists."),
    "acceptance": (Literal["token", "block", "coupled"], "Rule by which drafts are accepted."),
    "chat_template_kwargs": (str, 'JSON object for the chat template, such as {"enable_thinking": false}.'),
    "model": (str, "Served model, by name or alias; absent: the only one."),
    "request_id": (str, "Name of the request in logs."),
    "priority": (int, "Lower runs first."),
    "timeout_s": (float, "Deadline of the request."),
}


def request_parameters() -> list[inspect.Parameter]:
    """A flag for each option of a request."""
    parameters = []
    for name, (kind, text) in _REQUEST.items():
        declaration = f"{flag_of(name)}/--no-{name.replace('_', '-')}" if kind is bool else flag_of(name)
        parameters.append(keyword(name, kind, typer.Option(declaration, help=text, show_default=False)))
    return parameters


def given_options(values: dict[str, Any]) -> GenerateOptions:
    """The options that were given. Raises InvalidArgument for a JSON flag that is none."""
    given = {name: values[name] for name in _REQUEST if values.get(name) not in (None, [])}
    if "chat_template_kwargs" in given:
        given["chat_template_kwargs"] = _json_object(given["chat_template_kwargs"])
    return given  # type: ignore[return-value]


def _json_object(text: str) -> dict[str, Any]:
    field = "chat_template_kwargs"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"{flag_of(field)} is no JSON: {error}", field=field) from None
    if not isinstance(value, dict):
        raise InvalidArgument(f"{flag_of(field)} must be a JSON object, such as '{{\"name\": 1}}'", field=field)
    return value


def choose_heads(target: str, heads: str) -> tuple[str, ...]:
    """Setting `heads` of a target worker for what `--heads` says; where it says nothing, the environment's, or the head
    that comes with the target."""
    if heads == AUTO_HEADS:
        heads = os.environ.get(f"{PREFIX}HEADS") or ",".join(heads_of(target))
    return () if heads == "none" else tuple(filter(None, (entry.strip() for entry in heads.split(","))))


def choose_draft(target: str, draft: str, heads: tuple[str, ...] = ()) -> str | None:
    """The draft model; None where the user asked for no draft worker, or for nothing where `heads` draft already. Says
    so where a toy is chosen for the user.

    Raises InvalidArgument for a toy target that is none.
    """
    if draft in ("", "none"):
        return None
    if draft != AUTO_DRAFT:
        return draft
    if heads:
        return None
    if not target.startswith("toy:"):
        return DEFAULT_MODEL
    from outrider.lm.toy import parse_toy

    own = parse_toy(target)
    costs = {name: round(TOY_COST * getattr(own, name), 6) for name in ("pass_ms", "token_ms")}
    toy = dataclasses.replace(own, agreement=TOY_AGREEMENT, nan_after=0, **costs).text()
    err.print(f"[dim]no --draft is given: drafting with {toy}[/]")
    return toy

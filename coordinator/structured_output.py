"""The form that a request wants its text to have: read, and refused where it cannot be kept."""

from __future__ import annotations

from typing import Any

from outrider.errors import InvalidArgument
from outrider.sampling.grammar_bounds import MAX_GRAMMAR_CHARS, GrammarBeyondBounds, check_bounds
from outrider.sampling.params import Grammar, GrammarKind, StoppingParams

FIELD = "structured_output"
_KINDS = {"json_schema": GrammarKind.JSON_SCHEMA, "regex": GrammarKind.REGEX, "grammar": GrammarKind.LARK}
FORM_FIELDS = {kind: f"{FIELD}.{name}" for name, kind in _KINDS.items()}


def resolve_grammar(request: Any) -> Grammar | None:
    """Whether it is a form at all is left to `coordinator.form_trials`. Raises InvalidArgument naming the field."""
    if not request.HasField(FIELD):
        return None
    constraint = request.structured_output.WhichOneof("constraint")
    if constraint is None:
        raise InvalidArgument(f"{FIELD} is empty: give one of {', '.join(_KINDS)}", field=FIELD)
    field, text = f"{FIELD}.{constraint}", getattr(request.structured_output, constraint)
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidArgument(f"{field} has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are taken", field=field)
    for other, is_set in (
        ("sampling.allowed_token_ids", request.sampling.HasField("allowed_token_ids")),
        ("sampling.bad_words", bool(request.sampling.bad_words)),
        ("stopping.min_tokens", request.stopping.min_tokens > 0),
    ):
        if is_set:
            raise InvalidArgument(
                f"{other} cannot be kept together with {FIELD}: a place could have no token left; leave one unset",
                field=other,
                reason="NOT_TOGETHER",
            )
    grammar = Grammar(_KINDS[constraint], text)
    try:
        check_bounds(grammar)
    except GrammarBeyondBounds as error:
        raise InvalidArgument(f"{field}: {error}", field=field, reason=error.reason) from None
    return grammar


def check_it_can_end(grammar: Grammar | None, stopping: StoppingParams) -> None:
    """Raises InvalidArgument for a text that could not end where its form is complete."""
    if grammar is not None and not stopping.stop_token_ids:
        raise InvalidArgument(
            f"{FIELD} needs a stop token, which ends the text once its form is complete: leave stopping.ignore_eos "
            "unset, or give stopping.stop_token_ids",
            field="stopping.stop_token_ids",
            reason="NO_STOP_TOKEN",
        )

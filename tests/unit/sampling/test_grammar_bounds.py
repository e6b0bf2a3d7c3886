"""What a form may be is bounded by its text alone: refused by name with a fix, in a time that its length bounds."""

import itertools
import json
import subprocess
import sys
from typing import Any

import pytest

from outrider.sampling.grammar import GrammarVocabulary
from outrider.sampling.grammar_bounds import (
    MAX_DEPTH,
    MAX_GRAMMAR_CHARS,
    MAX_MULTIPLE_OF,
    MAX_RULE_DEPTH,
    MAX_RULES,
    MAX_TERM_OPERATORS,
    GrammarBeyondBounds,
    check_bounds,
)
from outrider.sampling.params import Grammar, GrammarKind

VOCABULARY = GrammarVocabulary(b"", 128)


def schema(value: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, value if isinstance(value, str) else json.dumps(value))


def lark(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


def chain(depth: int, attributes: str = "") -> Grammar:
    """So many rules, each naming the next."""
    names = ["start", *(f"r{number}" for number in range(1, depth))]
    rules = [f"{name}{attributes}: {inner}" for name, inner in itertools.pairwise(names)]
    return lark("\n".join([*rules, f'{names[-1]}: "a"']))


def terminals(depth: int) -> Grammar:
    rules = [f'T{number}: "x" T{number + 1}' for number in range(depth - 2)]
    return lark("\n".join(["start: T0", *rules, f'T{depth - 2}: "a"']))


def many(num_rules: int) -> Grammar:
    names = [f"r{number}" for number in range(num_rules - 1)]
    return lark("\n".join([f"start: {' | '.join(names)}", *(f'{name}: "a"' for name in names)]))


def operators(number: int, operator: str) -> Grammar:
    term = "/a*/" if operator == "&" else "~/a/"
    return lark(f"start: A\nA: {' & '.join([term] * (number + 1)) if operator == '&' else ' | '.join([term] * number)}")


def nested(depth: int) -> Grammar:
    return schema('{"not":' * (depth - 1) + "{}" + "}" * (depth - 1))


def inner(form: Grammar) -> Grammar:
    return lark(f"start: %json {form.text}")


AT_THE_BOUND = {
    "rules deep": chain(MAX_RULE_DEPTH),
    "terminals deep": terminals(MAX_RULE_DEPTH),
    "rules": many(MAX_RULES),
    "and": operators(MAX_TERM_OPERATORS, "&"),
    "multipleOf": schema({"type": "integer", "multipleOf": MAX_MULTIPLE_OF - 1}),
    "multipleOf of a fraction": schema({"type": "number", "multipleOf": 0.9999}),
    "multipleOf of a power of ten": schema({"type": "integer", "multipleOf": 10**9}),
    "multipleOf together": schema({"type": "integer", "allOf": [{"multipleOf": 97}, {"multipleOf": 101}]}),
}
BEYOND = {
    "rules deep": (chain(MAX_RULE_DEPTH + 1), f"more than {MAX_RULE_DEPTH} deep: write some out"),
    "rules with attributes": (chain(MAX_RULE_DEPTH + 1, "[lazy]"), f"more than {MAX_RULE_DEPTH} deep"),
    "rules in a ring": (lark(chain(MAX_RULE_DEPTH + 1).text.replace('"a"', '"a" start')), "deep"),
    "terminals deep": (terminals(MAX_RULE_DEPTH + 1), f"more than {MAX_RULE_DEPTH} deep"),
    "rules": (many(MAX_RULES + 1), f"{MAX_RULES + 1} rules and terminals, at most {MAX_RULES}"),
    "and": (operators(MAX_TERM_OPERATORS + 1, "&"), f"{MAX_TERM_OPERATORS + 1} of & and ~"),
    "not": (operators(MAX_TERM_OPERATORS + 1, "~"), f"{MAX_TERM_OPERATORS + 1} of & and ~"),
    "brackets": (nested(MAX_DEPTH + 1), f"more than {MAX_DEPTH} deep"),
    "brackets without end": (schema("[" * MAX_GRAMMAR_CHARS), f"more than {MAX_DEPTH} deep"),
    "multipleOf": (schema({"multipleOf": 10_001}), "multipleOf.*above 10000.*smaller"),
    "multipleOf of a fraction": (schema({"multipleOf": 1.0001}), "multipleOf"),
    "multipleOf of huge numbers": (schema('{"multipleOf": 7e999999}'), "multipleOf"),
    "multipleOf of many digits": (schema('{"multipleOf": %s}' % ("9" * 60_000)), "multipleOf"),
    "multipleOf within": (schema({"properties": {"a": {"items": [{"multipleOf": 99_991}]}}}), "multipleOf"),
    "multipleOf together": (
        schema({"multipleOf": 97, "allOf": [{"multipleOf": 101}, {"multipleOf": 3}]}),
        "multipleOf",
    ),
    "multipleOf of many": (schema({"items": [{"multipleOf": n} for n in range(9_989, 10_000)]}), "its multipleOf add"),
    "multipleOf either": (schema({"multipleOf": 997, "anyOf": [{"multipleOf": 7}, {"multipleOf": 11}]}), "multipleOf"),
    "multipleOf in Lark": (inner(schema({"items": {"multipleOf": 99_999_999}})), "multipleOf"),
    "multipleOf of many in Lark": (
        lark("start: " + " | ".join(f'%json {{"multipleOf": {n}}}' for n in range(9_989, 10_000))),
        "its multipleOf add",
    ),
    "brackets in Lark": (inner(nested(MAX_DEPTH + 1)), f"more than {MAX_DEPTH} deep"),
}
EVERYDAY = [
    schema({"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1e6}),
    schema({"properties": {"multipleOf": {"type": "string"}}, "required": ["multipleOf"], "enum": [{"a": "]}"}]}),
    schema({"multipleOf": "no number"}),
    lark("start: a~2..5 B\na: /[&~]+/ // & ~ & ~\nB: /x/ & ~/y/"),
    lark('start: "%json {" %json {"type": "object"} tail\ntail[max_tokens=5]: /.*/\n# a: b'),
    lark('start: expr\nexpr: expr /[+-]/ term | term\nterm: NUMBER | "(" expr ")"\nNUMBER: /[0-9]+/'),
    Grammar(GrammarKind.REGEX, "(a|b){1,50}[0-9]{4}-[0-9]{2}"),
]
"""And what is no form is left for llguidance to refuse."""


@pytest.mark.parametrize("form", AT_THE_BOUND.values(), ids=AT_THE_BOUND)
def test_at_the_bound_a_form_is_read(form: Grammar) -> None:
    assert len(form.text) <= MAX_GRAMMAR_CHARS
    check_bounds(form)
    VOCABULARY.state(form)


@pytest.mark.parametrize(("form", "says"), BEYOND.values(), ids=BEYOND)
def test_beyond_it_is_refused_by_name_before_it_is_read(form: Grammar, says: str) -> None:
    for refuse in (check_bounds, VOCABULARY.state):
        with pytest.raises(GrammarBeyondBounds, match=says) as caught:
            refuse(form)
        assert caught.value.reason == "GRAMMAR_TOO_COMPLEX"


@pytest.mark.parametrize("form", EVERYDAY, ids=lambda form: form.text[:40])
def test_everyday_forms_are_within(form: Grammar) -> None:
    check_bounds(form)


ODD = [
    '"',
    "/",
    "\\",
    '"\\',
    "%json {",
    "%json ",
    "a",
    "a ",
    "a[",
    "a{} ",
    "a\n",
    "{",
    "[",
    " ",
    "~",
    "a:",
    "a: a\n",
    "//",
    "/a",
]


def test_whatever_a_text_is_it_is_seen_through_at_once() -> None:
    """CPU seconds of a process of its own: each text takes a few milliseconds, and took many seconds where patterns
    were tried at every place anew."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (20, 20))\n"
        "from outrider.sampling.grammar_bounds import *\n"
        f"for part in {ODD!r}:\n"
        "    for kind in GrammarKind:\n"
        "        try: check_bounds(Grammar(kind, part * (MAX_GRAMMAR_CHARS // len(part))))\n"
        "        except GrammarBeyondBounds: pass\n"
        "print('seen')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "seen\n", ran.stderr


def test_a_panic_of_the_engine_is_told_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="with the tokens of this model") as caught:
        VOCABULARY.state(lark('start: "a" <|no_such_token|>'))
    assert "panic" not in str(caught.value)

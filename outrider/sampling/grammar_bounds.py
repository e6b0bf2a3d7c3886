"""Bounds of a form that are seen from its text alone, before llguidance builds anything: each with its own fix.

They know what llguidance's limits do not bound: the stack that a chain of rules takes, and automata that are as large
as a number says. What they let through may still be too much: `coordinator.form_trials` finds out by trying.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal, InvalidOperation
from typing import Any

from outrider.sampling.params import Grammar, GrammarKind

MAX_GRAMMAR_CHARS = 65_536
MAX_DEPTH = 64
"""Of brackets in a JSON schema."""
MAX_MULTIPLE_OF = 10_000
"""Of the digits of `multipleOf`, powers of ten aside: an automaton has a state for each remainder. 9999 takes 20 ms."""
MAX_MULTIPLES_TOGETHER = 100_000
"""Of all in one form, likewise."""
MAX_RULES = 2_000
MAX_RULE_DEPTH = 256
"""Of rules and terminals each naming the next: each is a piece of the stack of whoever reads them."""
MAX_TERM_OPERATORS = 32
"""`&` and `~` of a Lark grammar: automata of all terms at once."""
_MAX_EXPONENT = 400
_LARK = re.compile(
    r"""
    ^[ \t]*[?!]?(?P<rule>[A-Za-z_][\w-]*)(?:\[[^\]\n]{0,500}\]|\{[^}\n]{0,500}\}|\.-?[0-9]+|::\w+|[ \t])*+:(?!:)
    | (?P<json> %json\b\s* )
    | (?P<name> [A-Za-z_][\w-]* )
    | (?P<operator> & | ~(?!\s*[0-9]) )
    | "(?:[^"\\\n]|\\.)*+"? | /(?!/)(?:[^/\\\n]|\\.)++/? | //[^\n]* | \#[^\n]*
    """,
    re.VERBOSE | re.MULTILINE,
)
_JSON_PART = re.compile(r'"(?:[^"\\]|\\.)*+"?|[][{}]', re.DOTALL)


class GrammarBeyondBounds(ValueError):
    """The form breaks a bound. The message names it and the fix."""

    reason = "GRAMMAR_TOO_COMPLEX"


def check_bounds(grammar: Grammar) -> None:
    """In a time that grows as the text does. What is no form of its kind passes: that is told where it is read. Raises
    GrammarBeyondBounds."""
    multiples = 0
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        multiples = _check_json(grammar.text)
    elif grammar.kind is GrammarKind.LARK:
        multiples = _check_lark(grammar.text)
    if multiples > MAX_MULTIPLES_TOGETHER:
        raise GrammarBeyondBounds(
            f"its multipleOf add up to more than {MAX_MULTIPLES_TOGETHER}, powers of ten aside: leave some out"
        )


def _check_json(text: str) -> int:
    """What its multipleOf add up to."""
    _check_depth(text)
    multiples: list[int] = []

    def seen(part: dict[str, Any]) -> dict[str, Any]:
        multiples.append(_digits(part.get("multipleOf")))
        return part

    try:
        schema = json.loads(text, parse_int=Decimal, parse_float=Decimal, object_hook=seen)
    except (ValueError, InvalidOperation):
        return 0
    _divisor(schema)
    return sum(multiples) - len(multiples)


def _check_depth(text: str) -> None:
    depth = 0
    for bracket in _JSON_PART.findall(text):
        depth += (bracket in "[{") - (bracket in "]}")
        if depth > MAX_DEPTH:
            raise GrammarBeyondBounds(
                f"its brackets are nested more than {MAX_DEPTH} deep: name inner schemas in $defs, and refer to them"
            )


def _divisor(schema: Any) -> int:
    """What every number of this schema is a multiple of, powers of ten aside, as far as no $ref says more."""
    if isinstance(schema, list):
        for part in schema:
            _divisor(part)
        return 1
    if not isinstance(schema, dict):
        return 1
    found = _digits(schema.get("multipleOf"))
    for name, part in schema.items():
        if name == "allOf" and isinstance(part, list):
            found = math.lcm(found, *map(_divisor, part))
        elif name in ("anyOf", "oneOf") and isinstance(part, list):
            found = math.lcm(found, max(map(_divisor, part), default=1))
        else:
            _divisor(part)
    if found > MAX_MULTIPLE_OF:
        raise GrammarBeyondBounds(
            f"multipleOf, with all that hold together by allOf, anyOf or oneOf, is above {MAX_MULTIPLE_OF}, powers of "
            "ten aside: leave it out, or give a smaller one"
        )
    return found


def _digits(number: Any) -> int:
    """Without sign, point and zeros at the end."""
    if not isinstance(number, Decimal) or not number.is_finite() or number == 0:
        return 1
    digits = "".join(map(str, number.as_tuple().digits)).rstrip("0")
    if len(digits) > len(str(MAX_MULTIPLE_OF)) or abs(number.adjusted()) > _MAX_EXPONENT:
        return MAX_MULTIPLE_OF + 1
    return int(digits)


def _check_lark(text: str) -> int:
    """What the multipleOf of its JSON schemas add up to."""
    rules: dict[str, list[str]] = {}
    body: list[str] = []
    num_operators = multiples = at = 0
    while (found := _LARK.search(text, at)) is not None:
        at = found.end()
        if found["operator"]:
            num_operators += 1
        elif found["json"]:
            begin, at = at, _json_end(text, at)
            multiples += _check_json(text[begin:at])
        elif found["rule"]:
            body = rules.setdefault(found["rule"], [])
        elif found["name"]:
            body.append(found["name"])
    if num_operators > MAX_TERM_OPERATORS:
        raise GrammarBeyondBounds(
            f"it has {num_operators} of & and ~, at most {MAX_TERM_OPERATORS} are taken: write terminals without them"
        )
    if len(rules) > MAX_RULES:
        raise GrammarBeyondBounds(
            f"it has {len(rules)} rules and terminals, at most {MAX_RULES} are taken: put some of them together"
        )
    if _rule_depth(rules) > MAX_RULE_DEPTH:
        raise GrammarBeyondBounds(
            f"its rules and terminals name one another more than {MAX_RULE_DEPTH} deep: write some out where they are "
            "named"
        )
    return multiples


def _json_end(text: str, begin: int) -> int:
    """Of the object or array there; `begin` where there is none."""
    depth = 0
    if text[begin : begin + 1] not in ("{", "["):
        return begin
    for found in _JSON_PART.finditer(text, begin):
        depth += (found[0] in "[{") - (found[0] in "]}")
        if depth == 0:
            return found.end()
    return len(text)


def _rule_depth(rules: dict[str, list[str]]) -> int:
    """Rules that are open at once, at most, when each is read where it is named first."""
    read: set[str] = set()
    deepest = 0
    for first in ("start", *rules):
        named = [iter((first,))]
        """Of each open rule what it names; before them the first one."""
        while named:
            inner = next(named[-1], None)
            if inner is None:
                named.pop()
            elif inner in rules and inner not in read:
                read.add(inner)
                named.append(iter(rules[inner]))
                deepest = max(deepest, len(named) - 1)
    return deepest

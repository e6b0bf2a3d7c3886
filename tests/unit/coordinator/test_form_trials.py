"""Forms are tried where they can end nobody: whatever one does, its client is told, and the next one is read."""

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest
from waiting import PATIENCE_S, until

from coordinator import form_trials
from coordinator.form_trial_process import tried
from coordinator.form_trials import NUM_PROCESSES, FormTrials
from outrider.errors import InvalidArgument, Unavailable
from outrider.sampling.params import Grammar, GrammarKind

EASY = Grammar(GrammarKind.REGEX, "[a-c]+")
HANGS = Grammar(GrammarKind.LARK, "start: A\nA: " + " & ".join(f"/(.*a.{{{number}}}b)*/" for number in range(1, 25)))
"""Within all bounds, and reading it takes more than half a minute."""
FILLS = Grammar(
    GrammarKind.JSON_SCHEMA,
    '{"type": "integer", "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],'
    ' "$defs": {"a": {"multipleOf": 9973}, "b": {"multipleOf": 9967}}}',
)
"""Likewise, and an automaton of a hundred million states."""
BAD = [
    (Grammar(GrammarKind.JSON_SCHEMA, "{"), "structured_output.json_schema", "EOF"),
    (Grammar(GrammarKind.REGEX, "(("), "structured_output.regex", "unclosed group"),
    (Grammar(GrammarKind.LARK, "x"), "structured_output.grammar", "grammar: "),
]
DIES = (
    "import sys, json, os, signal, threading\n"
    "print('{}', flush=True)\n"
    "for line in sys.stdin:\n"
    "    text = json.loads(line)['text']\n"
    "    if text.isdigit(): os.kill(os.getpid(), int(text))\n"
    "    if text == 'sleep': threading.Event().wait()\n"
    "    print(json.dumps({'reason': '', 'problem': '', 'is_last': text == 'last'}), flush=True)\n"
    "    if text == 'last': break\n"
)


@pytest.fixture
async def trials() -> AsyncIterator[FormTrials]:
    found = FormTrials()
    yield found
    await found.close()


@pytest.fixture
async def stand_ins() -> AsyncIterator[FormTrials]:
    """Of processes that do what a text says."""
    found = FormTrials((sys.executable, "-c", DIES))
    yield found
    await found.close()


def text(told: object) -> Grammar:
    return Grammar(GrammarKind.REGEX, str(told))


@pytest.mark.parametrize(("form", "field", "says"), BAD)
async def test_a_bad_form_is_refused_by_name(trials: FormTrials, form: Grammar, field: str, says: str) -> None:
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=says) as caught:
            await trials.check(form)
        assert (caught.value.field, caught.value.reason) == (field, "BAD_GRAMMAR")
        assert field in str(caught.value)


async def test_a_form_that_fills_the_memory_is_refused(trials: FormTrials, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the limit of memory, long before that of time."""
    monkeypatch.setattr(form_trials, "MAX_CPU_S", 600)
    monkeypatch.setattr(form_trials, "MAX_WAIT_S", PATIENCE_S)
    with pytest.raises(InvalidArgument) as caught:
        await trials.check(FILLS)
    assert (caught.value.field, caught.value.reason) == ("structured_output", "GRAMMAR_TOO_COMPLEX")


async def test_a_form_that_hangs_is_refused_and_the_next_one_read(
    trials: FormTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form_trials, "MAX_CPU_S", 1)
    monkeypatch.setattr(form_trials, "MAX_WAIT_S", PATIENCE_S)
    hanging, _ = await asyncio.gather(trials.check(HANGS), trials.check(EASY), return_exceptions=True)
    assert isinstance(hanging, InvalidArgument), hanging
    assert (hanging.field, hanging.reason) == ("structured_output", "GRAMMAR_TOO_COMPLEX")
    await trials.check(text("[a-d]+"))


@pytest.mark.parametrize(
    "form",
    [
        Grammar(GrammarKind.LARK, 'start: "a" <|im_start|> <[40000]> <[^5]> "é" <[3,7-9]>'),
        Grammar(GrammarKind.JSON_SCHEMA, "{}"),
        Grammar(GrammarKind.REGEX, "é€+"),
    ],
)
def test_what_models_have_that_are_not_known_here_is_no_fault(form: Grammar) -> None:
    assert tried(form) == {"reason": "", "problem": ""}


@pytest.mark.parametrize("number", [6, 7, 11, 24])
async def test_whoever_a_form_has_ended_found_it_too_complex(stand_ins: FormTrials, number: int) -> None:
    for _ in range(2):
        with pytest.raises(InvalidArgument) as caught:
            await stand_ins.check(text(number))
        assert (caught.value.field, caught.value.reason) == ("structured_output", "GRAMMAR_TOO_COMPLEX")
        await stand_ins.check(text("a"))


async def test_another_death_says_nothing_of_the_form(stand_ins: FormTrials) -> None:
    for _ in range(2):
        with pytest.raises(Unavailable) as caught:
            await stand_ins.check(text(9))
        assert caught.value.retry_delay_s
    await stand_ins.check(text("last"))
    await stand_ins.check(text("a"))


async def test_where_nothing_can_be_started_it_is_told() -> None:
    with pytest.raises(Unavailable):
        await FormTrials((sys.executable, "-c", "")).check(EASY)
    with pytest.raises(Unavailable):
        await FormTrials(("/no/such/program",)).check(EASY)


async def test_who_hangs_up_ends_the_trial_and_keeps_nobody_waiting(stand_ins: FormTrials) -> None:
    hanging = [asyncio.create_task(stand_ins.check(text("sleep"))) for _ in range(NUM_PROCESSES)]
    waiting = [asyncio.create_task(stand_ins.check(text(f"a{number}"), tenant=str(number))) for number in range(4)]
    await until(lambda: len(stand_ins._queue) == 4)
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting[1:])
    for task in hanging:
        task.cancel()
    await asyncio.gather(*waiting[1:])
    assert all(
        isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*hanging, return_exceptions=True)
    )
    await stand_ins.check(text("b"))

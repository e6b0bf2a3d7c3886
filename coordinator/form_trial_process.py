"""`python -m coordinator.form_trial_process`: reads forms in a process that may be lost.

A form is a program for llguidance's compiler, which may run for hours over a short one, fill the memory or overflow its
stack. Here that costs this process alone. One line of JSON in, one out: see `coordinator.form_trials`.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import resource
import signal
import sys
import threading
import time

from llguidance import LLTokenizer, TokenizerWrapper

from outrider.sampling.grammar import GrammarTooComplex, GrammarVocabulary, check_grammar
from outrider.sampling.params import Grammar, GrammarKind

MAX_MEMORY_BYTES = 256 << 20
"""Beside what it takes to start: all of them and a coordinator fit into the 1 GiB that `deploy` gives one."""
MAX_KEPT_BYTES = 64 << 20
"""A process that has grown by more ends behind its answer."""
STACK_BYTES = 2 << 20
"""A quarter of what `outrider.serving.daemon_threads` has: what goes here goes there."""
MAX_TOKENS = 1 << 20
_SPECIAL = re.compile(r"<([^<>\s\[\]]+)>")
_BY_ID = re.compile(r"<\[([^\]]*)\]>")


class FormTokens:
    """Every byte a token, and those that a form has by name or id: what a form is read with where no model is known.
    In the way of llguidance's own tokenizers."""

    def __init__(self, form: Grammar) -> None:
        is_lark = form.kind is GrammarKind.LARK
        names = dict.fromkeys(_SPECIAL.findall(form.text)) if is_lark else {}
        ids = [int(id[:9]) for ids in _BY_ID.findall(form.text) for id in re.findall("[0-9]+", ids)] if is_lark else []
        most = min(max(ids, default=0), MAX_TOKENS)
        self.tokens = [bytes([byte]) for byte in range(255)]
        self.tokens += [b"\xff<" + name.encode() + b">" for name in names]
        self.tokens += [b"\xff[%d]" % number for number in range(len(self.tokens), most + 1)]
        self.eos_token_id = len(self.tokens)
        self.tokens.append(b"\xff<end of text>")
        self.bos_token_id = None
        self.special_token_ids: list[int] = []

    def __call__(self, text: bytes | str) -> list[int]:
        return [byte for byte in (text.encode() if isinstance(text, str) else text) if byte < 255]


class FormVocabulary(GrammarVocabulary):
    """Of these tokens."""

    def __init__(self, form: Grammar) -> None:
        tokens = FormTokens(form)
        super().__init__(b"", len(tokens.tokens))
        self._form_tokens = tokens

    def _read(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(self._form_tokens))


def main() -> None:
    """Until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the coordinator's to hear
    threading.stack_size(STACK_BYTES)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory is short this process goes first
    _limit(resource.RLIMIT_AS, _address_space_bytes() + MAX_MEMORY_BYTES)
    at_first = _most_memory_bytes()
    _answer({"ready": True})
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + asked["max_cpu_s"])
        verdict = _tried_in_a_thread(Grammar(GrammarKind[asked["kind"]], asked["text"]))
        is_last = _most_memory_bytes() - at_first > MAX_KEPT_BYTES
        _answer({**verdict, "is_last": is_last})
        if is_last:
            return


def _tried_in_a_thread(form: Grammar) -> dict[str, str]:
    found: list[dict[str, str]] = []
    thread = threading.Thread(target=lambda: found.append(tried(form)))
    thread.start()
    thread.join()
    return found[0]


def tried(form: Grammar) -> dict[str, str]:
    """`reason` and `problem`, both empty where a worker may read it."""
    try:
        check_grammar(form)
        FormVocabulary(form).state(form)
    except GrammarTooComplex as error:
        return {"reason": error.reason, "problem": error.message}
    except ValueError as error:
        return {"reason": getattr(error, "reason", "BAD_GRAMMAR"), "problem": str(error)}
    return {"reason": "", "problem": ""}


def _answer(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


def _limit(kind: int, soft: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _most_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()

"""`python -m engine_service.grammar.checker N`: tries constraints out where a bad one does no harm.

A process of its own, with bounds on memory and time, started by `checker_process`; N is the descriptor of a
connection to it. It converts and compiles a constraint, and draws some tokens under it: what hangs, explodes or
crashes does so in a child of it, which is made anew in milliseconds, since the vocabulary is there already.
Must not know: requests, the engine.
"""

import ctypes
import os
import random
import resource
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from llguidance import LLTokenizer

from engine_service.core.sampling import StructuredOutput
from engine_service.grammar.limits import GrammarLimits
from engine_service.grammar.matcher import Grammar, GrammarFailure, Matcher
from engine_service.grammar.source import BadGrammar, grammar_text
from engine_service.grammar.vocabulary import load_vocabulary

_PR_SET_PDEATHSIG = 1
_NICE = 10  # never instead of a step of the engine


def main() -> None:
    """Answers (number, constraint, CPU seconds) with (number, "ok", grammar text) or (number, "bad", message).

    For a child that died it says (None, "stopped", ""). Ends with its connection.
    """
    connection = Connection(int(sys.argv[1]))
    folder, vocab_size, eos_token_ids, limits = connection.recv()
    os.nice(_NICE)
    vocabulary = load_vocabulary(Path(folder), vocab_size, eos_token_ids)
    resource.setrlimit(resource.RLIMIT_AS, (limits.check_memory_bytes, limits.check_memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.send("ready")
    while True:
        child = os.fork()
        if child == 0:
            _end_with_parent()
            _serve(connection, vocabulary, eos_token_ids, limits)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            return
        connection.send((None, "stopped", ""))


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(
    connection: Connection, vocabulary: LLTokenizer, eos_token_ids: tuple[int, ...], limits: GrammarLimits
) -> None:
    """Until the connection ends. Nobody handles the signals of the timers: a check that takes too long dies of them."""
    while True:
        try:
            number, constraint, cpu_s = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_REAL, limits.check_wall_s)
        answer = _answer(constraint, vocabulary, eos_token_ids, limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send((number, *answer))


def _answer(
    constraint: StructuredOutput, vocabulary: LLTokenizer, eos_token_ids: tuple[int, ...], limits: GrammarLimits
) -> tuple[str, str]:
    try:
        text = grammar_text(constraint, limits)
        grammar = Grammar(vocabulary, text, limits)
        for seed in range(2):
            matcher = grammar.new_matcher(eos_token_ids, time.process_time)
            _draw(matcher, frozenset(eos_token_ids), limits.trial_tokens, random.Random(seed))  # noqa: S311 (no secret)
    except (BadGrammar, GrammarFailure) as error:
        return "bad", str(error)
    except MemoryError:
        return "bad", f"the grammar is too complex: it needs more than {limits.check_memory_bytes >> 20:,} MiB"
    except BaseException as error:  # a panic of the library is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return "bad", "the grammar cannot be used: the grammar library failed on it"
    return "ok", text


def _draw(matcher: Matcher, end_ids: frozenset[int], count: int, draw: random.Random) -> None:
    """Goes on as long as anything but the end may come."""
    for place in range(count):
        token = _any_of(matcher.allowed(), end_ids, draw)
        if token is None:
            return
        if token < 0:
            raise GrammarFailure(f"no text fits the grammar (after {place} tokens)" if place else "no text fits it")
        matcher.advance(token)


def _any_of(bits: bytes, end_ids: frozenset[int], draw: random.Random) -> int | None:
    """A token that is allowed and not an end; None when only ends are, -1 when nothing is."""
    mask = int.from_bytes(bits, "little")
    if mask == 0:
        return -1
    for token in end_ids:
        mask &= ~(1 << token)
    if mask == 0:
        return None
    # From a random place on, so that nothing of the size of the vocabulary is built.
    place = draw.randrange(len(bits) * 8)
    upper = mask >> place
    chosen = upper if upper else mask
    return (place if upper else 0) + (chosen & -chosen).bit_length() - 1


if __name__ == "__main__":
    main()

"""How much a grammar may cost: what keeps one request's constraint from being everybody's problem.

Must not know: requests, steps, processes.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Checking happens in a process of its own, which may be killed; the other limits are the library's or counted.

    A check that takes more than `quick_cpu_s` gives way to the others: it begins again beside them, where at most
    `max_patient` wait. `check_cpu_s` and `check_wall_s` bound the check of one grammar, `check_memory_bytes` that
    process. `step_cpu_s` bounds the CPU time a grammar takes for one token: the mask before it and the move after it.
    `max_repeats` bounds the product of nested repeat counts; larger ones make single steps of the library long (see
    docs/structured-output.md). `trial_tokens` are drawn in the check, so that what is slow is found there.
    """

    quick_cpu_s: float = 0.1
    max_patient: int = 4
    check_cpu_s: int = 2
    check_wall_s: float = 10.0
    check_memory_bytes: int = 2 * 1024**3
    step_cpu_s: float = 0.1
    max_repeats: int = 10_000
    trial_tokens: int = 48
    max_items_per_step: int = 20_000
    max_symbols: int = 50_000
    max_lexer_states: int = 20_000
    max_cached: int = 128
    max_cached_characters: int = 4 * 1024**2
    max_waiting: int = 32

    def parser(self) -> "LLParserLimits":
        """The library's own limits: items of its parser, states and derivatives of its lexer."""
        from llguidance import LLParserLimits  # a worker without grammars runs where it is not installed

        return LLParserLimits(
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=100_000,
            step_max_items=self.max_items_per_step,
            max_lexer_states=self.max_lexer_states,
            max_grammar_size=self.max_symbols,
            verbose_errors=False,
        )

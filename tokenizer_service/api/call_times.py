"""Where the time of a generation went, stage by stage, for the line about a slow one.

Only durations meet here: those of the engine were taken by its clock, the others by ours. Must not know: logs,
transports.
"""

from dataclasses import dataclass

from tokenizer_service.engines.messages import StageTimes


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Seconds on our clock since the call began; None: it did not come to that. `engine`: of the sample that ended
    last.
    """

    total_s: float
    taken_s: float | None = None
    first_token_s: float | None = None
    engine: StageTimes | None = None

    def stages(self, failovers: int) -> dict[str, float]:
        """Seconds by stage; together they are the total.

        encode: checks, template, encoding, choice of the engine. wait: on the way to the engine. queue, prefill,
        decode: in the engine. deliver: text made and read. What cannot be told apart, with engines that were lost or
        an engine that said nothing, is `elsewhere`.
        """
        if self.taken_s is None:
            return _rounded({"encode": self.total_s})
        if self.engine is None:
            return _rounded({"encode": self.taken_s, "elsewhere": self.total_s - self.taken_s})
        stages = {
            "encode": self.taken_s,
            "queue": self.engine.queue_s,
            "prefill": self.engine.prefill_s,
            "decode": self.engine.decode_s,
        }
        rest = max(0.0, self.total_s - sum(stages.values()))
        if failovers:
            return _rounded(stages | {"elsewhere": rest})
        until_token = (self.total_s if self.first_token_s is None else self.first_token_s) - self.taken_s
        wait = min(rest, max(0.0, until_token - self.engine.queue_s - self.engine.prefill_s))
        return _rounded(stages | {"wait": wait, "deliver": rest - wait})


def _rounded(stages: dict[str, float]) -> dict[str, float]:
    return {f"{name}_seconds": round(seconds, 6) for name, seconds in stages.items()}

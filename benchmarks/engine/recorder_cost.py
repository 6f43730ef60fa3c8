"""What the step recorder costs a step: `python -m benchmarks.engine.recorder_cost`.

Must not know: devices, models.
"""

import gc
import statistics
import time
from collections.abc import Callable

from engine_service.core.plan import Chunk, Plan
from engine_service.core.stats import EngineStats, StepRecord
from engine_service.loop.step_recorder import NullRecorder, Recorder, StepRecorder

STEPS = 5000
_STATS = EngineStats(256, 0, 0, 4096, 2048, 0, 2048, 1, 0, 0, 0, 0, 0, 0, {})


def seconds_per_step(recorder: Recorder, decodes: int) -> float:
    """CPU time of its calls and of the readings of the clock for them, with new chunks for each step."""
    clock: Callable[[], float] = time.monotonic
    spent = 0.0
    for step in range(1, STEPS + 1):
        chunks = tuple([Chunk(request_id, step, 1, (), True) for request_id in range(decodes)])
        plan = Plan(step, chunks)
        record = StepRecord(step, decodes, 0, decodes, 0, 2048, (), (), decodes, 0, 2048)
        began = time.thread_time()
        now = clock()
        recorder.planned(plan, record, (now, clock()))
        recorder.submitted(step, clock())
        asked, answered = clock(), clock()
        recorder.next_piece()
        recorder.settled(step, (asked, answered, answered, clock()), _STATS)
        spent += time.thread_time() - began
    return spent / STEPS


def main() -> None:
    gc.freeze()
    for decodes in (1, 32, 256):
        off = statistics.median(seconds_per_step(NullRecorder(), decodes) for _ in range(5))
        on = statistics.median(seconds_per_step(StepRecorder(256), decodes) for _ in range(5))
        print(f"{decodes} requests: off {off * 1e6:.2f} us, on {on * 1e6:.2f} us a step")


if __name__ == "__main__":
    main()

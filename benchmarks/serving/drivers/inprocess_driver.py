"""Our engine loop without sockets and processes as a driver: `python -m benchmarks.serving.drivers.inprocess_driver`.

Takes the flags of `tokenwire-engine`. The ceiling of what the services can reach. Must not know: the harness
beyond the driver protocol.
"""

import os
import time
from dataclasses import dataclass, field
from importlib.metadata import version

from benchmarks.engine.memory_mailbox import MemoryMailbox, build_in_process
from benchmarks.serving.drivers.closed_run import ClosedRun, Job, Progress
from benchmarks.serving.drivers.protocol import Channel
from engine_service.config import ENV_PREFIX, PROGRAM, EngineSettings
from engine_service.core.sampling import SamplingParams
from engine_service.engine_config import engine_config
from engine_service.loop.messages import Command, Shutdown, StepReport, Submit
from service_runtime.config import load_settings
from service_runtime.model_files import resolve_model_folder


@dataclass(slots=True)
class Ordered:
    """The loop's commands and reports, joined to the run that the harness ordered."""

    channel: Channel
    run: ClosedRun | None = None
    _offset: int = 0
    _keys: dict[int, int] = field(default_factory=dict)

    def next_commands(self, is_idle: bool) -> list[Command]:
        """The next requests of the run; when the engine is idle and the run done, those of the next run."""
        commands = self._submits()
        if commands or not is_idle:
            return commands
        if self.run is not None:
            self.channel.answer(self.run)
        self.run = self.channel.next_run(time.monotonic)
        return [Shutdown()] if self.run is None else self._submits()

    def _submits(self) -> list[Command]:
        return [] if self.run is None else [self._submit(job) for job in self.run.take()]

    def _submit(self, job: Job) -> Command:
        self._offset += 1
        self._keys[self._offset] = job.key
        sampling = SamplingParams(max_tokens=job.max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        return Submit(self._offset, job.token_ids, sampling)

    def on_report(self, report: StepReport) -> None:
        assert self.run is not None
        for news in report.news:
            error = None if news.finish is None or news.finish.error is None else news.finish.error.message
            is_over = news.finish is not None
            self.run.note(Progress(self._keys[news.request_id], len(news.token_ids), is_over, error))
            if is_over:
                del self._keys[news.request_id]


def main() -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    settings = load_settings(EngineSettings, program=PROGRAM, env_prefix=ENV_PREFIX)
    channel = Channel.of_process()
    ordered = Ordered(channel)
    mailbox = MemoryMailbox(ordered.next_commands, ordered.on_report)
    loop, _ = build_in_process(engine_config(settings), resolve_model_folder(settings.model), mailbox)
    channel.ready(f"tokenwire {version('tokenwire')}")
    loop.run()


if __name__ == "__main__":
    main()

"""The engine process's main: has the engine built, and runs it until the front is done with it.

The front starts it (`loop/engine_process.py`). Must not know: gRPC, sessions, how an engine is built.
"""

import socket
import sys
import time
from pathlib import Path

import structlog

from engine_service.build_engine import build_engine
from engine_service.embedded_model import PreparationFailed, prepare_default_model
from engine_service.engine_config import EngineConfig
from engine_service.loop.engine_loop import EngineLoop
from engine_service.loop.engine_process import STACK_DUMP_SIGNAL
from engine_service.loop.mailbox import EngineMailbox, FrontGone
from engine_service.loop.messages import EngineFatal, EngineReady, StartFailed
from engine_service.loop.step_dump import StepDump, block_step_dump_signal
from engine_service.loop.step_recorder import StepRecorder
from engine_service.worker.ranks import RankLost
from service_runtime.child_process import live_and_die_with_the_parent
from service_runtime.logs import configure_logging
from service_runtime.model_files import (
    DEFAULT_MODEL,
    ModelNotFound,
    resolve_model_folder,
)
from service_runtime.process_tuning import keep_start_up_objects, pause_collection


def main() -> None:
    """`python -m engine_service.engine_main N`: N is the descriptor of the engine's end of the mailbox."""
    live_and_die_with_the_parent(dump_signal=STACK_DUMP_SIGNAL)
    block_step_dump_signal()
    pause_collection()
    mailbox = EngineMailbox(socket.socket(fileno=int(sys.argv[1])))
    try:
        config = _receive_config(mailbox)
        configure_logging(level=config.log.level, log_format=config.log.log_format, service="engine")
        recorder = StepRecorder(config.recorder.steps) if config.recorder.steps else None
        dump = _step_dump(config, recorder)
        loop, ready = _start(config, mailbox, recorder)
        keep_start_up_objects()  # takes a moment, in which a first request would wait
        mailbox.send_now(ready)
        _run(loop, mailbox, dump)
    except FrontGone:
        raise SystemExit(0) from None


def _receive_config(mailbox: EngineMailbox) -> EngineConfig:
    received: list[object] = []
    while not received:
        received = mailbox.take(wait=True)
    (config,) = received
    assert isinstance(config, EngineConfig)
    return config


def _step_dump(config: EngineConfig, recorder: StepRecorder | None) -> StepDump | None:
    """None where nobody wants one. Also written when the front says that the loop hangs."""
    folder = config.recorder.dump_folder
    if recorder is None or folder is None:
        return None
    dump = StepDump(recorder, folder, time.monotonic, _tell_dump)
    dump.write_on_signal()
    return dump


def _tell_dump(outcome: Path | OSError) -> None:
    log = structlog.get_logger()
    if isinstance(outcome, OSError):
        log.error("steps not dumped", reason=outcome.strerror)
    else:
        log.warning("steps dumped", file=str(outcome))


def _start(
    config: EngineConfig, mailbox: EngineMailbox, recorder: StepRecorder | None
) -> tuple[EngineLoop, EngineReady]:
    try:
        return build_engine(config, _prepare_model(config.model.reference), mailbox, recorder)
    except (ValueError, ModelNotFound, PreparationFailed) as error:
        message = str(error)
    except Exception as error:
        structlog.get_logger().exception("engine start failed")
        message = f"the engine could not start: {error}"
    mailbox.send_now(StartFailed(message))
    raise SystemExit(1)


def _prepare_model(reference: str) -> Path:
    if reference == DEFAULT_MODEL:
        return prepare_default_model(lambda line: structlog.get_logger().info(line))
    return resolve_model_folder(reference)


def _run(loop: EngineLoop, mailbox: EngineMailbox, dump: StepDump | None) -> None:
    try:
        loop.run()
    except FrontGone:
        raise
    except Exception as error:
        # The state of device and pool is unknown now: a fresh process is the only safe way on.
        structlog.get_logger().exception("engine failed")
        if dump is not None:
            dump.write()
        reason = str(error) if isinstance(error, RankLost) else type(error).__name__
        mailbox.send_now(EngineFatal(f"the engine failed: {reason}"))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()

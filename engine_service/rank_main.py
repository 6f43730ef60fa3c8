"""A tensor parallel rank's main: one more process beside the engine process, with a share of the model.

The engine process, which is rank 0, starts it (`worker/rank_processes.py`). Must not know: the front, the scheduler.
"""

import signal
import sys
from multiprocessing.connection import Connection
from typing import cast

import structlog

from service_runtime.child_process import live_and_die_with_the_parent
from service_runtime.logs import LogFormat, configure_logging
from service_runtime.process_tuning import keep_start_up_objects, pause_collection


def main() -> None:
    """`python -m engine_service.rank_main N LEVEL FORMAT`: N is the descriptor of the connection to rank 0.

    Exit status: 0 once rank 0 has closed the connection, 1 after a failure.
    """
    live_and_die_with_the_parent(dump_signal=signal.SIGUSR1)
    configure_logging(level=sys.argv[2], log_format=cast(LogFormat, sys.argv[3]), service="engine-rank")
    log = structlog.get_logger()
    try:
        _run(Connection(int(sys.argv[1])))
        return
    except EOFError:
        log.info("rank not started", reason="rank 0 gave up")
    except ValueError as error:
        # Rank 0 reads the same files: it finds the same, and says so.
        log.info("rank not started", reason=str(error))
    except Exception:
        log.exception("rank failed")
    raise SystemExit(1)


def _run(connection: Connection) -> None:
    pause_collection()
    from engine_service.worker.rank_follower import follow

    follow(connection, on_ready=keep_start_up_objects)


if __name__ == "__main__":
    main()

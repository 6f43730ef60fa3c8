"""`tokenwire-engine` and the like in documents: started in the background, returns when it is ready; its pid is noted.

A reader gives each service a terminal of its own; a script of blocks has one. `python -m tests.documents.background
engine ARGUMENTS...`; a service that ends at once (a wrong flag, `--help`) ends this with its exit code and output.
Must not know: documents.
"""

import contextlib
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from deploy.local import POLL_S, READY_TIMEOUT_S, Service, StartFailed, start_service, wait_for_ports


def main(name: str, flags: list[str]) -> int:
    """The exit code."""
    log = Path(os.environ["DOCUMENTS_LOGS"]) / f"{name}-{time.time_ns()}.log"
    service = start_service(name, log, *flags)
    with Path(os.environ["DOCUMENTS_PIDS"]).open("a") as pids:
        pids.write(f"{service.process.pid}\n")
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        ports = wait_for_ports(service, deadline)
        _wait_until_ready(service, f"http://127.0.0.1:{ports.metrics}/readyz", deadline)
    except StartFailed as failure:
        print(failure, file=sys.stderr)
        return service.process.poll() or 1
    return 0


def _wait_until_ready(service: Service, url: str, deadline: float) -> None:
    while time.monotonic() < deadline:
        service.assert_alive()
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(POLL_S)
    raise StartFailed(f"not ready in time: {service.log}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

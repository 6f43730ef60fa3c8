"""What the loop needs of a worker.

Must not know: torch, how a plan is executed.
"""

from typing import Protocol

from engine_service.core.plan import Plan, Result


class Worker(Protocol):
    """Executes plans in the order they were submitted. An exception from a method is fatal for the engine."""

    def submit(self, plan: Plan) -> None:
        """Starts a plan; at least two may be in flight."""

    def result(self) -> Result:
        """Waits for the oldest plan in flight and returns what it sampled."""

    def close(self) -> None:
        """Gives the device back."""

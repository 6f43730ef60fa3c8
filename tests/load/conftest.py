"""The soak tests run on the same stack as the integration tests."""

from tests.integration.conftest import hist_folder, succ_folder, succ_stack

__all__ = ["hist_folder", "succ_folder", "succ_stack"]

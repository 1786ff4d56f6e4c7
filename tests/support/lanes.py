"""With `-n`: which process runs what.

Each file is one piece of work, but all that needs the machine for itself is one piece, and the first. Not by
pytest-xdist's own groups: as of 3.8 it loses them with pytest 9.2.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# what starts a real vLLM, or judges a whole fleet of processes by the clock: never two of these at a time
ALONE = (
    "tests/acceptance/",
    "tests/chaos/",
    "tests/conformance/",
    "tests/contract/cache/",
    "tests/contract/proof/",
    "tests/scenarios/test_vllm.py",
)


class Lanes(LoadScopeScheduling):
    """One lane for what is `ALONE`, the others for the rest, in the order of the directories."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "alone" if file.startswith(ALONE) else file

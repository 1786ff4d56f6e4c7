"""Every promise holds in every state of each world, within the bound of the suite; tools/model searches further."""

from __future__ import annotations

import pytest

from model.search import search
from model.worlds import WORLDS


@pytest.mark.parametrize("name", WORLDS)
def test_no_promise_is_broken_within_the_bound(name: str) -> None:
    world = WORLDS[name]
    found = search(world.make(), depth=world.depth)
    assert found.states > 500  # the world is not stuck
    assert found.depth == world.depth

"""Paths that somebody else may have made before us."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptersync_core.own_place import foreign_part
from support import strangers
from support.strangers import Stranger


@pytest.fixture
def common(tmp_path: Path) -> Path:
    return strangers.common(tmp_path)


def test_what_we_made_is_ours(common: Path) -> None:
    place = common / "ours" / "staged"
    place.mkdir(parents=True)
    assert foreign_part(place) is None


def test_what_a_stranger_made_first_is_not(common: Path, stranger: Stranger) -> None:
    place = common / "ours" / "staged"
    place.mkdir(parents=True)
    stranger.takes(place.parent)
    assert foreign_part(place) == place.parent


def test_nor_is_what_a_stranger_made_it_lead_to(common: Path, tmp_path: Path, stranger: Stranger) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = common / "staged"
    link.symlink_to(tmp_path / "elsewhere")
    assert foreign_part(link) is None
    stranger.takes(link)
    assert foreign_part(link) == link


def test_our_own_link_does_not_make_it_ours(common: Path, tmp_path: Path, stranger: Stranger) -> None:
    theirs = common / "theirs"
    theirs.mkdir()
    (tmp_path / "link").symlink_to(theirs)
    stranger.takes(theirs)
    assert foreign_part(tmp_path / "link" / ".") == theirs


def test_what_another_user_was_given_elsewhere_is_the_hosts_own_affair(tmp_path: Path, stranger: Stranger) -> None:
    place = tmp_path / "given"
    place.mkdir()
    stranger.takes(place)
    assert foreign_part(place) is None

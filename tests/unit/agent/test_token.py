"""The agent's token for the door."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from adaptersync.agent.token import new_token
from adaptersync.engine.door import shows_token
from adaptersync_core.errors import ConfigError
from support.strangers import Stranger, common


def test_each_start_makes_another_and_shuts_out_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "token"
    first = new_token(str(file))
    assert shows_token([first.encode()], file)
    second = new_token(str(file))
    assert shows_token([second.encode()], file)
    assert not shows_token([first.encode()], file)
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


def test_others_cannot_read_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("left by somebody")
    file.chmod(0o666)
    new_token(str(file))
    assert stat.S_IMODE(file.stat().st_mode) & 0o137 == 0


def test_without_a_door_there_is_none() -> None:
    assert new_token("") == ""


def test_where_it_cannot_be_left_the_setting_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"agent\.token_file"):
        new_token(str(tmp_path / "file" / "token"))


def test_its_directory_is_made_where_nothing_else_makes_it(tmp_path: Path) -> None:
    file = tmp_path / "run" / "0" / "token"
    new_token(str(file))
    assert file.exists()
    assert not file.parent.stat().st_mode & 0o007


def test_nothing_is_left_where_the_place_is_taken(tmp_path: Path) -> None:
    (tmp_path / "token").mkdir()
    with pytest.raises(ConfigError):
        new_token(str(tmp_path / "token"))
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


def test_none_is_left_or_taken_where_a_stranger_was_first(tmp_path: Path, stranger: Stranger) -> None:
    file = common(tmp_path) / "run" / "0" / "token"
    token = new_token(str(file))
    assert shows_token([token.encode()], file)
    stranger.takes(file.parent.parent)
    with pytest.raises(ConfigError, match="somebody else's"):
        new_token(str(file))
    assert not shows_token([token.encode()], file)

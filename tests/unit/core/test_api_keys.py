"""Keys that clients show: what is kept of them, who they are, and a file that changes under way."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

import pytest

from adaptersync_core import api_keys
from adaptersync_core.api_keys import ApiKeys, bearer, new_key, parse, read_secret
from adaptersync_core.errors import ConfigError, NameInvalid


def write(path: Path, *keys: api_keys.ApiKey) -> None:
    path.write_text("# who may what\n\n" + "".join(key.line() for key in keys))
    os.utime(path, ns=(path.stat().st_mtime_ns + 1_000_000,) * 2)  # another look would see the same moment


def shown(text: str) -> bytes:
    return f"Bearer {text}".encode()


def test_a_key_is_known_by_its_hash_and_may_what_it_says(tmp_path: Path) -> None:
    (one, kept_one), (two, kept_two) = new_key("one", ["rollout"]), new_key("two", ["admin"])
    file = tmp_path / "keys"
    write(file, kept_one, kept_two)
    assert one not in file.read_text()
    keys = ApiKeys(file)
    first, second = keys.who(shown(one)), keys.who(shown(two))
    assert first is not None
    assert second is not None
    assert (first.name, second.name) == ("one", "two")
    assert [first.may(scope) for scope in api_keys.SCOPES] == [True, False, False]
    assert [second.may(scope) for scope in api_keys.SCOPES] == [True, True, True]
    assert keys.who(f"bearer  {one} ".encode()) == first
    for wrong in (
        b"",
        b"Bearer",
        b"Bearer ",
        shown(one + "x"),
        shown(one[:-1]),
        one.encode(),
        b"Basic " + one.encode(),
    ):
        assert keys.who(wrong) is None
    assert keys.who(b"Bearer " + kept_one.sha256.hex().encode()) is None  # the file's own line lets nobody in


def test_all_keys_are_compared_wherever_the_right_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a comparison whose time tells nothing; so how long it takes does not say which key it is, either."""
    made = [new_key(f"key-{number}", ["rollout"]) for number in range(5)]
    write(tmp_path / "keys", *(kept for _, kept in made))
    keys = ApiKeys(tmp_path / "keys")
    compared = []

    def compare(one: bytes, two: bytes) -> bool:
        compared.append(one)
        return one == two

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for text in (made[0][0], made[4][0], "none"):
        compared.clear()
        keys.who(shown(text))
        assert len(compared) == 5


def test_a_changed_file_counts_and_a_broken_one_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (one, kept_one), (two, kept_two) = new_key("one", ["rollout"]), new_key("two", ["rollout"])
    file = tmp_path / "keys"
    write(file, kept_one)
    keys = ApiKeys(file)
    write(file, kept_two)
    keys.look()
    assert (keys.who(shown(one)), keys.who(shown(two))) == (None, kept_two)
    file.write_text("a key by mistake: " + one)
    for _ in range(3):
        keys.look()
    assert keys.who(shown(two)) == kept_two
    file.unlink()
    keys.look()
    assert keys.who(shown(two)) == kept_two
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    assert one not in caplog.text
    write(file, kept_one)
    keys.look()
    assert keys.who(shown(one)) == kept_one


def test_a_file_that_is_written_in_place_locks_nobody_out(tmp_path: Path) -> None:
    """As cp and editors do it: cut to nothing first. One that stays empty is meant."""
    one, kept = new_key("one", ["rollout"])
    file = tmp_path / "keys"
    write(file, kept)
    keys = ApiKeys(file)
    file.write_text("")
    keys.look()
    assert keys.who(shown(one)) == kept
    write(file, kept)
    keys.look()
    assert keys.who(shown(one)) == kept
    file.write_text("")
    keys.look()
    keys.look()
    assert keys.who(shown(one)) is None


@pytest.mark.parametrize(
    "line", ["leaked", "one rollout", "one boss " + "0" * 64, "one rollout 0123", "one , " + "0" * 64, "a rollout x y"]
)
def test_a_line_that_is_none_is_named_and_not_shown(line: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(f"# first\n{line}\n")
    assert error.value.ids == {"line": 2}
    assert line not in str(error.value)


def test_no_keys_is_no_reason_to_let_everybody_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys(tmp_path / "gone")
    (tmp_path / "empty").touch()
    assert ApiKeys(tmp_path / "empty").who(shown("x")) is None
    with pytest.raises(NameInvalid):
        new_key("a b", ["rollout"])


def test_a_secret_of_a_file_is_one_word_and_never_in_an_error(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("word\n")
    assert bearer(str(file)) == {"Authorization": "Bearer word"}
    assert bearer("") == {}
    for text in ("", "two words", "line\nline", "w\u00f6rd", "a\x00b"):
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            read_secret(file)
        assert not text or text not in str(error.value)

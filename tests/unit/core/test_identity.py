"""Names: what may be one, and that an adapter id says the same to whoever takes it apart."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from adaptersync_core.errors import NameInvalid
from adaptersync_core.identity import NAME, VersionName, adapter_id, check_name, check_run, parse_adapter_id

NAMES = st.from_regex(NAME, fullmatch=True).filter(lambda name: ".." not in name)
DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)
SEQS = st.integers(1, 10**18 - 1)

HOSTILE = [
    "",
    ".",
    "..",
    "a..b",
    "../etc/passwd",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "a\n",
    "a\nb",
    "\n",
    "a b",
    " a",
    "a\0b",
    "A",
    "runÄ",
    "run١",  # a digit to str.isdigit
    "run²",
    "a" * 49,
    "a" * 100_000,
    "-a",
    "a-",
    ".a",
    "a.",
    "_a",
    "a:b",
    "a{b}",
    "a*",
    "a%2e",
    "a\x1b[2J",
]


@given(run=NAMES, seq=SEQS, digest=DIGESTS)
def test_an_adapter_id_is_taken_apart_into_what_it_was_made_of(run: str, seq: int, digest: str) -> None:
    text = adapter_id(run, seq, digest)
    assert parse_adapter_id(text) == VersionName(run, seq, digest[:12])
    assert str(parse_adapter_id(text)) == text


@given(first=st.tuples(NAMES, SEQS, DIGESTS), second=st.tuples(NAMES, SEQS, DIGESTS))
def test_different_versions_have_different_ids(first: tuple[str, int, str], second: tuple[str, int, str]) -> None:
    assume((first[0], first[1], first[2][:12]) != (second[0], second[1], second[2][:12]))
    assert adapter_id(*first) != adapter_id(*second)


@given(run=NAMES, seq=SEQS, digest=DIGESTS)
def test_a_name_that_looks_like_an_id_is_still_one_run(run: str, seq: int, digest: str) -> None:
    outer = f"{run}-v3-{digest[:12]}"
    assume(len(outer) <= 48)
    assert parse_adapter_id(adapter_id(outer, seq, digest)).run == outer


@given(name=NAMES, seq=SEQS, digest=DIGESTS)
def test_a_name_is_one_part_of_a_path(name: str, seq: int, digest: str) -> None:
    assert PurePosixPath("/store", name).parts == ("/", "store", name)
    assert PurePosixPath("/store", adapter_id(name, seq, digest)).name == adapter_id(name, seq, digest)


@given(text=st.text(max_size=80))
def test_what_is_accepted_is_canonical(text: str) -> None:
    try:
        name = parse_adapter_id(text)
    except NameInvalid:
        return
    assert adapter_id(name.run, name.seq, name.digest12) == text


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_hostile_names_are_refused_in_one_short_line(name: str) -> None:
    with pytest.raises(NameInvalid) as refusal:
        check_name("run", name)
    assert len(str(refusal.value).splitlines()) == 1
    assert len(str(refusal.value)) < 400
    with pytest.raises(NameInvalid):
        adapter_id(name, 1, "0" * 64)
    with pytest.raises(NameInvalid):
        parse_adapter_id(f"{name}-v1-{'0' * 12}")


@pytest.mark.parametrize(
    "text",
    [
        "run-v0-0123456789ab",
        "run-v01-0123456789ab",
        "run-v-1-0123456789ab",
        "run-v١-0123456789ab",
        "run-v1-0123456789a",
        "run-v1-0123456789abc",
        "run-v1-0123456789AB",
        "run-v1-0123456789ag",
        "run-v1-0123456789ab\n",
        "run-v" + "9" * 19 + "-0123456789ab",
        "-v1-0123456789ab",
        "run",
        "",
    ],
    ids=ascii,
)
def test_what_is_no_adapter_id(text: str) -> None:
    with pytest.raises(NameInvalid):
        parse_adapter_id(text)


@pytest.mark.parametrize(
    ("seq", "digest"), [(0, "a" * 64), (-1, "a" * 64), (10**18, "a" * 64), (1, "A" * 64), (1, "short"), (1, "")]
)
def test_no_id_is_made_that_could_not_be_read(seq: int, digest: str) -> None:
    with pytest.raises(NameInvalid):
        adapter_id("run", seq, digest)


@pytest.mark.parametrize("name", ["base", "r2-v7-0a27f46bd8f3", "Base"])
def test_a_run_may_not_be_called_what_a_request_means_otherwise(name: str) -> None:
    with pytest.raises(NameInvalid, match="choose another run name"):
        check_run(name, base_model="base")
    assert check_run("r2-v7", base_model="base") == "r2-v7"

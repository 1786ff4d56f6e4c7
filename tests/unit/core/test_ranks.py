"""Names of ranks: none is a replica's, each is taken apart as it was made, and their number has a bound."""

from __future__ import annotations

import msgspec
import pytest

from adaptersync_core.errors import NameInvalid
from adaptersync_core.identity import check_name
from adaptersync_core.ranks import MOST, rank_name, rank_names, split, told_apart
from adaptersync_core.records import ReplicaReport, from_hash, hash_fields
from adaptersync_core.table import Member, Table


def report(ranks: int) -> ReplicaReport:
    return ReplicaReport(
        url="u",
        base_model="base",
        engine_epoch="life",
        max_loras=1,
        max_cpu_loras=1,
        max_lora_rank=8,
        block_size=16,
        ranks=ranks,
    )


def read(said: ReplicaReport) -> ReplicaReport | None:
    fields = hash_fields(said)
    return from_hash("r1", dict(zip(fields[::2], fields[1::2], strict=True)), ReplicaReport)


def test_a_replica_of_one_engine_goes_by_its_own_name() -> None:
    assert rank_names("r1", 1) == ("r1",)
    assert split("r1") == ("r1", None)
    assert rank_name("r1", None) == "r1"


def test_ranks_are_named_and_taken_apart_in_their_order() -> None:
    names = rank_names("r1", 12)
    assert len(set(names)) == 12
    assert [split(name) for name in names] == [("r1", rank) for rank in range(12)]
    assert [rank_name(*split(name)) for name in names] == list(names)


@pytest.mark.parametrize("separates", [" ", ",", ":", "|", "#"])  # in what scripts and sessions keep
def test_the_name_of_a_rank_is_no_replicas_and_fits_where_replicas_are_named(separates: str) -> None:
    name = rank_name("r1", 0)
    with pytest.raises(NameInvalid):
        check_name("replica", name)
    assert separates not in name


def test_more_ranks_than_are_told_apart_are_one() -> None:
    assert [told_apart(engines) for engines in (0, 1, 2, MOST, MOST + 1)] == [1, 1, 2, MOST, 1]


def test_a_record_has_no_more_ranks_than_that_and_at_least_one() -> None:
    assert [read(report(ranks)) is None for ranks in (0, 1, MOST, MOST + 1)] == [True, False, False, True]
    fields = hash_fields(report(2))
    place = fields.index("ranks")
    former = from_hash("r1", dict(zip(fields[:place:2], fields[1:place:2], strict=True)), ReplicaReport)
    assert former is not None
    assert former.ranks == 1


def test_a_member_of_a_table_from_before_there_were_ranks_has_one() -> None:
    member = Member(state="ready", url="u", engine_epoch="life", since=1.0, block_size=16, ranks=2)
    said = msgspec.to_builtins(Table(members={"r1": member}))
    assert msgspec.convert(said, Table).members["r1"].ranks == 2
    del said["members"]["r1"]["ranks"]
    assert msgspec.convert(said, Table).members["r1"].ranks == 1

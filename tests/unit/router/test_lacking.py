"""Who lacks what, until an agent's word of after."""

from __future__ import annotations

from adaptersync.router.lacking import TOLD, Lacking
from adaptersync_core.records import Holding
from support.router_fleet import V1, V2
from support.tables import version_name


def holding(at_ms: int, *versions: str) -> Holding:
    return Holding(heard_ms=at_ms, versions=frozenset(versions))


def test_only_a_word_of_after_the_report_counts() -> None:
    lacking = Lacking()
    lacking.found("r0", V1, "life")
    assert not lacking.confirm("r0", holding(999, V1))  # no report has named it
    lacking.told(lacking.untold(), 1000)
    assert not lacking.confirm("r0", holding(1000, V1))
    assert not lacking.confirm("r0", holding(1001, V2))
    assert not lacking.confirm("r1", holding(1001, V1))
    assert lacking.lacks("r0", V1)
    assert lacking.confirm("r0", holding(1001, V1))
    assert not lacking.pairs
    assert not lacking.confirm("r0", holding(1002, V1))


def test_what_is_found_while_a_report_is_written_is_in_the_next() -> None:
    lacking = Lacking()
    lacking.found("r0", V1, "life")
    named = lacking.untold()
    lacking.found("r0", V1, "life")  # confirmed meanwhile, say, and lost again
    lacking.found("r1", V1, "life")
    lacking.told(named, 1000)
    assert not lacking.confirm("r0", holding(1001, V1))
    assert len(lacking.untold()) == 2


def test_a_report_names_versions_by_replica_and_only_so_many() -> None:
    lacking = Lacking()
    assert lacking.report() == {}
    for name in ("r1", "r0"):
        for version in (V2, V1):
            lacking.found(name, version, "life")
    assert lacking.report() == {"r0": [V1, V2], "r1": [V1, V2]}
    assert lacking.any(["r2", "r1"], V2)
    assert not lacking.any(["r2"], V2)
    for seq in range(TOLD):
        lacking.found("r2", version_name(10 + seq), "life")
    assert sum(map(len, lacking.report().values())) == TOLD
    lacking.told(lacking.untold(), 1000)  # those, and no others
    assert lacking.untold() == []
    last = version_name(10 + TOLD - 1)
    assert not lacking.confirm("r2", holding(1001, last))
    assert lacking.confirm("r0", holding(1001, V1, V2))
    assert len(lacking.untold()) == 2

"""One document of all that is shown: what status says, unchanged, and who holds what."""

from __future__ import annotations

import msgspec
import orjson
import pytest
from msgspec.structs import replace

from adaptersync.coordinator import views
from adaptersync.coordinator.overview import Cell, Overview, overview
from adaptersync.coordinator.recent import Recent
from adaptersync_core.proof import Proof
from adaptersync_core.records import Ack, Fleet, ReplicaReport, SeenReplica
from support.tables import make_table, version_name

V1, V2, V3 = (version_name(seq) for seq in (1, 2, 3))
OTHER = version_name(9, run="run-b")


def report(*loaded: str, epoch: str = "one") -> SeenReplica:
    said = ReplicaReport(
        url="http://a", base_model="base", engine_epoch=epoch, max_loras=4, max_cpu_loras=8, max_lora_rank=8,
        block_size=16, loaded=loaded,
    )  # fmt: skip
    return SeenReplica(report=said, age_s=0.2)


def fleet(acks: dict[str, Ack], *loaded: str) -> Fleet:
    table = make_table({V1: "retained", V2: "current", V3: "staging", OTHER: "current"}, {"replica-0": "http://a"})
    return Fleet(
        now=100.0, table=table, runs={}, published={}, replicas={"replica-0": report(*loaded)},
        acks={"replica-0": acks}, routers={}, requests={},
    )  # fmt: skip


def of(fleet: Fleet) -> tuple[views.StatusView, Overview]:
    status = views.status(fleet, group="g", leader="c", lease_left_s=3.0, alive_s=5.0)
    return status, overview(status, fleet, Recent(), told_by="c-1")


def cells(fleet: Fleet) -> dict[str, Cell]:
    _, view = of(fleet)
    return dict(zip([each.version for each in view.versions], view.matrix["replica-0"], strict=True))


YES = Ack(accepted=True, engine_epoch="one", proof=Proof(verdict="proved"))
NO = Ack(accepted=False, engine_epoch="one", proof=Proof(verdict="refuted"), reason="serves the base")


def test_all_that_status_says_is_there_under_the_same_names() -> None:
    status, view = of(fleet({V1: YES}))
    told, more = orjson.loads(msgspec.json.encode(view)), orjson.loads(msgspec.json.encode(status))
    assert told | more == told
    assert (told["told_by"], told["at"]) == ("c-1", 100.0)


def test_versions_stand_by_run_and_newest_first() -> None:
    _, view = of(fleet({}))
    assert [each.version for each in view.versions] == [V3, V2, V1, OTHER]


def test_a_cell_says_what_this_life_of_the_engine_has() -> None:
    found = cells(fleet({V1: YES, V2: NO, V3: replace(YES, engine_epoch="former")}, V1, V3))
    assert found[V1] == Cell(state="held", verdict="proved")
    assert found[V2] == Cell(state="refused", verdict="refuted", reason="serves the base")
    assert found[V3] == Cell(state="awaited")  # accepted by an engine that is gone
    assert found[OTHER] == Cell(state="awaited")


@pytest.mark.parametrize(("loaded", "state"), [((V1,), "loaded"), ((), "")])
def test_what_is_to_be_unloaded_is_not_held(loaded: tuple[str, ...], state: str) -> None:
    before = fleet({V1: YES}, *loaded)
    versions = before.table.versions | {V1: replace(before.table.versions[V1], state="retiring", drained=True)}
    found = cells(replace(before, table=replace(before.table, versions=versions)))
    assert found[V1] == Cell(state=state)


def test_a_replica_that_is_no_member_has_a_row_too() -> None:
    before = fleet({V1: YES}, V1)
    view = of(replace(before, table=replace(before.table, members={})))[1]
    assert view.matrix["replica-0"][2] == Cell(state="loaded")

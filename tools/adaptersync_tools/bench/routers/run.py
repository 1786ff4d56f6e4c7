"""All cases, of all parties, in turn: a busy minute of the machine is not one party's alone. Prints nothing."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp
from msgspec import Struct

from adaptersync_core.errors import AdapterSyncError
from adaptersync_tools.bench.result import Machine, Target, now
from adaptersync_tools.bench.routers import judge
from adaptersync_tools.bench.routers.cases import CASES, LONGER, Case, Figures, Place
from adaptersync_tools.bench.routers.load import find_wrk
from adaptersync_tools.bench.routers.parties import ALL, DIRECT, OURS, Party, find, version
from adaptersync_tools.up import Progress

AROUND_S = 240.0  # for starting and stopping a party, which each have shorter limits of their own

log = logging.getLogger(__name__)


class Settings(Struct, frozen=True, kw_only=True):
    """`seconds` of each load; one in which a replica dies takes half as long again. Empty `cases` and `routers`: all.

    `programs` are where peers are, by their program's name; without, they are looked for on PATH. `keep`: what fleets
    wrote stays when they are measured.
    """

    seconds: float = 8.0
    repeat: int = 3
    cases: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    programs: dict[str, Path] = {}
    keep: bool = False


class Peer(Struct, frozen=True, kw_only=True):
    """A program that is not ours. `version` is what was found, `note` why it is missing or another release."""

    name: str
    program: str
    version: str
    note: str = ""


class Outcome(Struct, frozen=True, kw_only=True):
    """One party's in one case; `medians` are of `samples`, one by one. Without samples, `failed` says why."""

    case: str
    party: str
    medians: Figures
    samples: tuple[Figures, ...]
    failed: str = ""


class Result(Struct, frozen=True, kw_only=True):
    """`unjudged`: promises that nothing was measured for, each with the reason."""

    bench: str
    began_at: str
    machine: Machine
    settings: dict[str, int | float | list[str]]
    peers: tuple[Peer, ...]
    outcomes: tuple[Outcome, ...]
    targets: tuple[Target, ...]
    unjudged: tuple[str, ...]

    @property
    def kept(self) -> bool:
        """Where ours could not be measured, nothing is kept; what nobody else was there for is not judged."""
        ours = {party.name for party in ALL if party.choice == OURS.choice}
        failed = any(outcome.failed for outcome in self.outcomes if outcome.party in ours)
        return not failed and all(target.kept for target in self.targets)


def run(settings: Settings, directory: Path, progress: Progress) -> Result:
    """Measure; every process that was started has ended when this returns or raises."""
    began_at, machine = now(), Machine.here()
    cases = [case for case in CASES if not settings.cases or case.name in settings.cases]
    chosen = [party for party in ALL if not settings.routers or party.choice in (*settings.routers, "")]
    find_wrk()
    programs = {party.name: find(party, settings.programs) for party in chosen}
    failed = {
        (case.name, party.name): "missing"
        for case in cases
        for party in chosen
        if party.kind == "peer" and programs[party.name] is None
    }
    found: dict[tuple[str, str], list[Figures]] = {}
    for number in range(settings.repeat):
        for case in cases:
            asked = [party for party in case.parties if party in chosen and (case.name, party.name) not in failed]
            turn = number % len(asked) if asked else 0
            for party in asked[turn:] + asked[:turn]:
                key = case.name, party.name
                place = Place(
                    directory=directory / re.sub(r"\W+", "-", f"{case.name} {party.name} {number}"),
                    program=programs[party.name],
                    seconds=settings.seconds,
                )
                try:
                    found.setdefault(key, []).append(_measure(case, party, place, progress))
                except (AdapterSyncError, TimeoutError, aiohttp.ClientError) as error:
                    failed[key] = f"{type(error).__name__}: {error}"
                    log.warning("%s is not measured: %s", ", ".join(key), failed[key])
                if not settings.keep:
                    shutil.rmtree(place.directory, ignore_errors=True)
    outcomes = tuple(
        _outcome(case.name, party.name, found, failed.get((case.name, party.name), ""))
        for case in cases
        for party in case.parties
        if party in chosen
    )
    targets, unjudged = judge.promised(
        {(each.case, each.party): each.samples for each in outcomes}, [case.name for case in cases]
    )
    return Result(
        bench="router",
        began_at=began_at,
        machine=machine,
        settings={
            "seconds": settings.seconds,
            "repeat": settings.repeat,
            "cases": [case.name for case in cases],
            "parties": [party.name for party in chosen],
        },
        peers=_peers(chosen, programs),
        outcomes=outcomes,
        targets=targets,
        unjudged=unjudged,
    )


def _measure(case: Case, party: Party, place: Place, progress: Progress) -> Figures:
    async def bounded() -> Figures:
        async with asyncio.timeout(LONGER * place.seconds + AROUND_S):
            return await case.measure(party, place)

    what = f"{case.name}: {party.name}"
    progress.waiting(what)
    began = time.monotonic()
    figures = asyncio.run(bounded())
    progress.done(what, time.monotonic() - began)
    return figures


def _outcome(case: str, party: str, found: Mapping[tuple[str, str], list[Figures]], failed: str) -> Outcome:
    """Nothing of who failed once: repetitions are compared one by one."""
    samples = [] if failed else found[case, party]
    direct = found.get((case, DIRECT.name), [])
    if case == "added" and len(direct) == len(samples):
        samples = [
            {**each, "added_ms": each["p50_ms"] - least["p50_ms"]} for each, least in zip(samples, direct, strict=True)
        ]
    medians = {name: statistics.median(each[name] for each in samples) for name in (samples[0] if samples else ())}
    return Outcome(case=case, party=party, medians=medians, samples=tuple(samples), failed=failed)


def _peers(chosen: Sequence[Party], programs: Mapping[str, Path | None]) -> tuple[Peer, ...]:
    found = []
    for party in chosen:
        if party.kind != "peer":
            continue
        program = programs[party.name]
        if program is None:
            found.append(Peer(name=party.name, program="", version="", note=f"missing: {party.install}"))
            continue
        told = version(program, party.program)
        note = "" if told == party.version else f"meant to be compared with {party.version}"
        found.append(Peer(name=party.name, program=party.program, version=told or "unknown", note=note))
    return tuple(found)

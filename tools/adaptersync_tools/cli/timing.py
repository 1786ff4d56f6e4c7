"""Commands that say where the time goes: phases, bottleneck. Each has --json, and none changes anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct
from rich.text import Text

from adaptersync.coordinator.phases import (
    PATH,
    REPLICA,
    RolloutPhases,
    Rollouts,
    Share,
    Span,
    Told,
    VersionPhases,
    shares,
    version_phases,
)
from adaptersync.coordinator.views import duration
from adaptersync_core.errors import NameInvalid
from adaptersync_core.events import from_fields
from adaptersync_core.manifest import Manifest
from adaptersync_core.records import ReplicaReport, RequestTimes
from adaptersync_core.registry import Registry
from adaptersync_core.rollouts import dated
from adaptersync_tools import bottleneck as limits
from adaptersync_tools.cli.common import config_option, json_option, settings, visit
from adaptersync_tools.output import console, print_json, state, table
from adaptersync_tools.screen import MARKS
from adaptersync_tools.screen import bar as drawn_bar

READ_S = 600.0  # for a ledger of any length
PAGE = 500  # stream entries of one read
CLOCKS_S = 3600.0  # by how much a trainer's wall clock may be wrong, where it says how far back to look
NARROW = 90  # columns of a terminal that does not hold all phases of a replica
FEWEST_COLUMNS = 20  # of a bar
BESIDE_BARS = 48  # columns of everything else in that table, with room for a replica's name

last_option = click.option(
    "--last", type=click.IntRange(min=1), default=20, show_default=True, help="The newest versions that are looked at."
)


class Found(Struct, kw_only=True):
    """What was kept of a run's newest versions, oldest first; `replicas` are what agents say of theirs."""

    manifests: list[Manifest]
    versions: list[VersionPhases]
    rollouts: Rollouts
    replicas: dict[str, ReplicaReport]


class Phases(Struct, frozen=True, kw_only=True):
    """`shares` are of the way from step to first token; `engines` what vLLM counts by itself; `trainer` its newest
    figures, means over what it logged: no rollout's row says them. None: the version's manifest is no longer kept."""

    version: VersionPhases
    shares: list[Share]
    rollouts: list[RolloutPhases]
    engines: dict[str, RequestTimes]
    trainer: dict[str, float] | None


@click.command()
@click.argument("run")
@click.argument("version", required=False)
@config_option
@json_option
@last_option
def phases(run: str, version: str | None, config_path: Path | None, as_json: bool, last: int) -> None:
    """Show where the time of a version of RUN goes, and of the newest ones.

    VERSION is an id or a number; by default the newest that was promoted. Times count from its announcement, on the
    clock of the control server; what came before is negative. A replica's bar is drawn with its phases.

    \b
    noticed        asked by the coordinator, until its agent began
    visible        until the mount showed it, or the fast lane gave it
    staged, verified, loaded, proved
    committed      the slowest replica's word, until it was current
    first token    then until the first one; of an answer that came whole, until that came
    queue, prefill, decode: vLLM counts them by engine only, not by rollout, and agents' proofs among them
    Examples:
      adaptersync phases my-run
      adaptersync phases my-run 12 --json | jq '.version.replicas[] | {replica, acked_s}'
    """
    config = settings(config_path)
    found = visit(config, lambda registry: _read(registry, run, last, version), timeout_s=READ_S)
    shown = _chosen(found.versions, run, version)
    told = next((each for each in found.manifests if each.adapter_id == shown.version), None)
    document = Phases(
        version=shown,
        shares=shares(found.versions),
        rollouts=found.rollouts.phases(),
        engines={name: each.request_times for name, each in found.replicas.items() if each.request_times.requests},
        trainer=told.timings | told.load if told else None,
    )
    if as_json:
        print_json(document)
    else:
        _print_phases(document)


@click.command()
@click.argument("run")
@config_option
@json_option
@last_option
def bottleneck(run: str, config_path: Path | None, as_json: bool, last: int) -> None:
    """Say which side limits RUN, by which evidence, and what to change first.

    Judged by its newest versions: what their trainer says of its steps, syncs and waits, how long rollouts were held
    for a version, whether requests queue in engines, and whether these decoded more when they had more at once. The
    verdict may be that this is not enough evidence.

    \b
    trainer        samples are there before it is
    sync           training, or rollouts, wait for versions
    generation     the trainer waits for rollouts, and engines do what they can
    in-flight      it waits for them, and engines do more when they have more at once
    generation or in-flight: one of the two; engines were seen with too little else at once to tell
    balanced       nothing stands out
    Examples:
      adaptersync bottleneck my-run
      adaptersync bottleneck my-run --last 5 --json | jq -r .verdict.limit
    """
    config = settings(config_path)
    found = visit(config, lambda registry: _read(registry, run, last, None), timeout_s=READ_S)
    evidence = limits.evidence(found.manifests, found.versions, found.rollouts, list(found.replicas.values()))
    verdict = limits.judge(evidence)
    if as_json:
        print_json({"run": run, "verdict": verdict, "evidence": evidence})
        return
    out = console()
    style = {"unknown": "bold yellow", "balanced": "bold green"}.get(verdict.limit)
    what, colon, why = verdict.says.partition(":")
    limited = ("is limited by ", "") if style is None else ""
    out.print(Text.assemble((run, "bold"), "  ", limited, (what, style or "bold red"), colon, why))
    for line in verdict.evidence:
        out.print(Text.assemble(("  because  ", "dim"), line))
    for number, line in enumerate(verdict.change):
        out.print(Text.assemble(("  first    " if number == 0 else "  then     ", "dim"), line))


async def _read(registry: Registry, run: str, last: int, version: str | None) -> Found:
    """The newest `last` versions, and the one that is asked for."""
    known = await registry.published(run)
    if not known:
        runs = ", ".join(await registry.runs()) or "none"
        raise NameInvalid("no such run, or nothing was published", next_step=f"known runs: {runs}", run=run)
    names = [name for name, _ in known[-last:]]
    if version is not None:
        asked = next((name for name, seq in known if version in (name, str(seq), f"v{seq}", f"{run}@v{seq}")), None)
        if asked is None:
            raise NameInvalid("no such version", next_step=f"see adaptersync versions {run}", run=run, version=version)
        names = names if asked in names else [asked, *names]
    kept = dict(zip(names, await registry.records(names), strict=True))
    manifests = [manifest for manifest, _ in kept.values() if manifest is not None]
    since = min(each.created_at for each in manifests) if len(manifests) == len(names) else 0.0
    events = await _events(registry, names, since=since)
    rollouts = Rollouts(names)
    began = min((told[0][0] for told in events.values() if told), default=None)
    if began is not None:
        async for _, rows in dated(registry, str(int(began * 1000))):
            for at, row in rows:
                rollouts.see(at, row)
    versions = [version_phases(name, kept[name][0], events[name], rollouts.first_tokens(name)) for name in names]
    replicas = (await registry.fleet()).replicas
    return Found(
        manifests=manifests,
        versions=[each for each in versions if each is not None],
        rollouts=rollouts,
        replicas={name: seen.report for name, seen in sorted(replicas.items())},
    )


async def _events(registry: Registry, names: Sequence[str], *, since: float) -> dict[str, list[Told]]:
    """What was told of each version, oldest first: read backwards until all their announcements were seen.

    `since` is a trainer's word on when the first was published, and not trusted by an hour; 0 when it is not known.
    """
    found: dict[str, list[Told]] = {name: [] for name in names}
    missing, end = set(names), "+"
    start = str(max(0, int((since - CLOCKS_S) * 1000))) if since else "-"
    while missing:
        page = await registry.client.command("XREVRANGE", registry.keys.events, end, start, "COUNT", PAGE)
        if not page:
            break
        for entry, fields in page:
            if fields.get("version") in found and _an_event(fields):
                found[fields["version"]].append((int(entry.partition("-")[0]) / 1000, fields))
                if fields.get("type") == "adapter.published":
                    missing.discard(fields["version"])
        end = f"({page[-1][0]}"
    return {name: told[::-1] for name, told in found.items()}


def _an_event(fields: Mapping[str, str]) -> bool:
    """Whether one of ours may have written it."""
    try:
        event = from_fields(dict(fields))
    except msgspec.ValidationError:
        return False
    return all(isfinite(value) for value in msgspec.structs.astuple(event) if isinstance(value, float))


def _chosen(found: Sequence[VersionPhases], run: str, version: str | None) -> VersionPhases:
    if version is None:
        promoted = [each for each in found if each.slowest]
        chosen = next(iter([*promoted[::-1], *found[::-1]]), None)
    else:
        seqs = (version.removeprefix(f"{run}@").removeprefix("v"), version)
        chosen = next((each for each in found if each.version == version or _seq(each) in seqs), None)
    if chosen is None:
        raise NameInvalid(
            "nothing is kept of when this version was announced", next_step=f"see adaptersync versions {run}", run=run
        )
    return chosen


def _seq(found: VersionPhases) -> str:
    return found.version.rpartition("-v")[2].partition("-")[0]


def _print_phases(found: Phases) -> None:
    out = console()
    version = found.version
    step = "" if version.step is None else f"  step {version.step}"
    out.print(Text.assemble((version.version, "bold"), "  ", state(version.outcome), (step, "dim")))
    out.print()
    out.print(_waterfall(version, max(FEWEST_COLUMNS, min(out.width, 120) - BESIDE_BARS)))
    parts = [part for phase, mark in MARKS.items() for part in (mark, f" {phase}  ")]
    out.print(Text.assemble(*parts))
    out.print()
    if version.replicas:
        out.print(_by_replica(version, REPLICA if out.width >= NARROW else REPLICA[1:]))
    if found.shares:
        rows = [
            (each.phase, each.count, _ms(each.p50_s), _ms(each.p95_s), f"{each.share:.0%}") for each in found.shares
        ]
        title = "From step to first token, by the slowest replica"
        out.print(table(title, ("phase", "versions>", "p50, ms>", "p95, ms>", "share>"), rows))
    if found.rollouts:
        rollouts = [
            (each.replica, phase.phase, phase.count, _ms(phase.p50_s), _ms(phase.p95_s))
            for each in found.rollouts
            for phase in each.phases
        ]
        out.print(table("Rollouts", ("replica!", "phase", "rollouts>", "p50, ms>", "p95, ms>"), rollouts))
    if found.engines:
        engines = [
            (name, each.requests, *(_ms(spent / each.requests) for spent in _spent(each)))
            for name, each in found.engines.items()
        ]
        columns = ("replica!", "requests>", "queue, ms>", "prefill, ms>", "decode, ms>")
        out.print(table("Engines by their own counters, means", columns, engines))
    if found.trainer is None:
        out.print(Text("its manifest is no longer kept: nothing is known of what its trainer spent", "dim"))
        return
    shown = {name: value for name, value in found.trainer.items() if name in AFTER}
    if shown:
        said = ", ".join(f"{AFTER[name]} {duration(value)}" for name, value in shown.items())
        out.print(Text.assemble(("trainer, means  ", "dim"), said))


AFTER = {
    "rollout_wait_s": "waited for rollouts",
    "sync_s": "held up by the last sync",
    "score_s": "scored a group",
    "sample_queue_s": "a sample waited",
    "backpressure_s": "queue found full",
}


def _spent(times: RequestTimes) -> tuple[float, float, float]:
    return times.queue_s, times.prefill_s, times.decode_s


def _waterfall(version: VersionPhases, columns: int) -> Any:
    """One line for each phase that is the version's, and for each replica; a step would leave no room for the rest."""
    spans = [span for span in version.spans if span.phase != "step"]
    drawn = [*spans, *(span for each in version.replicas if not each.late for span in each.spans)]
    start = min((span.start_s for span in drawn), default=0.0)
    scale = columns / max(max((span.end_s for span in drawn), default=0.0) - start, 1e-9)

    def bar(parts: Sequence[Span]) -> Text:
        return drawn_bar(parts, start=start, scale=scale, columns=columns)

    rows: list[tuple[Any, ...]] = []
    order = {phase: place for place, phase in enumerate(PATH)}
    before = [span for span in version.spans if order[span.phase] < order["noticed"]]
    for span in before:
        line = Text("…", "dim") if span.phase == "step" else bar([span])
        rows.append(("", span.phase, _ms(span.start_s), _ms(span.seconds), line))
    for each in version.replicas:
        if each.late:
            rows.append((each.replica, "joined later", _ms(each.acked_s), "", ""))
            continue
        name = Text(each.replica, "bold" if each.replica == version.slowest else "")
        began = min((span.start_s for span in each.spans), default=each.acked_s)
        what = "accepted" if each.accepted else Text("refused", "bold red")
        rows.append((name, what, _ms(began), _ms(each.acked_s - began), bar(each.spans)))
    for span in version.spans:
        if span not in before:
            rows.append(("", span.phase, _ms(span.start_s), _ms(span.seconds), bar([span])))
    return table("Milliseconds from its announcement", ("replica!", "phase!", "from>", "took>", "!"), rows)


def _by_replica(version: VersionPhases, phases: Sequence[str]) -> Any:
    rows = []
    for each in version.replicas:
        took = {span.phase: span.seconds for span in each.spans}
        rows.append(
            (
                Text(each.replica, "bold" if each.replica == version.slowest else ""),
                *(_ms(took.get(phase)) for phase in phases),
                _ms(each.acked_s),
                _ms(each.first_token_s),
            )
        )
    columns = ("replica!", *(f"{phase}>" for phase in phases), "acked>", "token>")
    title = "Replicas; acked and token: from its announcement"
    return table(title, columns, rows)


def _ms(seconds: float | None) -> str:
    """Milliseconds, with a tenth where that is much of it."""
    if seconds is None:
        return ""
    return f"{seconds * 1000:.{1 if abs(seconds) < 0.01 else 0}f}"


COMMANDS = (phases, bottleneck)

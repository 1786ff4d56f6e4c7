"""Commands of the ledger's archive: audit verify, show, export, drain. All but the last need the store alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.text import Text

from adaptersync_core.archive import Archive, schema
from adaptersync_core.archived import TABLES
from adaptersync_core.config import Config
from adaptersync_core.errors import ConfigError, NameInvalid, StoreError
from adaptersync_core.rollouts import Row
from adaptersync_core.store import ArtifactStore
from adaptersync_tools.audit.evidence import read_evidence
from adaptersync_tools.audit.rollouts import Rollout, read_rollouts
from adaptersync_tools.audit.verify import Audit
from adaptersync_tools.cli.common import config_option, json_option, settings
from adaptersync_tools.output import console, one_line, print_json, table

CONTRADICTED = 1
SHOWN = 100  # contradictions in --json beside their number: each is a line without it

_MORE = {"first_entry": "text", "last_entry": "text", "proof": "text", "fate": "text", "fate_reason": "text"}
_EXPORTED = {name: kind for name, kind in TABLES["rollouts"].columns.items() if name in Row.__struct_fields__} | {
    **_MORE,
    "fate_step": "int",
}


@click.group()
def audit() -> None:
    """Look into the ledger as it is archived in the store.

    A worker archives what routers, trainers and everybody else wrote, every jobs.ledger_s. What is archived can be read
    without Redis or a fleet, with these commands or any reader of Parquet: see deploy/LEDGER.md.

    \b
    Examples:
      adaptersync audit verify my-run
      adaptersync audit show my-run
    """


@audit.command()
@click.argument("run")
@config_option
@json_option
@click.option(
    "--head",
    "heads",
    multiple=True,
    metavar="TABLE:NUMBER:SHA256",
    help="A link that an earlier verify told of, and that was noted elsewhere; it must be there still.",
)
def verify(run: str, config_path: Path | None, as_json: bool, heads: tuple[str, ...]) -> int:
    """Hold RUN's rollouts against manifests, events and each other. Exit status 1 at any contradiction.

    Each contradiction is a line. The archive's own files are checked whole, of all runs: what was changed, removed,
    added or written twice is found. Who may write the store could write all of it anew: note the heads that this prints
    where others cannot write, and give them the next time.

    \b
    Examples:
      adaptersync audit verify my-run
      adaptersync audit verify my-run --head rollouts:812:9f2c6d
    """
    config = settings(config_path)
    found = Audit(Path(config.store.path), config.group.name, run, _heads(heads))
    lines, number = [], 0
    for line in found.contradictions():
        number += 1
        if not as_json:
            click.echo(one_line(line))
        elif number <= SHOWN:
            lines.append(line)
    counts = found.counts
    if as_json:
        told = {"run": run, "ok": not number, "contradictions": number, "lines": lines}
        print_json(told | msgspec.to_builtins(counts))
        return CONTRADICTED if number else 0
    out = console()
    verdict = Text(f"{number} contradictions", "bold red") if number else Text("no contradiction", "bold green")
    out.print(
        Text.assemble(
            verdict,
            f": {counts.rollouts} rollouts of {counts.versions} versions, {counts.trained} trained on, ",
            f"{counts.dropped} dropped, {counts.voided} voided, {counts.unknown} with an unknown end; ",
            f"{counts.files} files, {counts.links} links",
        )
    )
    if counts.unproven:
        out.print(f"{counts.unproven} rest on events that are not archived: Redis lost them, or they were never kept")
    if counts.unfinished:
        out.print(f"{counts.unfinished} files are of no link yet: a worker is at it, or left them as it died")
    for name, head in counts.heads.items():
        out.print(Text(f"head {name}:{head}", "dim"), soft_wrap=True)
    return CONTRADICTED if number else 0


def _heads(given: Iterable[str]) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, str]] = {}
    for each in given:
        name, _, rest = each.partition(":")
        number, _, digest = rest.partition(":")
        if name not in TABLES or not number.isdigit() or len(digest) < 6:
            raise click.BadParameter("give it as rollouts:812:9f2c6d, six digits at least", param_hint="--head")
        found.setdefault(name, {})[int(number)] = digest
    return found


@audit.command()
@click.argument("name", metavar="ID|RUN")
@config_option
@json_option
def show(name: str, config_path: Path | None, as_json: bool) -> None:
    """Show one rollout, by the id of its request, or what became of all rollouts of a run, by version.

    \b
    Examples:
      adaptersync audit show 9f2c6d1b0a3e-1f
      adaptersync audit show my-run --json
    """
    config = settings(config_path)
    run = _run_of(config, name)
    if run is not None:
        (rollout,) = [each for each in _rollouts(config, run) if each.request_id == name]
        if as_json:
            print_json(exported(rollout))
            return
        shown = [(key, str(value)) for key, value in exported(rollout).items() if value not in (None, "")]
        console().print(table("Rollout", ("what!", "value"), shown))
        return
    counts: dict[str, Counter[str]] = {}
    for rollout in _rollouts(config, name):
        row = rollout.row
        if row is None:
            continue
        of = counts.setdefault(row.version, Counter())
        of["rollouts"] += 1
        of[f"outcome {row.outcome}"] += 1
        of[f"fate {rollout.fate or 'unknown'}"] += 1
        of["prompt tokens"] += row.prompt_tokens or 0
        of["cached tokens"] += row.cached_tokens or 0
        of["completion tokens"] += row.completion_tokens or 0
    if not counts:
        raise NameInvalid("no rollout is archived by that name", next_step="give a request's id, or a run", name=name)
    if as_json:
        print_json({version: dict(found) for version, found in counts.items()})
        return
    columns = ("version!", "rollouts>", "outcomes", "fates", "prompt>", "cached>", "completion>")
    rows = [
        (
            version or "none",
            found["rollouts"],
            _listed(found, "outcome "),
            _listed(found, "fate "),
            *(found[f"{kind} tokens"] for kind in ("prompt", "cached", "completion")),
        )
        for version, found in counts.items()
    ]
    console().print(table(f"Rollouts of {name}", columns, rows))


def _listed(found: Counter[str], head: str) -> str:
    return ", ".join(f"{count} {key.removeprefix(head)}" for key, count in found.items() if key.startswith(head))


def _run_of(config: Config, request_id: str) -> str | None:
    """The run whose rows tell of a request; None when none does."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    archive = Archive(Path(config.store.path), config.group.name, "rollouts")
    for path in archive.files():
        try:
            found = pq.read_table(
                archive.root / path, columns=["run"], filters=[("request_id", "=", request_id)], partitioning=None
            )
        except pa.ArrowException as error:
            raise StoreError(f"file of the ledger cannot be read: {error}", path=path) from error
        if found.num_rows:
            return str(found["run"][0])
    return None


@audit.command()
@click.argument("run")
@config_option
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="A new file, Parquet.")
def export(run: str, config_path: Path | None, out: Path) -> None:
    """Write RUN's rollouts into one file, one row each, with the proof of the version's load and its fate.

    \b
    Example:
      adaptersync audit export my-run --out my-run.parquet
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    config = settings(config_path)
    if out.exists():
        raise ConfigError("file exists", next_step="choose another --out", file=str(out))
    count = 0
    half = out.with_name(f".{out.name}.half")
    try:
        with pq.ParquetWriter(half, schema(_EXPORTED), compression="zstd") as file:
            batch: list[dict[str, Any]] = []
            for rollout in _rollouts(config, run):
                if rollout.row is None:
                    continue
                batch.append(exported(rollout))
                count += 1
                if len(batch) >= 10_000:
                    file.write_table(pa.Table.from_pylist(batch, schema=schema(_EXPORTED)))
                    batch.clear()
            file.write_table(pa.Table.from_pylist(batch, schema=schema(_EXPORTED)))
        if not count:
            raise NameInvalid("no rollout of such a run is archived", next_step="see adaptersync audit show", run=run)
        half.rename(out)
    finally:
        half.unlink(missing_ok=True)
    console().print(f"{count} rollouts in {out}")


@audit.command()
@config_option
@json_option
def drain(config_path: Path | None, as_json: bool) -> None:
    """Archive now what the ledger has in Redis, and trim it there, as a worker does every jobs.ledger_s.

    \b
    Example:
      adaptersync audit drain
    """
    from adaptersync.jobs.ledger import drain as archive

    done = asyncio.run(archive(settings(config_path)))
    if as_json:
        print_json(done)
    else:
        console().print(f"archived {done.entries} entries, trimmed {done.trimmed}, merged {done.merged} files")


def _rollouts(config: Config, run: str) -> Iterator[Rollout]:
    store, group = Path(config.store.path), config.group.name
    rollouts, fates, events = (Archive(store, group, name) for name in ("rollouts", "fates", "events"))
    evidence = read_evidence(events, ArtifactStore(store), run)
    for some in read_rollouts(rollouts, fates, run, evidence):
        yield from some


def exported(rollout: Rollout) -> dict[str, Any]:
    """One flat row of a rollout that has one."""
    row = msgspec.structs.asdict(rollout.row) if rollout.row is not None else {}
    return row | {
        "first_entry": f"{rollout.first[0]}-{rollout.first[1]}",
        "last_entry": f"{rollout.last[0]}-{rollout.last[1]}",
        "proof": rollout.proof,
        "fate": rollout.fate,
        "fate_reason": rollout.fate_reason,
        "fate_step": rollout.fate_step,
    }


COMMANDS = (audit,)

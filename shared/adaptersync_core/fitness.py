"""Whether an adapter fits the fleet and its base model: all that is wrong with it at once, each with what to do.

What its files alone say is `manifest.inspect`'s; this asks further. Replicas that say nothing of a limit have none, and
where no replica is ready nothing is known of the fleet: agents look again before they load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct

from adaptersync_core.base_model import short_name
from adaptersync_core.errors import AdapterInvalid
from adaptersync_core.manifest import (
    CONFIG_FILE,
    AdapterShape,
    check_against_base,
    check_finite,
    inspect,
    read_config,
    unservable,
)
from adaptersync_core.records import ReplicaReport

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes as --max-lora-rank


class Finding(Struct, frozen=True, kw_only=True):
    """An `error` keeps the adapter from being served, a `warning` does not."""

    level: Literal["error", "warning"]
    what: str
    fix: str

    def refusal(self) -> AdapterInvalid:
        return AdapterInvalid(self.what, next_step=self.fix)


def examine(
    directory: Path, *, base: Mapping[str, tuple[int, ...]], reports: Mapping[str, ReplicaReport]
) -> tuple[AdapterShape | None, list[Finding]]:
    """The adapter's shape, unless its files are wrong, and what is wrong or odd with it.

    `base` are the shapes of the base model's weights, empty when they are not known; `reports` are of ready replicas.
    """
    errors: list[AdapterInvalid] = []
    shape = None
    try:
        errors += unservable(read_config(directory / CONFIG_FILE))
        shape = inspect(directory)
        check_finite(directory)
        if base:
            check_against_base(shape, dict(base))
    except AdapterInvalid as error:
        if str(error) not in map(str, errors):
            errors.append(error)
    findings = [_finding(error) for error in errors]
    if shape is not None:
        findings += fleet_findings(shape, reports)
        if shape.noop:
            fix = "nothing to do at the first step; later, look whether the optimizer has the adapter's parameters"
            findings.append(Finding(level="warning", what="adapter changes nothing: every lora_B is zero", fix=fix))
    return shape, findings


def fleet_findings(shape: AdapterShape, reports: Mapping[str, ReplicaReport]) -> Iterator[Finding]:
    """What replicas would say to it. Half or more that refuse a version refuse it for the fleet."""
    limits = [report.max_lora_rank for report in reports.values() if 0 < report.max_lora_rank < shape.rank]
    if limits:
        enough = next((rank for rank in ENGINE_RANKS if rank >= shape.rank), 0)
        start = f", or start vLLM with --max-lora-rank {enough}" if enough else ""
        yield Finding(
            level="error" if 2 * len(limits) >= len(reports) else "warning",
            what=f"rank {shape.rank} is above the limit of {len(limits)} of {len(reports)} replicas, {min(limits)}",
            fix=f"train with r={min(limits)} or less{start}",
        )
    served = {report.root for report in reports.values() if report.root}
    names = {short_name(name) for report in reports.values() for name in (report.root, report.base_model)}
    if served and shape.base_model and short_name(shape.base_model) not in names:
        yield Finding(
            level="warning",
            what=f"adapter was trained on {shape.base_model}, and replicas serve {', '.join(sorted(served))}",
            fix="if that is not the same model, serve the one it was trained on",
        )


def _finding(error: AdapterInvalid) -> Finding:
    about = " ".join(f"{name}={value}" for name, value in error.ids.items())
    fix = error.next_step or "save it again with save_pretrained"
    return Finding(level="error", what=f"{error.reason} ({about})" if about else error.reason, fix=fix)

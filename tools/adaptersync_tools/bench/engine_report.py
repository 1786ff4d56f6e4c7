"""What the engine bench has to tell beside the common table, for people: rates, shares and phases."""

from __future__ import annotations

from rich.text import Text

from adaptersync_core.events import PHASES
from adaptersync_tools.bench.engine import EngineResult
from adaptersync_tools.bench.gaps import Spread
from adaptersync_tools.output import console, milliseconds, table

NOISY = 0.1  # share of the machine from which on other programs spoil the figures
RATES = (
    *("windows", "promotions>", "p50, ms>", "under way>", "tokens/s>", "steady>"),
    *("share over a step!", "share under way!", "engine CPU a token!"),
)


def show_more(result: EngineResult) -> None:
    """Print it."""
    out = console()
    rates = [
        (
            *(each.kind, each.promotions, milliseconds(each.promotion_s), f"{each.busy:.0%}"),
            *(f"{each.tokens_per_s:.0f}", f"{each.steady_tokens_per_s:.0f}"),
            *(_share(each.over_step), _share(each.under_way), _share(each.engine_cpu)),
        )
        for each in result.promotions
    ]
    out.print(table("promotions beside steady windows  (mean ± standard error, lowest – highest)", RATES, rates))
    roles = sorted({role for each in result.promotions for role in each.cpu_s})
    taken = [(each.kind, *(milliseconds(each.cpu_s.get(role)) for role in roles)) for each in result.promotions]
    out.print(
        table("CPU time of a promotion beside the engines", ("windows", *(f"{role}, ms>" for role in roles)), taken)
    )
    spent = [(name, *(milliseconds(each.get(phase)) for phase in PHASES)) for name, each in result.phases.items()]
    columns = ("", *(f"{phase.removesuffix('_s')}, ms>" for phase in PHASES))
    out.print(table("phases of a promotion, medians", columns, spent))
    out.print(Text(f"proofs: {', '.join(f'{told} ({count})' for told, count in result.proofs.items())}", "dim"))
    if result.others > NOISY:
        told = f"! other programs took {result.others:.0%} of this machine meanwhile: measure again when it is quiet"
        out.print(Text(told, "yellow"))


def _share(share: Spread | None) -> str:
    return f"{share.mean:.1%} ± {share.error:.1%}, {share.low:.0%} – {share.high:.0%}" if share else ""

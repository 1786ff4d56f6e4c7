"""What proves that an engine serves a version, and how sure that is. Pure.

Three legs, none of which is enough alone:

- *commissioned*: in this life of the engine, and not long ago, an adapter of large effect changed the answers under its
  name, so this engine applies LoRA by name on the path that rollouts use;
- *content*: the tensors in the slot the engine will read are, bit by bit, those of the verified file;
- *behaviour*: log-probabilities of fixed tokens under the version, less those under the base, follow the differences
  that the trainer saw.

Rounding noise of a bfloat16 engine is about 0.06 a token, far above the effect of an early RL adapter, so behaviour
is a significance test and may end without a verdict. Content does not depend on the size of the effect.

Of an engine with several ranks, the workers of the first alone can be asked what they hold. The others must answer as
the first one does, where the trainer gave no differences, and each is commissioned for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

Verdict = Literal["proved", "refuted", "below noise", "not probed"]

SIGNIFICANT = 5.0  # standard errors by which an effect must stand out before it proves or refutes anything
SCORED = 16  # fewest tokens whose differences are worth a test: the noise is estimated from them
ROUNDING = 0.058  # log-probability a token, root mean square: what rounding adds to a difference in a bfloat16 engine
FINE_ROUNDING = 2e-5  # the same in a float32 engine
UNEXPLAINED = 5 * ROUNDING  # no engine's rounding comes to this
PROBED = 16_384  # tokens of a probe
_WORSE: tuple[Verdict, ...] = ("proved", "not probed", "below noise", "refuted")
CANARY_EFFECT = 0.3  # log-probability a token, root mean square; five times a bfloat16 engine's noise


class Probe(Struct, frozen=True, kw_only=True):
    """Tokens to score, and what the trainer saw: log-probabilities of tokens[1:] under the adapter less the base's.

    `deltas` is empty when the trainer did not compute them. At most `PROBED` tokens: each replica scores them twice.
    """

    tokens: tuple[int, ...]
    deltas: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.tokens) < 2 or len(self.deltas) not in (0, len(self.tokens) - 1):
            raise ValueError("a probe has two tokens at least, and a difference for each but the first, or none")
        if not all(isfinite(delta) for delta in self.deltas):
            raise ValueError("a probe's differences are finite")
        if len(self.tokens) > PROBED:
            raise ValueError(f"a probe has at most {PROBED} tokens")


class Leg(Struct, frozen=True, kw_only=True):
    """The outcome of one leg, with the figures it rests on."""

    verdict: Verdict
    reason: str = ""
    figures: dict[str, float] = {}


class Proof(Struct, frozen=True, kw_only=True):
    """The verdict on a version in one engine, and the legs it stands on."""

    verdict: Verdict
    reason: str = ""
    commissioned: Leg = Leg(verdict="not probed")
    content: Leg = Leg(verdict="not probed")
    behaviour: Leg = Leg(verdict="not probed")


def rms(values: Sequence[float]) -> float:
    return sqrt(sum(value * value for value in values) / len(values)) if values else 0.0


def doubtful(behaviour: Leg) -> bool:
    """Whether answers may tell of an engine that applies no adapter: the base's to the last bit, or not the trainer's.

    Only a canary can say whose fault it is.
    """
    return behaviour.verdict == "refuted" or "same" in behaviour.figures


def commission(base: Sequence[float], canary: Sequence[float]) -> Leg:
    """Log-probabilities of the same tokens under the base and under the canary."""
    effect = rms([a - b for a, b in zip(canary, base, strict=True)])
    if effect < CANARY_EFFECT:
        return Leg(
            verdict="refuted", reason="canary changed nothing: LoRA is not applied by name", figures={"effect": effect}
        )
    return Leg(verdict="proved", figures={"effect": effect})


def behave(*, base: Sequence[float], version: Sequence[float], deltas: Sequence[float], noop: bool, dtype: str) -> Leg:
    """Compare differences of log-probabilities; all sequences score the same tokens.

    The engine's differences d are fitted to the trainer's t as d = slope * t + noise. The right adapter has slope 1,
    the base slope 0, another one anything; the slope's standard error is noise / |t|. What is left over must be as
    small as rounding: large differences are not linear in an adapter's size, so a slope alone would let one pass.
    And it counts as no smaller than rounding: `dtype`, the engine's, hides a small adapter without leaving a trace.
    The figure `same` stands where an adapter that should change something changed no bit of any answer.
    """
    seen = [a - b for a, b in zip(version, base, strict=True)]
    figures = {"tokens": float(len(seen)), "effect": rms(seen)}
    if noop:
        return Leg(verdict="below noise", reason="the adapter changes nothing by its own manifest", figures=figures)
    same = list(version) == list(base)
    if same:
        figures["same"] = 1.0
    expected, power = rms(deltas), sum(t * t for t in deltas)
    if power:
        slope = sum(d * t for d, t in zip(seen, deltas, strict=True)) / power
        rest = sum((d - slope * t) ** 2 for d, t in zip(seen, deltas, strict=True))
        noise = sqrt(rest / max(len(seen) - 1, 1))
        error = max(noise, FINE_ROUNDING if dtype == "float32" else ROUNDING) / sqrt(power)
        figures |= {"expected": expected, "slope": slope, "noise": noise, "error": error}
        if len(seen) >= SCORED and noise > max(UNEXPLAINED, 0.5 * expected):
            reason = f"answers differ from the trainer's by {noise:.2f} a token, which no rounding explains"
            return Leg(verdict="refuted", reason=reason, figures=figures)
        if len(seen) < SCORED or error * SIGNIFICANT > 1.0:
            return Leg(
                verdict="below noise", reason="the trainer's differences drown in the engine's noise", figures=figures
            )
        if abs(slope - 1.0) > max(SIGNIFICANT * error, 0.1):
            return Leg(
                verdict="refuted",
                reason=f"answers follow the trainer's adapter with slope {slope:.2f}, not 1",
                figures=figures,
            )
        return Leg(verdict="proved", figures=figures)
    if same:
        return Leg(verdict="below noise", reason="answers are the base's to the last bit", figures=figures)
    return Leg(
        verdict="below noise", reason="answers changed, and there is nothing to compare them with", figures=figures
    )


def across(ranks: Sequence[Leg]) -> Leg:
    """One experiment made in every rank of an engine: the worst outcome, and where that was."""
    if len(ranks) == 1:
        return ranks[0]
    worst = max(range(len(ranks)), key=lambda rank: (_WORSE.index(ranks[rank].verdict), doubtful(ranks[rank])))
    leg = ranks[worst]
    reason = leg.reason and f"rank {worst}: {leg.reason}"
    return replace(leg, reason=reason, figures=leg.figures | {"ranks": float(len(ranks))})


def conclude(*, commissioned: Leg, content: Leg, behaviour: Leg) -> Proof:
    """One verdict. Any leg can refute; to prove, the right tensors must be held by an engine that applies them."""
    legs = {"commissioned": commissioned, "content": content, "behaviour": behaviour}
    refuted = [f"{name}: {leg.reason}" for name, leg in legs.items() if leg.verdict == "refuted"]
    if refuted:
        verdict: Verdict = "refuted"
    elif behaviour.verdict == "proved" or (content.verdict == "proved" and commissioned.verdict == "proved"):
        verdict = "proved"
    elif all(leg.verdict == "not probed" for leg in legs.values()):
        verdict = "not probed"
    else:
        verdict = "below noise"
    reasons = refuted or ["; ".join(leg.reason for leg in legs.values() if leg.reason and leg.verdict != "proved")]
    return Proof(verdict=verdict, reason="; ".join(reasons), **legs)

"""What proves that an engine serves a version, and how sure that is. Pure.

Three legs, none of which is enough alone:

- *commissioned*: once in the life of an engine, an adapter of large effect changed the answers under its name, so this
  engine applies LoRA by name on the path that rollouts use;
- *content*: the tensors in the slot the engine will read are, bit by bit, those of the verified file;
- *behaviour*: log-probabilities of fixed tokens under the version, less those under the base, follow the differences
  that the trainer saw.

Rounding noise of a bfloat16 engine is about 0.06 a token, far above the effect of an early RL adapter, so behaviour
is a significance test and may end without a verdict. Content does not depend on the size of the effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Literal

from msgspec import Struct

Verdict = Literal["proved", "refuted", "below noise", "not probed"]

SIGNIFICANT = 5.0  # standard errors by which an effect must stand out before it proves or refutes anything
CANARY_EFFECT = 0.3  # log-probability a token, root mean square; five times a bfloat16 engine's noise


class Probe(Struct, frozen=True, kw_only=True):
    """Tokens to score, and what the trainer saw: log-probabilities of tokens[1:] under the adapter less the base's.

    `deltas` is empty when the trainer did not compute them.
    """

    tokens: tuple[int, ...]
    deltas: tuple[float, ...] = ()


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


def commission(base: Sequence[float], canary: Sequence[float]) -> Leg:
    """Log-probabilities of the same tokens under the base and under the canary."""
    effect = rms([a - b for a, b in zip(canary, base, strict=True)])
    if effect < CANARY_EFFECT:
        return Leg(
            verdict="refuted", reason="canary changed nothing: LoRA is not applied by name", figures={"effect": effect}
        )
    return Leg(verdict="proved", figures={"effect": effect})


def behave(*, base: Sequence[float], version: Sequence[float], deltas: Sequence[float], noop: bool) -> Leg:
    """Compare differences of log-probabilities; all sequences score the same tokens.

    The engine's differences d are fitted to the trainer's t as d = slope * t + noise. The right adapter has slope 1,
    the base slope 0, another one anything; the slope's standard error is noise / |t|.
    """
    seen = [a - b for a, b in zip(version, base, strict=True)]
    figures = {"tokens": float(len(seen)), "effect": rms(seen)}
    if noop:
        return Leg(verdict="below noise", reason="the adapter changes nothing by its own manifest", figures=figures)
    if deltas:
        power = sum(t * t for t in deltas)
        slope = sum(d * t for d, t in zip(seen, deltas, strict=True)) / power if power else 0.0
        noise = rms([d - slope * t for d, t in zip(seen, deltas, strict=True)])
        error = noise / sqrt(power) if power else float("inf")
        figures |= {"expected": rms(deltas), "slope": slope, "noise": noise, "error": error}
        if error * SIGNIFICANT > 1.0:
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
    if list(version) == list(base):
        return Leg(verdict="below noise", reason="answers are the base's to the last bit", figures=figures)
    return Leg(
        verdict="below noise", reason="answers changed; the trainer gave nothing to compare them with", figures=figures
    )


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

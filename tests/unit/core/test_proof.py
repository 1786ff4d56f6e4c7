"""What a proof concludes from its figures."""

from __future__ import annotations

import random
from itertools import product
from math import isfinite
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptersync_core.proof import (
    CANARY_EFFECT,
    SCORED,
    Leg,
    Probe,
    Proof,
    Verdict,
    behave,
    commission,
    conclude,
    doubtful,
    rms,
)

TOKENS = 256
BFLOAT16 = 0.058  # rms noise of a bfloat16 engine, a token
FLOAT32 = 1e-5
DTYPES = {BFLOAT16: "bfloat16", FLOAT32: "float32"}

Scored = list[float]


def noise(seed: int, size: float, count: int = TOKENS) -> Scored:
    source = random.Random(seed)
    return [source.gauss(0, size) for _ in range(count)]


def served(deltas: Scored, *, slope: float, size: float, seed: int) -> tuple[Scored, Scored]:
    """Log-probabilities under the base and under what is served: `slope` times the trainer's differences, and noise."""
    base = noise(seed + 1, 1.0, len(deltas))
    rounded = noise(seed + 2, size, len(deltas))
    return base, [b + slope * t + e for b, t, e in zip(base, deltas, rounded, strict=True)]


def judged(deltas: Scored, *, slope: float, size: float, seed: int) -> Leg:
    base, version = served(deltas, slope=slope, size=size, seed=seed)
    return behave(base=base, version=version, deltas=deltas, noop=False, dtype=DTYPES[size])


seeds = st.integers(0, 2**32)
engines = st.sampled_from([FLOAT32, BFLOAT16])
visible = st.floats(1, 10).map(lambda factor: factor * BFLOAT16)  # an effect that 256 tokens show in any engine


@given(seeds, engines, visible)
def test_the_right_adapter_is_proved(seed: int, size: float, effect: float) -> None:
    leg = judged(noise(seed, effect), slope=1, size=size, seed=seed)
    assert leg.verdict == "proved"
    assert leg.figures["slope"] == pytest.approx(1, abs=5 * leg.figures["error"])
    assert leg.figures["noise"] == pytest.approx(size, rel=0.3)


@given(seeds, engines, visible, st.sampled_from([0.0, -1.0, 2.0]))
def test_base_and_wrong_alpha_are_refuted(seed: int, size: float, effect: float, slope: float) -> None:
    leg = judged(noise(seed, effect), slope=slope, size=size, seed=seed)
    assert leg.verdict == "refuted"
    assert f"slope {leg.figures['slope']:.2f}, not 1" in leg.reason or "no rounding explains" in leg.reason


@given(seeds, engines, visible)
def test_another_adapter_of_that_size_is_refuted(seed: int, size: float, effect: float) -> None:
    other = noise(seed + 7, effect)
    base, version = served(other, slope=1, size=size, seed=seed)
    assert (
        behave(base=base, version=version, deltas=noise(seed, effect), noop=False, dtype=DTYPES[size]).verdict
        == "refuted"
    )


@given(seeds, st.floats(0.01, 0.2), st.sampled_from([0.0, 1.0]))
def test_what_drowns_is_neither_proved_nor_refuted(seed: int, factor: float, slope: float) -> None:
    leg = judged(noise(seed, factor * BFLOAT16), slope=slope, size=BFLOAT16, seed=seed)
    assert leg.verdict == "below noise"
    assert "drown" in leg.reason


@given(seeds, st.floats(0.001, 3), st.integers(1, 400), st.sampled_from([FLOAT32, BFLOAT16]))
def test_the_right_adapter_is_never_refuted(seed: int, factor: float, count: int, size: float) -> None:
    """Five standard errors, of an error estimated from 16 tokens at least."""
    assert judged(noise(seed, factor * size, count), slope=1, size=size, seed=seed).verdict != "refuted"


@given(seeds, st.floats(0.001, 1), st.floats(1, 10))
def test_what_no_rounding_explains_is_refuted(seed: int, expected: float, size: float) -> None:
    """A slope of 1 with much left over: twice a large adapter, whose differences are not twice as large."""
    deltas = noise(seed, expected)
    base, version = served(deltas, slope=1, size=size, seed=seed)
    leg = behave(base=base, version=version, deltas=deltas, noop=False, dtype="float32")
    assert leg.verdict == "refuted"
    assert "no rounding explains" in leg.reason


@given(seeds, st.integers(1, SCORED - 1))
def test_few_tokens_decide_nothing(seed: int, count: int) -> None:
    assert judged(noise(seed, 1.0, count), slope=0, size=FLOAT32, seed=seed).verdict == "below noise"


@pytest.mark.parametrize("slope", [0.0, 1.0, -1.0])
def test_exact_answers(slope: float) -> None:
    """No noise at all: a small adapter may leave every answer of a coarse engine as it was, to the last bit."""

    def judge(effect: float, dtype: str) -> str:
        deltas = noise(0, effect)
        base, version = served(deltas, slope=slope, size=0, seed=0)
        return behave(base=base, version=version, deltas=deltas, noop=False, dtype=dtype).verdict

    decided = "proved" if slope == 1 else "refuted"
    assert judge(0.1, "float32") == judge(0.1, "bfloat16") == judge(1e-3, "float32") == decided
    assert judge(1e-3, "bfloat16") == judge(1e-3, "") == judge(1e-7, "float32") == "below noise"


def test_without_differences_behaviour_proves_nothing() -> None:
    base = noise(0, 1)
    for deltas in ([], [0.0] * TOKENS, [1e-170] * TOKENS):
        still = behave(base=base, version=base, deltas=deltas, noop=False, dtype="float32")
        moved = behave(base=base, version=noise(1, 1), deltas=deltas, noop=False, dtype="float32")
        assert still.verdict == moved.verdict == "below noise"
        assert "to the last bit" in still.reason
        assert (doubtful(still), doubtful(moved)) == (True, False)
        assert "changed" in moved.reason
        assert all(isfinite(value) for value in (still.figures | moved.figures).values())


@pytest.mark.parametrize("size", [1e-155, 1e-160, 5e-162])
def test_figures_of_hardly_any_difference_are_numbers(size: float) -> None:
    """JSON has no infinity, and what cannot be read again would be lost."""
    leg = behave(base=noise(0, 1), version=noise(1, 1), deltas=[size] * TOKENS, noop=False, dtype="float32")
    assert leg.verdict in ("below noise", "refuted")
    assert all(isfinite(value) for value in leg.figures.values())


def test_an_adapter_that_changes_nothing_cannot_be_seen() -> None:
    base = noise(0, 1)
    leg = behave(base=base, version=base, deltas=noise(1, 1), noop=True, dtype="")
    assert "own manifest" in leg.reason
    assert not doubtful(leg)


def test_a_canary_must_change_the_answers() -> None:
    base = noise(0, 1)
    for shift, verdict in ((CANARY_EFFECT * 1.01, "proved"), (CANARY_EFFECT * 0.99, "refuted"), (0.0, "refuted")):
        leg = commission(base, [value + shift for value in base])
        assert leg.verdict == verdict
        assert leg.figures["effect"] == pytest.approx(shift)
    assert CANARY_EFFECT > 4 * BFLOAT16


VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@pytest.mark.parametrize(("commissioned", "content", "behaviour"), list(product(VERDICTS, repeat=3)))
def test_conclusions(commissioned: Verdict, content: Verdict, behaviour: Verdict) -> None:
    """Every combination: one refutation refutes; content proves where the engine was commissioned."""
    legs = {"commissioned": commissioned, "content": content, "behaviour": behaviour}
    proof = conclude(**{name: Leg(verdict=verdict, reason=f"why {name}") for name, verdict in legs.items()})
    refuted = [name for name, verdict in legs.items() if verdict == "refuted"]
    if refuted:
        assert proof.verdict == "refuted"
        assert proof.reason == "; ".join(f"{name}: why {name}" for name in refuted)
    elif behaviour == "proved" or (content == "proved" and commissioned == "proved"):
        assert proof.verdict == "proved"
    elif set(legs.values()) == {"not probed"}:
        assert proof.verdict == "not probed"
    else:
        assert proof.verdict == "below noise"
    if not refuted:
        assert all((f"why {name}" in proof.reason) == (verdict != "proved") for name, verdict in legs.items())
    assert msgspec.json.decode(msgspec.json.encode(proof), type=Proof) == proof


@pytest.mark.parametrize(
    ("tokens", "deltas"),
    [((), ()), ((1,), ()), ((1, 2, 3), (0.1,)), ((1, 2), (0.1, 0.2)), ((1, 2), (float("nan"),)), ((1, 2), (1e999,))],
)
def test_a_probe_that_is_none(tokens: tuple[int, ...], deltas: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="probe"):
        Probe(tokens=tokens, deltas=deltas)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"tokens": tokens, "deltas": deltas}, Probe)


def test_rms() -> None:
    assert rms([]) == 0
    assert rms([3, -3]) == 3

"""What a model without weights says: tokens and log-probabilities as a pure function of who speaks.

A voice is an adapter's identity (empty for the base) and how far it moves the output (`effect`). The same
voice, context and seed give the same token, whatever the split between prompt and answer, so an answer can be
continued elsewhere. An adapter differs from the base at about `effect` of the positions, and in each
log-probability by at most `effect`; twice the effect is twice the difference, in the same direction. `rounding` bounds
what a coarse number format adds, which is another thing for every adapter and scale.
"""

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

EOS = 257  # beyond the bytes, so that it has no text
_FIRST, _COUNT = 33, 94  # printable ASCII without the space
_MASK = (1 << 64) - 1
_MULTIPLIER = 6364136223846793005


class Voice(msgspec.Struct, frozen=True, kw_only=True):
    base: bytes
    identity: bytes = b""
    effect: float = 0.0
    rounding: float = 0.0


class Spoken(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    logprobs: list[float]
    ended: bool  # by itself, with EOS as the last token


def context_hash(tokens: Sequence[int], state: int = 1) -> int:
    for token in tokens:
        state = (state * _MULTIPLIER + token + 1) & _MASK
    return state


def speak(voice: Voice, prompt: Sequence[int], *, limit: int, seed: int, stop_probability: float) -> Spoken:
    """Up to `limit` tokens after `prompt`; each position ends the text with `stop_probability`."""
    state = context_hash(prompt)
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(limit):
        if stop_probability and _unit(b"stop", voice.base, state, seed) < stop_probability:
            token = EOS
        else:
            own = voice.effect > 0 and _unit(b"own", voice.identity, state, seed) < voice.effect
            speaker = voice.identity if own else voice.base
            token = _FIRST + int(_unit(b"token", speaker, state, seed) * _COUNT)
        tokens.append(token)
        logprobs.append(logprob(voice, state, token))
        if token == EOS:
            return Spoken(tokens=tokens, logprobs=logprobs, ended=True)
        state = context_hash((token,), state)
    return Spoken(tokens=tokens, logprobs=logprobs, ended=False)


def logprob(voice: Voice, state: int, token: int) -> float:
    """The log-probability of `token` after the context `state`: in (-5.6, -0.4)."""
    value = -1.5 - 3.0 * _unit(b"base", voice.base, state, token)
    if voice.effect > 0:
        value += voice.effect * (2.0 * _unit(b"moved", voice.identity, state, token) - 1.0)
    if voice.rounding > 0:
        speaker = voice.identity + repr(voice.effect).encode()
        value += voice.rounding * (2.0 * _unit(b"rounded", speaker, state, token) - 1.0)
    return value


def prompt_logprobs(voice: Voice, prompt: Sequence[int]) -> list[float]:
    """The log-probability of each token of `prompt` but the first."""
    values = []
    state = context_hash(prompt[:1])
    for token in prompt[1:]:
        values.append(logprob(voice, state, token))
        state = context_hash((token,), state)
    return values


def _unit(purpose: bytes, speaker: bytes, state: int, salt: int) -> float:
    digest = blake2b(purpose + speaker + state.to_bytes(8, "big") + (salt & _MASK).to_bytes(8, "big"), digest_size=8)
    return int.from_bytes(digest.digest(), "big") / 2**64

"""What replicas may still expect of prompts that have come once. Pure; `scripts/route.lua` keeps the same books.

Trainers ask for several completions of each prompt, and all but the first will follow the first one's cache. So a
prompt that nobody has seen promises its replica as many more sequences as prompts of this run have on average; each
repeat keeps one of them. A request for several completions brings several sequences at once, and one that brings its
whole group promises nothing. What is left of a promise is where its prompt went last: it moves along when the prompt
spills, or when its replica has left.

A promise is a guess and must not outlive its reason. Only the latest prompts have one, about as many as there are
requests in flight, so what never comes is pushed out by what does; and a version of which nothing is in flight anywhere
has none. Who made it does not matter: with the router that dies its requests go, and they are what keeps promises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from adaptersync.router.policy import Choice

PROMPTS = (64, 4096)  # fewest and most prompts of one version that are remembered; between, one a request in flight
MOST = 255  # sequences one prompt promises
FORGET = 64  # prompts after which the average counts half: it follows a change of the group's size, not its noise
DROPS = 4  # prompts forgotten at once, so that no choice pays for a change of load


class Repeats:
    """How many sequences a prompt of one run has. Outlives versions: each has too few prompts to learn it from."""

    def __init__(self) -> None:
        self.asked = 0
        self.prompts = 0

    def first(self, again: int, alike: int = 1) -> int:
        """Prompts known before brought `again` sequences, and now a new one brings `alike`; how many more it will."""
        self.asked += again + alike
        self.prompts += 1
        more = (2 * self.asked + self.prompts) // (2 * self.prompts) - alike
        if self.prompts >= FORGET:
            self.asked //= 2
            self.prompts //= 2
        return min(max(more, 0), MOST)


class _Promise(Struct):
    left: int
    replica: str


class Promises:
    """Those of one version: what each replica may expect, and how many sequences came since the last new prompt."""

    def __init__(self) -> None:
        self.again = 0
        self.by_replica: Counter[str] = Counter()
        self.prompts: dict[str, _Promise] = {}  # the oldest first

    def quiet(self, repeats: Repeats) -> None:
        """Nothing of any version is in flight at any replica."""
        repeats.asked += self.again
        self.again = 0
        self.by_replica.clear()
        self.prompts.clear()

    def note(self, hashes: Sequence[str], choice: Choice, repeats: Repeats, *, inflight: int, alike: int = 1) -> None:
        """`alike` sequences of a prompt were routed by `choice` while `inflight` others ran at the candidates.

        A prompt is known by its last block. One that is owned but not remembered continues another and has no group.
        """
        if not hashes:
            return
        prompt, replica = hashes[-1], choice.replica
        promise = self.prompts.get(prompt)
        if promise is not None:
            self.again += alike
            self.by_replica[promise.replica] -= promise.left
            promise.left, promise.replica = max(promise.left - alike, 0), replica
            self.by_replica[replica] += promise.left
        elif choice.outcome == "cold":
            fewest, most = PROMPTS
            keep = min(max(inflight, fewest), most)
            for oldest in list(self.prompts)[: min(max(len(self.prompts) + 1 - keep, 0), DROPS)]:
                gone = self.prompts.pop(oldest)
                self.by_replica[gone.replica] -= gone.left
            promise = self.prompts[prompt] = _Promise(repeats.first(self.again, alike), replica)
            self.again = 0
            self.by_replica[replica] += promise.left

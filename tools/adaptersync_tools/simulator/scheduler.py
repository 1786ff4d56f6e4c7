"""When things happen in a simulated vLLM: admission, prefill, decoding, pauses, freezes and death.

The only module with time in it. The latency model is coarse on purpose: prefills and adapter loads queue for the
engine one after the other; each running sequence decodes at a fixed rate of its own, slower only where more do than the
engine can at that rate. Loads hold it up (vLLM reads adapters on the engine's loop) and prefills do not. Blocks are
promised to the end of a sequence, so nothing is ever preempted. It knows no HTTP.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress

import msgspec

from adaptersync_tools.simulator.engine import Engine, Request, Running
from adaptersync_tools.simulator.errors import EngineDead, Refused
from adaptersync_tools.simulator.kv_wire import KVEvent


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """0 means that it takes no time.

    Up to `full_rate_seqs` sequences decode at their full rate at once; more share what those would. 0: any number does.
    """

    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    full_rate_seqs: int = 0
    load_s: float = 0.0


class Job:
    """A sequence from submission to its last token."""

    def __init__(self, request: Request, request_id: str) -> None:
        self.request = request
        self.request_id = request_id
        self.running: Running | None = None
        self.admitted = False
        self.submitted_at = self.admitted_at = 0.0
        self.said = 0
        self.aborted = False
        self.first_token_at = 0.0
        self.computed = 0  # tokens of the prompt that were not cached
        self.prefill_s = 0.0
        self.held_s = 0.0  # time lost to pauses, freezes, loads and other sequences since admission
        self.decoding_since = 0.0
        self.decoded = 0  # tokens after the first, as far as they were counted
        self.signal = asyncio.Event()

    @property
    def finish_reason(self) -> str:
        if self.aborted:
            return "abort"
        return "stop" if self.running is not None and self.running.spoken.ended else "length"


class Scheduler:
    """Of one engine; `died` is called once when that is dead."""

    def __init__(
        self,
        engine: Engine,
        latency: Latency,
        *,
        publish: Callable[[Sequence[KVEvent]], None],
        died: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.latency = latency
        self.counts: Counter[str] = Counter()  # what /metrics reports
        self.queue_s = self.prefill_s = self.decode_s = 0.0  # of requests that have ended
        self.dead = asyncio.Event()
        self.paused = False
        self._publish = publish
        self._died = died
        self._time = asyncio.get_running_loop().time
        self._waiting: list[Job] = []
        self._jobs: set[Job] = set()
        self._kept = False  # paused with running sequences frozen in place
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._stopped_at = 0.0
        self._draining: set[Job] = set()
        self._drained = asyncio.Event()
        self._busy_until = 0.0
        self._decoding: set[Job] = set()
        self._shared_at = 0.0  # up to then, sequences were charged for each other
        self._decoded = (0, 0.0)

    @property
    def frozen(self) -> bool:
        return not self._thawed.is_set()

    @property
    def unfinished(self) -> int:
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def deferred(self) -> int:
        return sum(not self.engine.slot_for(job.request.lora) for job in self._waiting)

    @property
    def decoded(self) -> tuple[int, float]:
        """Tokens after first ones, and the sum of the times between each and the one before it. Neither goes down."""
        self._share()
        tokens, seconds = self._decoded
        for job in self._decoding:
            job.decoded = max(
                job.decoded, min(self._due(job), len(job.running.spoken.tokens) if job.running else 0) - 1
            )
            tokens += job.decoded
            seconds += self._time() - job.decoding_since
        return tokens, seconds

    async def engine_reached(self) -> None:
        """Wait like a call that goes to the engine core: for ever while frozen, in vain when dead."""
        while self.frozen and not self.dead.is_set():
            thawed = asyncio.ensure_future(self._thawed.wait())
            died = asyncio.ensure_future(self.dead.wait())
            try:
                await asyncio.wait((thawed, died), return_when=asyncio.FIRST_COMPLETED)
            finally:
                thawed.cancel()
                died.cancel()
        if self.dead.is_set():
            raise EngineDead

    async def load(self, name: str, path: str, *, inplace: bool, delay_s: float, failure: Refused | None) -> None:
        self.engine.registry.check(name, path, inplace=inplace)
        await self.engine_reached()
        if (duration := self.latency.load_s + delay_s) > 0:
            self._busy_until = max(self._time(), self._busy_until) + duration
            for job in self._jobs:
                if job.admitted and job.first_token_at <= self._time():
                    job.held_s += duration
            await asyncio.sleep(self._busy_until - self._time())
            await self.engine_reached()
        self.engine.load(name, path, inplace=inplace, failure=failure)

    async def run(self, job: Job, *, stream: bool) -> AsyncGenerator[int, None]:
        """Serve `job`, yielding how many tokens it has said whenever that grows; once if not streaming.

        Raises EngineDead. Closing the iterator early is a client that went away.
        """
        if self.dead.is_set():
            raise EngineDead
        job.submitted_at = self._time()
        self._jobs.add(job)
        self._waiting.append(job)
        try:
            self._pump()
            if not await self._until(job, lambda: job.admitted) or job.running is None:
                job.running = job.running or self.engine.unstarted(job.request)
                return
            running, total = job.running, len(job.running.spoken.tokens)
            if not await self._until_time(job, job.first_token_at):
                return
            self._share()
            self._decoding.add(job)
            job.decoding_since = self._time()
            self.counts["prompt_tokens"] += len(job.request.prompt)
            self.counts["prompt_tokens_computed"] += job.computed
            while job.said < total and not job.aborted:
                goal = job.said + 1 if stream else total
                await self._until_time(job, self._said_at(job, goal))
                said = min(total, max(goal if not job.aborted else 0, self._due(job)))
                if said > job.said:
                    self.counts["generation_tokens"] += said - job.said
                    job.said = said
                    for _ in self.engine.advance(running, said):
                        self._flush()
                    yield said
                    if stream:
                        await asyncio.sleep(0)
        finally:
            self._leave(job)

    def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End the named sequences (all if None) with what they have said; returns how many were named."""
        jobs = [job for job in self._jobs if request_ids is None or job.request_id in request_ids]
        for job in jobs:
            job.aborted = True
            job.signal.set()
        return len(jobs) if request_ids is None else len(request_ids)

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """vLLM's three ways. With sequences kept in place, clearing the cache has no effect here."""
        await self.engine_reached()
        self.paused = True
        if mode == "keep":
            self._stop_clock()
            self._kept = True
        else:
            if mode == "abort":
                self.abort()
            self._draining = set(self._jobs)
            self._pump()
            while self._draining and not self.dead.is_set():
                self._drained.clear()
                await self._drained.wait()
        if clear_cache:
            self.engine.cache.reset()

    async def resume(self) -> None:
        await self.engine_reached()
        self.paused = False
        self._draining.clear()
        if self._kept:
            self._kept = False
            self._start_clock()
        self._pump()

    def freeze(self, frozen: bool) -> None:
        """Stop or continue the engine core, as SIGSTOP and SIGCONT would."""
        if frozen == self.frozen:
            return
        if frozen:
            self._stop_clock()
            self._thawed.clear()
        else:
            self._thawed.set()
            self._start_clock()
            self._pump()

    def die(self) -> None:
        if self.dead.is_set():
            return
        self.dead.set()
        self._drained.set()
        for job in self._jobs:
            job.signal.set()
        self._died()

    def _stop_clock(self) -> None:
        if not self.frozen and not self._kept:
            self._share()
            self._stopped_at = self._time()

    def _start_clock(self) -> None:
        if self.frozen or self._kept:
            return
        lost = self._time() - self._stopped_at
        self._busy_until += lost
        self._shared_at = self._time()
        for job in self._jobs:
            if job.running is not None:
                job.held_s += lost
            job.signal.set()

    def _pump(self) -> None:
        """Admit what fits, in order; a request whose adapter has no slot is passed over, as in vLLM."""
        if self.frozen or self._kept or self.dead.is_set():
            return
        for job in list(self._waiting):
            if self.paused and job not in self._draining:
                continue
            if not self.engine.slot_for(job.request.lora):
                continue
            if not self.engine.fits(job.request):
                break
            self._waiting.remove(job)
            self._admit(job)
            if self.dead.is_set():
                break

    def _admit(self, job: Job) -> None:
        try:
            running = self.engine.admit(job.request)
        except EngineDead:
            self.die()
            return
        job.running, job.admitted, job.admitted_at = running, True, self._time()
        prompt = len(job.request.prompt)
        cached = self.engine.cached_tokens(running)
        if not job.request.want_prompt_logprobs:
            self.counts["prefix_cache_queries"] += prompt
            self.counts["prefix_cache_hits"] += cached
        job.computed = prompt - cached
        self._busy_until = max(self._time(), self._busy_until)
        if self.latency.prefill_tokens_per_s:
            job.prefill_s = job.computed / self.latency.prefill_tokens_per_s
        self._busy_until += job.prefill_s
        job.first_token_at = self._busy_until
        job.signal.set()
        self._flush()

    def _leave(self, job: Job) -> None:
        self._jobs.discard(job)
        if job in self._decoding:
            self._share()
            self._decoding.remove(job)
            tokens, seconds = self._decoded
            self._decoded = tokens + max(job.decoded, job.said - 1), seconds + self._time() - job.decoding_since
            for other in self._decoding if self.latency.full_rate_seqs else ():
                other.signal.set()  # it is faster from here on
        self._draining.discard(job)
        self._drained.set()
        if job in self._waiting:
            self._waiting.remove(job)
        if job.admitted and job.running is not None and not self.dead.is_set():
            complete = job.aborted or job.said == len(job.running.spoken.tokens)
            self.counts[job.finish_reason if complete else "abort"] += 1
            self.counts["ended"] += 1
            self.counts["ended_computed"] += job.computed
            self.queue_s += job.admitted_at - job.submitted_at
            self.prefill_s += job.prefill_s
            self.decode_s += max(0.0, self._time() - job.first_token_at)
            self.engine.finish(job.running)
            self._pump()

    def _flush(self) -> None:
        if events := self.engine.take_events():
            self._publish(events)

    def _share(self) -> None:
        """Charge those who decode for each other, up to now."""
        now, since = self._time(), self._shared_at
        if now <= since or self.frozen or self._kept:
            return
        self._shared_at = now
        for job in self._decoding if self._speed < 1.0 else ():
            job.held_s += (now - since) * (1.0 - self._speed)

    @property
    def _speed(self) -> float:
        """Of each sequence, as a part of its full rate."""
        most = self.latency.full_rate_seqs
        return min(1.0, most / len(self._decoding)) if most and self._decoding else 1.0

    def _said_at(self, job: Job, tokens: int) -> float:
        rate = self.latency.decode_tokens_per_s
        return job.first_token_at + ((tokens - 1) / rate if rate else 0.0)

    def _due(self, job: Job) -> int:
        rate = self.latency.decode_tokens_per_s
        elapsed = self._time() - job.first_token_at - job.held_s
        if elapsed < 0 or not rate:
            return 0
        return int(elapsed * rate) + 1

    async def _until_time(self, job: Job, moment: float) -> bool:
        def left_s() -> float:
            self._share()
            return moment + job.held_s - self._time()

        def deadline() -> float | None:
            speed = self._speed if job in self._decoding else 1.0
            return None if self.frozen or self._kept else self._time() + left_s() / speed

        return await self._until(job, lambda: not self.frozen and not self._kept and left_s() <= 0, deadline)

    async def _until(
        self, job: Job, done: Callable[[], bool], deadline: Callable[[], float | None] = lambda: None
    ) -> bool:
        """Wait until `done()`, looking again at each signal and at `deadline()`; False if aborted."""
        while True:
            if self.dead.is_set():
                raise EngineDead
            if job.aborted:
                return False
            if done():
                return True
            job.signal.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline()):
                    await job.signal.wait()

"""The Prometheus text of a simulated vLLM, in vLLM 0.32's names and labels. Numbers only; no clock."""

from collections.abc import Iterator, Sequence

from adaptersync_tools.simulator.scheduler import Scheduler

_REASONS = ("stop", "length", "abort", "error", "repetition")


def render(schedulers: Sequence[Scheduler], *, started_at: float) -> str:
    """By rank. `started_at` is the process's start as a unix time: it tells one engine life from the next."""
    lines = ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {started_at!r}"]
    for each in zip(*(_lines(scheduler, rank) for rank, scheduler in enumerate(schedulers)), strict=True):
        lines += each[:1] if each[0].startswith("#") else each
    return "\n".join(lines) + "\n"


def _lines(scheduler: Scheduler, rank: int) -> Iterator[str]:
    engine, counts = scheduler.engine, scheduler.counts
    labels = f'engine="{rank}",model_name="{engine.config.model}"'

    def gauge(name: str, value: float, extra: str = "") -> Iterator[str]:
        yield f"# TYPE {name} gauge"
        yield f"{name}{{{labels}{extra}}} {float(value)!r}"

    def counter(name: str, value: int) -> Iterator[str]:
        yield f"# TYPE {name}_total counter"
        yield f"{name}_total{{{labels}}} {float(value)!r}"

    def histogram(name: str, count: int, total: float) -> Iterator[str]:
        """All in the last bucket: where they lie between is not simulated."""
        yield f"# TYPE {name} histogram"
        yield f'{name}_bucket{{{labels},le="+Inf"}} {float(count)!r}'
        yield f"{name}_count{{{labels}}} {float(count)!r}"
        yield f"{name}_sum{{{labels}}} {float(total)!r}"

    yield from gauge("vllm:num_requests_running", engine.running)
    yield from gauge("vllm:num_requests_waiting", scheduler.waiting)
    yield "# TYPE vllm:num_requests_waiting_by_reason gauge"
    deferred = scheduler.deferred
    for reason, value in (("capacity", scheduler.waiting - deferred), ("deferred", deferred)):
        yield f'vllm:num_requests_waiting_by_reason{{{labels},reason="{reason}"}} {float(value)!r}'
    yield from gauge("vllm:kv_cache_usage_perc", 1.0 - engine.cache.free / engine.cache.capacity)
    yield from counter("vllm:prefix_cache_queries", counts["prefix_cache_queries"])
    yield from counter("vllm:prefix_cache_hits", counts["prefix_cache_hits"])
    yield from counter("vllm:prompt_tokens", counts["prompt_tokens"])
    yield "# TYPE vllm:prompt_tokens_by_source_total counter"
    by_source = {"local_compute": "prompt_tokens_computed", "local_cache_hit": "prefix_cache_hits"}
    for source, counted in by_source.items():
        yield f'vllm:prompt_tokens_by_source_total{{{labels},source="{source}"}} {float(counts[counted])!r}'
    yield from histogram("vllm:request_queue_time_seconds", counts["ended"], scheduler.queue_s)
    yield from histogram("vllm:request_prefill_time_seconds", counts["ended"], scheduler.prefill_s)
    yield from histogram("vllm:request_decode_time_seconds", counts["ended"], scheduler.decode_s)
    yield from histogram("vllm:inter_token_latency_seconds", *scheduler.decoded)
    yield from histogram("vllm:request_prefill_kv_computed_tokens", counts["ended"], counts["ended_computed"])
    yield from counter("vllm:prompt_tokens_cached", counts["prefix_cache_hits"])
    yield from counter("vllm:generation_tokens", counts["generation_tokens"])
    yield "# TYPE vllm:request_success_total counter"
    for reason in _REASONS:
        yield (
            f'vllm:request_success_total{{engine="{rank}",finished_reason="{reason}",'
            f'model_name="{engine.config.model}"}} {float(counts[reason])!r}'
        )
    yield "# TYPE vllm:cache_config_info gauge"
    yield (
        f'vllm:cache_config_info{{block_size="{engine.config.block_size}",enable_prefix_caching="True",'
        f'engine="{rank}",num_gpu_blocks="{engine.config.num_blocks}",prefix_caching_hash_algo="sha256"}} 1.0'
    )

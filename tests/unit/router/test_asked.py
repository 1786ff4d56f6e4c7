"""What may not be asked of a replica, in every spelling that vLLM understands."""

from __future__ import annotations

import json
import tracemalloc

import msgspec
import pytest

from adaptersync.router.asked import PARTS, Asked, check, crowded
from adaptersync_core.errors import Unroutable

COMPLETION = '{"model": "m", "prompt": "p", %s}'
CHAT = '{"model": "m", "messages": [{"role": "user", "content": "p"}], %s}'

SCORES = [
    (COMPLETION, '"prompt_logprobs": 0'),
    (COMPLETION, '"prompt_logprobs": 1.0'),
    (COMPLETION, '"prompt_logprobs": false'),  # a zero for vLLM
    (COMPLETION, '"prompt_logprobs": true'),
    (COMPLETION, '"prompt\\u005flogprobs": 0'),
    (COMPLETION, '"prompt_logprobs": null, "prompt_logprobs": 0'),  # the last one counts
    (COMPLETION, '"echo": true, "logprobs": 0'),
    (COMPLETION, '"echo": 1, "logprobs": 2'),
    (COMPLETION, '"echo": "yes", "logprobs": 1'),
    (CHAT, '"prompt_logprobs": 1'),
    (CHAT, '"echo": true'),  # the number for the answer is zero where it is not said
    (CHAT, '"echo": true, "top_logprobs": null'),
    (CHAT, '"echo": "on", "logprobs": true, "top_logprobs": 2'),
]
HARMLESS = [
    (COMPLETION, '"logprobs": 0'),
    (COMPLETION, '"logprobs": 5, "echo": false'),
    (COMPLETION, '"logprobs": 1, "echo": null'),
    (COMPLETION, '"echo": true'),
    (COMPLETION, '"echo": true, "logprobs": null'),
    (COMPLETION, '"prompt_logprobs": null'),
    (COMPLETION, '"prompt_logprobs": 0, "prompt_logprobs": null'),
    (COMPLETION, '"vllm_xargs": {"prompt_logprobs": 1}'),  # vLLM takes it for somebody else's
    (COMPLETION, '"extra_body": {"prompt_logprobs": 1}'),
    (COMPLETION, '"sampling_params": {"prompt_logprobs": 1}'),
    (CHAT, '"logprobs": true, "top_logprobs": 3'),
    (CHAT, '"echo": false'),
]
FOREIGN = [
    ('"kv_transfer_params": {"do_remote_prefill": true}', "kv_transfer_params"),
    ('"ec_transfer_params": {}', "ec_transfer_params"),
    ('"vllm_xargs": {"kv_transfer_params": "x"}', "vllm_xargs.kv_transfer_params"),
    ('"vllm_xargs": {"ec_transfer_params": ["x"]}', "vllm_xargs.ec_transfer_params"),
    ('"vllm_xargs": {"kv_cache_report_mode": "full"}', "vllm_xargs.kv_cache_report_mode"),
    ('"vllm_xargs": {"a": {"b": 1}, "kv\\u005fcache_report_mode": null}', "vllm_xargs.kv_cache_report_mode"),
    ('"prompt_embeds": "AAAA"', "prompt_embeds"),
]


def _check(form: str, fields: str, *, scoring: bool = False) -> None:
    check(msgspec.json.decode(form % fields, type=Asked), chat=form is CHAT, scoring=scoring)


@pytest.mark.parametrize(("form", "fields"), SCORES)
def test_scores_of_a_prompt_are_refused_unless_they_are_allowed(form: str, fields: str) -> None:
    with pytest.raises(Unroutable, match="can end a vLLM") as refused:
        _check(form, fields)
    assert refused.value.status == 400
    assert "router.prompt_logprobs" in str(refused.value)
    _check(form, fields, scoring=True)


@pytest.mark.parametrize(("form", "fields"), HARMLESS)
def test_what_only_looks_like_it_is_not(form: str, fields: str) -> None:
    _check(form, fields)


@pytest.mark.parametrize("form", [COMPLETION, CHAT])
@pytest.mark.parametrize(("fields", "named"), FOREIGN)
def test_what_is_not_the_versions_own_is_refused(form: str, fields: str, named: str) -> None:
    with pytest.raises(Unroutable) as refused:
        _check(form, fields, scoring=True)
    assert (refused.value.status, refused.value.ids["field"]) == (400, named)


@pytest.mark.parametrize("fields", ['"kv_transfer_params": null', '"vllm_xargs": {"a": 1}', '"vllm_xargs": 7'])
def test_what_vllm_ignores_or_refuses_is_left_to_it(fields: str) -> None:
    _check(COMPLETION, fields)


def test_of_arguments_that_nobody_looks_for_there_may_be_a_million() -> None:
    many = ",".join(f'"{number:x}":0' for number in range(100_000))
    asked = msgspec.json.decode(COMPLETION % f'"vllm_xargs": {{{many}}}', type=Asked)
    tracemalloc.start()
    try:
        check(asked, chat=False, scoring=False)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_what_may_be_long_does_not_crowd_a_body() -> None:
    def of(fields: str) -> bool:
        body = (COMPLETION % fields).encode()
        return crowded(body, msgspec.json.decode(body, type=Asked))

    colons = json.dumps("key: value, " * (PARTS + 1))
    assert not of(f'"messages": [{{"content": {colons}}}], "tools": [{colons}], "documents": [{colons}]')
    assert not of(",".join(f'"{number:x}":0' for number in range(PARTS - 10)))
    assert of(",".join(f'"{number:x}":0' for number in range(PARTS)))
    assert of(",".join(['"model":"m"'] * PARTS))


@pytest.mark.vllm
@pytest.mark.timeout(120)
def test_vllm_reads_them_so() -> None:
    """Its own parsing of the same bodies: does it come to the scores of a prompt?"""
    chat = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol").ChatCompletionRequest
    completion = pytest.importorskip("vllm.entrypoints.openai.completion.protocol").CompletionRequest
    for cases, scored in ((SCORES, True), (HARMLESS, False)):
        for form, fields in cases:
            request = (chat if form is CHAT else completion).model_validate(json.loads(form % fields))
            asked = request.to_sampling_params(8, {}).prompt_logprobs
            assert (asked is not None) == scored, fields

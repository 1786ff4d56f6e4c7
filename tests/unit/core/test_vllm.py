"""What a server may answer about itself without ending its agent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adaptersync_core.errors import EngineRefused
from adaptersync_core.vllm import VllmClient


class Server(VllmClient):
    """Answers by path; no network."""

    def __init__(self, **answers: object) -> None:
        self.url = "http://engine"
        self._answers = {
            "models": {"data": [{"id": "base", "root": "/model"}]},
            "version": {"version": "0.32.0"},
            "server_info": {},
        } | answers

    async def _call(self, method: str, path: str, **_: Any) -> str:
        return "" if path == "/metrics" else json.dumps(self._answers[path.rpartition("/")[2]])


@pytest.mark.parametrize(
    "info", [{}, {"vllm_config": None}, {"vllm_config": {}}, {"vllm_config": {"lora_config": None}}]
)
async def test_a_server_that_does_not_say_its_limits_has_none_known(info: object) -> None:
    facts = await Server(server_info=info).facts()
    assert (facts.max_loras, facts.max_cpu_loras, facts.max_lora_rank) == (0, 0, 0)


async def test_without_room_in_host_memory_the_slots_are_all_there_is() -> None:
    lora = {"max_loras": 4, "max_cpu_loras": None, "max_lora_rank": 16, "lora_dtype": "auto"}
    facts = await Server(server_info={"vllm_config": {"lora_config": lora, "cache_config": {}}}).facts()
    assert (facts.max_loras, facts.max_cpu_loras, facts.max_lora_rank) == (4, 4, 16)


@pytest.mark.parametrize(
    "config", ["VllmConfig(...)", {"lora_config": "LoRAConfig(...)"}, {"lora_config": {"max_loras": "4"}}]
)
async def test_a_configuration_in_another_form_is_an_error_that_says_so(config: object) -> None:
    with pytest.raises(EngineRefused, match="configuration cannot be read"):
        await Server(server_info={"vllm_config": config}).facts()

"""TRL 1.16's side of its HTTP protocol, as a script: what its trainer and its rollout process send, in that order.

Knows the calls and what TRL does with each answer; knows nothing of torch. Names are TRL's own, `trl-policy-vN`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp


class TrainingDied(Exception):
    """TRL would have ended the run here."""


class ScriptedTRL:
    """One incarnation of an unmodified trainer. `version` is its own counter, which a resume may set back."""

    def __init__(self, url: str, *, version: int = 0, max_staleness: int = 1) -> None:
        self.url = url
        self.version = version
        self.max_staleness = max_staleness

    async def construct(self) -> None:
        """What the constructor asks for, and what it makes of it."""
        if (await self._call("GET", "/health"))[0] != 200:
            raise TrainingDied("/health")
        status, body = await self._call("GET", "/server_info?config_format=json")
        config = body["vllm_config"] if status == 200 else None
        if config is None or config["parallel_config"]["data_parallel_size"] > 1:
            raise TrainingDied("/server_info")
        if config["lora_config"]["max_loras"] < self.max_staleness + 2:
            raise TrainingDied("max_loras")
        status, body = await self._call("GET", "/v1/models")
        if not int(body["data"][0]["max_model_len"]):
            raise TrainingDied("/v1/models")

    async def sync(self, directory: Path) -> str:
        """Pause, load, resume, unload; returns the name of the version. Any refusal but the unload's ends the run."""
        self.version += 1
        name = f"trl-policy-v{self.version}"
        load = {"lora_name": name, "lora_path": str(directory), "load_inplace": False}
        for path, sent in (("/pause?mode=keep", None), ("/v1/load_lora_adapter", load), ("/resume", None)):
            status, body = await self._call("POST", path, sent)
            if status != 200:
                raise TrainingDied(f"{path}: {status} {body}")
        if (old := self.version - (self.max_staleness + 1)) > 0:
            await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": f"trl-policy-v{old}"})
        return name

    async def rollout(self, name: str, prompt: list[int], *, max_tokens: int = 4) -> tuple[int, dict[str, str], Any]:
        """One attempt of the rollout process: status, headers, body."""
        sent = {
            "model": name,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "n": 1,
            "return_token_ids": True,
            "logprobs": 0,
            "seed": 2**62 + 1,
        }
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + "/v1/completions", json=sent) as answer,
        ):
            return answer.status, dict(answer.headers), await answer.json()

    async def _call(self, method: str, path: str, sent: object = None) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.url + path, json=sent) as answer,
        ):
            text = await answer.text()
            is_json = answer.content_type == "application/json" and text
            return answer.status, await answer.json() if is_json else text

"""The vLLM server of this host: reachable, started with what the fleet needs, and with slots enough."""

from __future__ import annotations

from pathlib import Path

from adaptersync_core.api_keys import bearer
from adaptersync_core.config import Config
from adaptersync_core.errors import EngineError
from adaptersync_core.tls import trusting
from adaptersync_core.vllm import EngineFacts, VllmClient
from adaptersync_tools.doctor.finding import Verdict

ABOUT = "engine"
FLAGS = "start vLLM with "


async def examine(verdict: Verdict, config: Config) -> None:
    token = _token(verdict, config.agent.token_file)
    shown, tls = bearer(config.agent.engine_key_file), trusting(config.agent.engine_ca_file, key="agent.engine_ca_file")
    async with VllmClient(config.agent.engine_url, token=token, headers=shown, tls=tls) as vllm:
        try:
            facts = await vllm.facts()
            door = await vllm.identity()
            sources = await vllm.kv_event_sources()
        except EngineError as error:
            verdict.check(ABOUT, False, error.reason, error.next_step or "start it, or set agent.engine_url")
            return
    judge(verdict, config, facts, door=door is not None, events=bool(sources))


def judge(verdict: Verdict, config: Config, facts: EngineFacts, *, door: bool, events: bool) -> None:
    check = verdict.check
    base = config.group.base_model
    fix = f"{FLAGS}--served-model-name {base}, or set group.base_model"
    check(ABOUT, facts.base_model == base, f"it serves {facts.base_model}, and the group is of {base}", fix)
    if not check(
        ABOUT,
        facts.max_loras > 0,
        "it does not say that it serves LoRA adapters, or how many",
        f"{FLAGS}--enable-lora, and VLLM_SERVER_DEV_MODE=1 and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment",
    ):
        return
    needed = config.trainer.max_staleness + 2  # the current version, those before it, and one on its way in
    check(
        ABOUT,
        facts.max_loras >= needed,
        f"--max-loras is {facts.max_loras}: a window of trainer.max_staleness = {config.trainer.max_staleness},"
        f" and a version on its way in, are {needed}",
        f"{FLAGS}--max-loras {needed + 1} (one for the canary of proofs), more for each further run",
    )
    check(
        ABOUT,
        facts.max_cpu_loras >= facts.max_loras + 1,
        f"--max-cpu-loras is {facts.max_cpu_loras}: loading past it evicts a version that is served",
        f"{FLAGS}--max-cpu-loras {facts.max_loras + 3}",
        level="warning",
    )
    proves = set(config.proof.promote_on) <= {"proved"}
    check(
        ABOUT,
        facts.audits,
        "its workers cannot say what they hold, so nothing it serves can be proved",
        f"{FLAGS}--worker-extension-cls adaptersync.engine.audit.Auditor"
        + (", or no version will ever be promoted" if proves else ""),
        level="error" if proves else "warning",
    )
    check(
        ABOUT,
        door,
        "it has no door of ours: whoever reaches its port may load and unload adapters",
        f"{FLAGS}--middleware adaptersync.engine.door.Door, and set agent.token_file",
        level="warning",
    )
    check(
        ABOUT,
        events or config.agent.kv_events == "off",
        "it does not say what it caches, so routers go by what they sent it",
        f"{FLAGS}--kv-events-config, or set agent.kv_events = off",
        level="warning",
    )


def _token(verdict: Verdict, file: str) -> str:
    """What the agent has left there; it is not made anew, which would shut the agent out."""
    if not file:
        return ""
    try:
        return Path(file).read_text()
    except FileNotFoundError:
        return ""  # no agent has run yet
    except OSError as error:
        verdict.check("token", False, f"{file} cannot be read: {error.strerror}", "run doctor as the agent's user")
        return ""

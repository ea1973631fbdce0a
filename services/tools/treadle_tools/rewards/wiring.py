"""Puts the rewards' part of the service together."""

from treadle_runtime.bus import Bus

from treadle_tools.functions.caller import Caller
from treadle_tools.gateway import Gateway
from treadle_tools.gpu.rounds import Rounds, ServiceEndpoints
from treadle_tools.judges.endpoints import FixedEndpoints
from treadle_tools.judges.judge import Judge
from treadle_tools.judges.scorer import JudgeScorer
from treadle_tools.registry import Registry
from treadle_tools.rewards.convert import RewardFacts
from treadle_tools.rewards.journal import BUCKET, RewardJournal
from treadle_tools.rewards.pool import Arguments, RewardPool
from treadle_tools.rewards.scorer import Scorer, ToolScorer
from treadle_tools.tool import Tool


async def reward_pool(
    bus: Bus,
    source: str,
    gateway: Gateway,
    caller: Caller,
    rounds: Rounds,
    *,
    slots: int,
    most_waiting: int,
    kept_s: float,
) -> RewardPool:
    """The pool, with what an earlier life of the service accepted. slots: rewards in the sandbox at a time."""
    registry = gateway.registry

    def scorer(tool: Tool) -> Scorer:
        if isinstance(tool.remote, Judge):
            judge = tool.remote
            service = ServiceEndpoints(rounds, judge.service) if judge.service else FixedEndpoints(judge.endpoints)
            return JudgeScorer(tool.name, judge, tool.provider, service, caller)
        return ToolScorer(tool, gateway.call, slots)

    journal = RewardJournal(await bus.key_value(BUCKET), bus.jetstream, bus.max_payload_bytes)
    pool = RewardPool(
        {tool.name: scorer(tool) for tool in registry.rewards},
        journal,
        read=lambda name, text: _read(registry, name, text),
        tell=RewardFacts(bus, source).ended,
        most_waiting=most_waiting,
        kept_s=kept_s,
    )
    await pool.load()
    return pool


def _read(registry: Registry, name: str, text: str) -> Arguments:
    return registry.step_arguments(registry.reward(name), text)

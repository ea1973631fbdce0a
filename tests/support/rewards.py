"""Short ways to call RewardsService, and reward functions of a test's own."""

import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from support.processes import ServiceProcess
from support.tools import CALL_S
from treadle.tools.v1 import rewards_pb2 as pb
from treadle.tools.v1 import rewards_pb2_grpc

WATCH_S = 300.0  # a machine that many share may score one reward after the other

# A module of rewards, and the code that it names.
OWN_REWARDS = """
from treadle_tools.tool import Kind, Limits, Tool

ANY = {"type": "object"}
def reward(name, **more):
    return Tool(name=name, kind=Kind.REWARD, description="", entry=f"own_code:{name}", arguments_schema=ANY, **more)

TOOLS = [reward(name) for name in ("given", "nothing", "endless", "no_number", "raising", "waiting")]
SMALL = Limits(wall_s=1.0, memory_bytes=64 * 1024 * 1024)
TOOLS += [reward("stops", limits=SMALL), reward("stopped", limits=SMALL, stopped_reward=0.0)]
"""
OWN_SCORES = """
import math, os, time
from treadle_tools.tool import InvalidArguments, Outcome

def given(arguments):
    return Outcome(output="read", reward=float(arguments["score"]), data={"seen": sorted(arguments)})
def nothing(arguments):
    return Outcome(output="forgot")
def endless(arguments):
    while True:
        time.sleep(1)
def no_number(arguments):
    return Outcome(reward=math.nan)
def raising(arguments):
    raise RuntimeError("no such luck")
def stops(arguments):
    if arguments["how"] == "killed":
        os.kill(os.getpid(), 9)
    if arguments["how"] == "late":
        os.kill(os.getpid(), 19)
    return Outcome(output=str(len(bytearray(512 * 1024 * 1024))), reward=1.0)
stopped = stops
def waiting(arguments):
    time.sleep(arguments["seconds"])
    return Outcome(reward=arguments["seconds"])
"""


class RewardCalls:
    """The RPCs with a fresh request_id and a deadline, arguments as a mapping."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = rewards_pb2_grpc.RewardsServiceStub(channel)

    async def score(
        self, reward: str, arguments: dict[str, Any], *, id: str = "", **fields: Any
    ) -> pb.Reward:
        """As accepted."""
        request = pb.ScoreTrajectoryRequest(
            request_id=id or uuid.uuid4().hex,
            reward=reward,
            arguments_json=json.dumps(arguments),
            **{"trajectory_id": "t-1", **fields},
        )
        return (await self.stub.ScoreTrajectory(request, timeout=CALL_S)).reward

    async def get(self, reward_id: str) -> pb.Reward:
        """As it stands."""
        return (
            await self.stub.GetReward(pb.GetRewardRequest(reward_id=reward_id), timeout=CALL_S)
        ).reward

    async def cancel(self, reward_id: str) -> pb.Reward:
        """As it stands afterwards."""
        request = pb.CancelRewardRequest(request_id=uuid.uuid4().hex, reward_id=reward_id)
        return (await self.stub.CancelReward(request, timeout=CALL_S)).reward

    async def running(self, reward_id: str) -> None:
        """Returns once it runs."""
        request = pb.WatchRewardsRequest(reward_ids=[reward_id])
        async for answer in self.stub.WatchRewards(request, timeout=CALL_S):
            if answer.reward.state == pb.REWARD_STATE_RUNNING:
                return

    async def changes(self, *reward_ids: str) -> list[pb.Reward]:
        """All that a watch of them says until they have ended."""
        request = pb.WatchRewardsRequest(reward_ids=reward_ids)
        return [answer.reward async for answer in self.stub.WatchRewards(request, timeout=WATCH_S)]

    async def ended(self, *reward_ids: str) -> list[pb.Reward]:
        """How each ended, in the order of the ids."""
        last = {reward.reward_id: reward for reward in await self.changes(*reward_ids)}
        return [last[reward_id] for reward_id in reward_ids]

    async def end(self, reward: str, arguments: dict[str, Any], **fields: Any) -> pb.Reward:
        """How a new one ended."""
        [ended] = await self.ended((await self.score(reward, arguments, **fields)).reward_id)
        return ended


@asynccontextmanager
async def rewards_of(process: ServiceProcess) -> AsyncIterator[RewardCalls]:
    """Calls to a service that runs."""
    async with grpc.aio.insecure_channel(process.address) as channel:
        yield RewardCalls(channel)

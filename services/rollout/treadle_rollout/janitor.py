"""Removes what nobody can ask for any more: tokens of batches past their repeat, tokens dropped after they were kept,
old rollouts.

Invariant: tokens of a trajectory that waits to be taken, or whose batch may still be repeated, are never touched.
"""

import asyncio
import time
from collections.abc import Iterator

import nats.errors
import structlog

from treadle_rollout.rollouts import Rollout, Rollouts
from treadle_rollout.storage import PayloadStore

SWEEP_PERIOD_S = 60.0  # disk is cheap for a minute, and a sweep looks at every rollout

log = structlog.get_logger()


class Janitor:
    """Sweeps all rollouts now and then."""

    def __init__(
        self, rollouts: Rollouts, payloads: PayloadStore, *, batch_replay_s: float, retention_s: float
    ) -> None:
        self._rollouts = rollouts
        self._payloads = payloads
        self._batch_replay_s = batch_replay_s
        self._retention_s = retention_s

    async def run(self) -> None:
        """Sweep until cancelled. A sweep that NATS interrupts is taken up by the next one."""
        while True:
            try:
                await self.sweep(time.time())
            except nats.errors.Error as error:
                log.warning("sweep interrupted", error=str(error))
            await asyncio.sleep(SWEEP_PERIOD_S)

    async def sweep(self, now_s: float) -> None:
        """One pass over all rollouts; `now_s` is Unix time."""
        for rollout in self._rollouts:
            if now_s - rollout.touched_at_s > self._retention_s:
                log.info("rollout forgotten", rollout_id=rollout.rollout_id)
                await self._rollouts.forget(rollout)
                continue
            for trajectory_id in list(self._released(rollout, now_s)):
                await self._payloads.release(rollout.rollout_id, trajectory_id)
                del rollout.payload_names[trajectory_id]

    def _released(self, rollout: Rollout, now_s: float) -> Iterator[str]:
        wanted = {
            sample.trajectory_id for group in rollout.buffer.groups.values() if not group.taken for sample in group.kept
        }
        for batch in rollout.buffer.batches.values():
            if now_s - rollout.batch_times_s[batch.batch_id] <= self._batch_replay_s:
                wanted.update(trajectory_id for _, members in batch.groups for trajectory_id in members)
        return (trajectory_id for trajectory_id in rollout.payload_names if trajectory_id not in wanted)

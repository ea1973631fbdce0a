"""Keep the histories of prompts in a JetStream bucket, so that they outlive the facts they came
from (one hour).

A restarted predictor loads them, then gets the facts that are still kept; a trajectory in both
counts once. Invariants: writing never delays a fact or a prediction; a history that was not yet
written when the process died is learned again from the facts. Several predictors of one mesh write
the same content.
"""

import asyncio
import json

import nats.errors
import structlog
from nats.js.kv import KeyValue
from treadle_core.ranking.evidence import Ended, Evidence
from treadle_runtime.buckets import entries_of
from treadle_runtime.bus import Bus, kv_key

log = structlog.get_logger()

BUCKET = "TREADLE_PREDICTOR_HISTORY"
KEPT_S = 30 * 86_400.0  # a month; older samples of a prompt predict little for today's policy
LAST_WRITE_S = 2.0  # at the end of the process, within its drain
RETRY_S = 1.0  # while NATS does not answer; at most one history of each prompt waits


class HistoryStore:
    """Histories in `evidence`, and their copy in the bucket."""

    def __init__(self, bucket: KeyValue, evidence: Evidence) -> None:
        self._bucket = bucket
        self.evidence = evidence
        self._unwritten: dict[str, None] = {}  # prompt ids, oldest first
        self._more = asyncio.Event()

    @classmethod
    async def open(cls, bus: Bus, evidence: Evidence) -> "HistoryStore":
        """Open the bucket and add its content to `evidence`. Raises nats.errors.Error."""
        store = cls(await bus.key_value(BUCKET, ttl_s=KEPT_S), evidence)
        for entry in await entries_of(store._bucket):  # oldest first, as they were learned
            prompt_id, ended = decode(entry.value or b"")
            for each in ended:
                evidence.close_trajectory(each)
            log.debug("history loaded", prompt_id=prompt_id, trajectories=len(ended))
        return store

    def write_soon(self, prompt_id: str) -> None:
        """Have `run` write the prompt's history."""
        self._unwritten[prompt_id] = None
        self._more.set()

    async def run(self) -> None:
        """Write changed histories, for ever; at the end of the process write the remaining ones,
        for a moment."""
        try:
            while True:
                await self._more.wait()
                self._more.clear()
                await self._write_all()
        finally:
            try:
                async with asyncio.timeout(LAST_WRITE_S):
                    await self._write_all()
            except TimeoutError:
                log.warning(
                    "NATS is away: histories not yet written are learned again from the facts"
                )

    async def _write_all(self) -> None:
        while self._unwritten:
            prompt_id = next(iter(self._unwritten))
            value = self._encode(prompt_id)
            try:
                await self._bucket.put(kv_key(prompt_id), value)
            except nats.errors.Error as error:
                log.warning("history not written, trying again", error=repr(error))
                self._unwritten[prompt_id] = self._unwritten.pop(prompt_id)  # after the others
                await asyncio.sleep(RETRY_S)
            else:
                if value == self._encode(prompt_id):
                    self._unwritten.pop(prompt_id, None)

    def _encode(self, prompt_id: str) -> bytes:
        return encode(prompt_id, list(self.evidence.ended_of_prompt(prompt_id)))


def encode(prompt_id: str, ended: list[Ended]) -> bytes:
    """Return a prompt's history as JSON."""
    rows = [
        [
            *(
                each.trajectory_id,
                each.rollout_id,
                each.gen_tokens,
                each.turns,
                each.own_end,
                each.weight_version,
            ),
            *(each.observed_tokens, each.tool_s),
        ]
        for each in ended
    ]
    return json.dumps({"prompt_id": prompt_id, "ended": rows}).encode()


def decode(value: bytes) -> tuple[str, list[Ended]]:
    """Return the prompt and its history. Histories of older versions have fewer columns."""
    found = json.loads(value)
    prompt_id = str(found["prompt_id"])
    return prompt_id, [
        Ended(trajectory_id, rollout_id, prompt_id, gen_tokens, turns, own_end, *rest)
        for trajectory_id, rollout_id, gen_tokens, turns, own_end, *rest in found["ended"]
    ]

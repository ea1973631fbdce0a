"""The histories of prompts in a JetStream bucket, so that they outlive the facts they came from (one hour).

Purpose: a restarted predictor loads them, then hears the facts that are still kept; what is in both counts once.
Invariants: writing never delays a fact or a prediction; what was not yet written when the process died is learned
again from the facts. Owner: this process writes; several predictors of one mesh write the same.
"""

import asyncio
import json

import nats.errors
import structlog
from nats.js.kv import KeyValue
from treadle_core.ranking.evidence import Ended, Evidence
from treadle_runtime.bus import Bus, entries_of, kv_key

log = structlog.get_logger()

BUCKET = "TREADLE_PREDICTOR_HISTORY"
KEPT_S = 30 * 86_400.0  # a month; a prompt that was not sampled for longer says little about today's policy
LAST_WRITE_S = 2.0  # at the end of the process, within its drain
RETRY_S = 1.0  # NATS is away; what waits is bounded by the number of prompts


class HistoryStore:
    """See the module."""

    def __init__(self, bucket: KeyValue, evidence: Evidence) -> None:
        self._bucket = bucket
        self.evidence = evidence
        self._unwritten: dict[str, None] = {}  # prompt ids, oldest first
        self._more = asyncio.Event()

    @classmethod
    async def open(cls, bus: Bus, evidence: Evidence) -> "HistoryStore":
        """The store with all that it holds folded into `evidence`. Raises nats.errors.Error."""
        store = cls(await bus.key_value(BUCKET, ttl_s=KEPT_S), evidence)
        for entry in await entries_of(store._bucket):  # oldest first, as they were learned
            prompt_id, ended = decoded(entry.value or b"")
            for each in ended:
                evidence.closed(each)
            log.debug("history loaded", prompt_id=prompt_id, trajectories=len(ended))
        return store

    def changed(self, prompt_id: str) -> None:
        """The prompt's history is to be written."""
        self._unwritten[prompt_id] = None
        self._more.set()

    async def run(self) -> None:
        """Writes what changed, for ever; at the end of the process what is left, for a moment."""
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
                log.warning("NATS is away: histories not yet written are learned again from the facts")

    async def _write_all(self) -> None:
        while self._unwritten:
            prompt_id = next(iter(self._unwritten))
            value = encoded(prompt_id, list(self.evidence.ended_of_prompt(prompt_id)))
            try:
                await self._bucket.put(kv_key(prompt_id), value)
            except nats.errors.Error as error:
                log.warning("history not written, trying again", error=repr(error))
                await asyncio.sleep(RETRY_S)
            else:
                if value == encoded(prompt_id, list(self.evidence.ended_of_prompt(prompt_id))):
                    self._unwritten.pop(prompt_id, None)


def encoded(prompt_id: str, ended: list[Ended]) -> bytes:
    rows = [
        [each.trajectory_id, each.rollout_id, each.gen_tokens, each.turns, each.own_end, each.weight_version]
        for each in ended
    ]
    return json.dumps({"prompt_id": prompt_id, "ended": rows}).encode()


def decoded(value: bytes) -> tuple[str, list[Ended]]:
    found = json.loads(value)
    prompt_id = str(found["prompt_id"])
    return prompt_id, [
        Ended(trajectory_id, rollout_id, prompt_id, gen_tokens, turns, own_end, *version)  # none in what was kept once
        for trajectory_id, rollout_id, gen_tokens, turns, own_end, *version in found["ended"]
    ]

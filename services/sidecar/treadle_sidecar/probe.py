"""Probe an engine without steps: measure its decode curve, and find out whether it still generates.

The curve is learned from all that runs on the engine (`treadle_core.engine_queue.pace`). A probe
is work from which the curve can be fitted: a few requests alone, half and all of the slots at once,
at three lengths of context, and twice more alone, at longer ones where the engine is fast. There is
one at the start, so that the first plan has a curve, and one after each change that the engine's
own work has shown.

Invariants: a probe ends at once when a step or a pause comes, and after `limit_s`. It samples
TOKENS for each of at most 3 * (1 + 32 + 64) + 6 requests. Each round has its own prompt of random
tokens, which its requests share, so that the engine computes its tokens once, and no step's prefix
is ever one of them. Requests of a probe are no steps: they pass by the queue, and no fact or load
counts them.

The other probe is a stream of a few tokens, as a step is: an engine may answer questions, or
requests that are no streams, and run no step. It is due when a call has found the engine lost, and
otherwise when `treadle_core.engine_queue.pace` says so. A pause waits for it, as the device of a
paused engine may be a trainer's.
"""

import asyncio
import itertools
import math
import random
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

import structlog
from treadle_core.engine_queue.pace import EngineProgress, MeasuredCurve
from treadle_runtime.errors import TreadleError
from treadle_runtime.http.sglang import EngineClient, EngineLost, EngineRefused, EngineRequest

from treadle_sidecar.engine.watch import EngineProfile, EngineWatch
from treadle_sidecar.runner import REPEAT_ABORT_S, StepRunner

log = structlog.get_logger()

CONTEXTS = (64, 256, 512)  # tokens, of the first round
# To the first token of 512 takes a GPU as long as to that of 2,000, so short prompts declare it as
# six times too slow (research/results/h100.md). Therefore the next round's longest context is as
# long as takes PREFILL_S by the round before, which is what a step may have to wait for. That is
# 512 tokens on a CPU.
PREFILL_S = 0.5
MOST_PROMPT_TOKENS = 8192  # one chunk of SGLang's prefill on most GPUs
TOKENS = 9  # two windows of four steps after the prefill
# The first prefill of a length is slower than later ones: an engine prepares its kernels for a
# shape it has not seen. Rounds after the first have one request at each length.
ROUNDS = 3
MOST_SEQUENCES = 64
CHECK_S = 1.0
REST_S = 60.0  # between probes of a busy engine, whose own work is enough for a while


@dataclass(eq=False)
class CurveProbe:
    """Probe of the decode curve. limit_s: longest time of a probe; 0: none is made. `first_over` is
    set after the first one."""

    engine: EngineClient
    watch: EngineWatch
    runner: StepRunner
    curve: MeasuredCurve
    limit_s: float
    first_over: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _rids: set[str] = field(default_factory=set, init=False)
    _cut: bool = field(default=False, init=False)

    async def run(self) -> None:
        """Fit the curve as the engine works, and probe where that is due, until cancelled."""
        allowed = due = self.limit_s > 0.0
        not_before_s = 0.0
        while True:
            profile = await self.watch.until_healthy()
            # Without the vocabulary's size, no token is known to be one that the engine survives.
            possible = due and profile.vocab_size > 0 and self.runner.is_idle
            probed = possible and time.monotonic() >= not_before_s
            if probed:
                due = not await self._probe(profile)
                not_before_s = time.monotonic() + REST_S
            if self.curve.update():
                log.info(
                    "the engine's decode curve is measured",
                    curve=self.curve.declared,
                    by_probe=probed,
                )
                due = due or (allowed and not probed)
            self.first_over.set()
            await asyncio.sleep(CHECK_S)

    async def _probe(self, profile: EngineProfile) -> bool:
        """Probe the engine; return whether the probe was whole."""
        rng = random.Random(uuid.uuid4().int)
        most = min(self.runner.queue.policy.slots or profile.slots, MOST_SEQUENCES)
        rounds = [sorted({1, (most + 1) // 2, most}), *([[1]] * (ROUNDS - 1))]
        async with self.runner.borrowed:
            if not self.runner.is_idle:
                return False
            self.runner.wanted.clear()
            self._cut = False
            try:
                async with asyncio.TaskGroup() as tasks:
                    stopper = tasks.create_task(self._stop_in_time())
                    contexts: Sequence[int] = CONTEXTS
                    for batches in rounds:
                        # Special tokens stand at the ends of a vocabulary; the text between is what
                        # steps are of.
                        low, high = profile.vocab_size // 10, profile.vocab_size // 2
                        prompt = [rng.randrange(low, high) for _ in range(max(contexts))]
                        firsts_s = []
                        for context, batch in itertools.product(contexts, batches):
                            async with asyncio.TaskGroup() as streams:
                                sent = [
                                    streams.create_task(
                                        self._generate(prompt[:context], profile.weight_version)
                                    )
                                    for _ in range(0 if self._cut else batch)
                                ]
                            firsts_s += [task.result() for task in sent if batch == 1]
                        contexts = lengthen(
                            contexts,
                            firsts_s[-1] if firsts_s else math.inf,
                            longest_prompt(profile),
                        )
                    stopper.cancel()
            except* (EngineLost, EngineRefused, TreadleError) as errors:
                log.warning(
                    "a probe of the engine failed",
                    errors=[str(error) for error in errors.exceptions],
                )
                self._cut = True
        return not self._cut

    async def _generate(self, prompt: list[int], salt: str) -> float:
        """Generate from the prompt; return the seconds to the first token."""
        began_s, first_s = time.monotonic(), math.inf
        rid = f"{uuid.uuid4().hex}-probe"
        sampling = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
        self._rids.add(rid)
        try:
            request = EngineRequest(rid, prompt, sampling, salt)
            async with (
                self.watch.calling("a probe"),
                aclosing(self.engine.generate(request)) as chunks,
            ):
                async for chunk in chunks:
                    if chunk.token_ids:
                        first_s = min(first_s, time.monotonic() - began_s)
        finally:
            self._rids.remove(rid)
        return first_s

    async def _stop_in_time(self) -> None:
        """Wait until a step comes or the time is over; then abort the probe's requests on the
        engine."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limit_s):
                await self.runner.wanted.wait()
        self._cut = True
        while True:
            for rid in tuple(self._rids):
                await self.engine.abort(rid)
            await asyncio.sleep(REPEAT_ABORT_S)


def longest_prompt(profile: EngineProfile) -> int:
    """Return the tokens of the longest prompt of a probe: it takes a quarter of the engine's KV at
    most."""
    return min(MOST_PROMPT_TOKENS, profile.max_input_tokens - TOKENS, profile.kv_tokens // 4)


def lengthen(contexts: Sequence[int], first_s: float, most: int) -> Sequence[int]:
    """Return the contexts of the next round, of which none is shorter than before.

    first_s: seconds to the first token of the longest one, of which all tokens after the second
    longest were new. most: tokens of the longest.
    """
    new_tokens = contexts[-1] - contexts[-2]
    longest = min(int(PREFILL_S / first_s * new_tokens), most)
    if longest <= contexts[-1]:
        return contexts
    return tuple(context * longest // contexts[-1] for context in contexts)


@dataclass(eq=False)
class GenerationProbe:
    """Has an idle engine generate a few tokens now and then, one that a call has found lost at
    once, and a suspected one until it does."""

    engine: EngineClient
    watch: EngineWatch
    runner: StepRunner
    progress: EngineProgress

    async def run(self) -> None:
        """Make the probes that are due, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self.watch.doubted.wait()
            doubted = self.watch.doubted.is_set()
            if self._may_probe(doubted) and (
                doubted or self.progress.is_probe_due(time.monotonic())
            ):
                async with self.runner.borrowed:
                    if self._may_probe(doubted):
                        await self._probe()
                self.watch.judge()
            if doubted:  # an engine that loses many steps gets no more probes than others
                await asyncio.sleep(CHECK_S)

    def _may_probe(self, doubted: bool) -> bool:
        """Return whether the engine may be asked. doubted: also beside steps."""
        runs = doubted and not self.runner.queue.paused and not self.progress.is_loading
        return self.watch.answers and (runs or self.runner.is_idle)

    async def _probe(self) -> None:
        self.watch.doubted.clear()
        rid = f"{uuid.uuid4().hex}-generates"
        try:
            await self.engine.sample_tokens(rid, self.progress.stall_s)
        except (EngineLost, EngineRefused) as error:
            if isinstance(error, EngineLost) and error.is_gone:
                return  # the next poll finds that too, and its return
            log.warning("the engine did not generate the tokens of a probe", error=str(error))
            self.watch.probe_problem = str(error)
            self.progress.suspect()
            if not self.progress.suspected:  # steps run there: another probe, until they have ended
                self.watch.doubted.set()
        else:
            self.watch.probe_problem = ""
            self.progress.trust()

"""Decide whether an engine makes progress or hangs.

An engine that hangs may still answer requests: its HTTP server is another process than the one that
generates. So `EngineProgress` receives each request that is on the engine and each sign of
progress, and computes when the next sign is due. Where none comes in time, the engine is suspected.
Only generated tokens end a suspicion.

A sign is a token, the end of a prefill, or that fewer tokens of the waiting prompts are unread,
which an engine that reads in chunks reports after each. An idle engine owes no sign; its sidecar
requests a token from it now and then (`is_probe_due`).

How long an engine may be silent: `stall_s`, and PATIENCE times the time by its decode curve of the
prefill and the decode steps before the next sign. An engine that only prefills is never suspected
for it.
"""

import math

from treadle_core.model import DecodeCurve

# Curves are measured with short prompts, and other programs share the machine.
PATIENCE = 4.0
# SGLang reads waiting prompts in passes of so many tokens (--max-prefill-tokens), a longer prompt
# in a pass of its own.
PASS_TOKENS = 16_384
# An engine whose curve is not known is taken for slower than any on one CPU core.
SLOWEST = DecodeCurve(base_s=1.0, per_sequence_s=0.0, prefill_tokens_per_s=100.0)
IDLE_PROBE_S = 10.0  # a token of an idle engine each so often takes less than 1% of its time
SUSPECT_PROBE_S = (
    2.0  # between the probes of an engine that is suspected, which has nothing else to do
)


class EngineProgress:
    """Work of one engine, and when it last showed progress. Times are seconds of one monotonic
    clock.

    stall_s: how long an engine may be silent beyond what its work takes. `tokens_a_chunk`: tokens
    that the engine samples for a request before it sends them together.
    """

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self.tokens_a_chunk = 1
        self.suspected = False
        self._waiting: dict[str, int] = {}  # requests without a token yet: tokens of their context
        self._decoding: dict[str, int] = {}  # the same of the others
        self._since_s = -math.inf  # the last sign, or the last moment without a request
        self._unread_tokens = 0  # as reported last
        self._loads = 0  # of weights, which are under way

    def begin(self, request: str, context_tokens: int, now: float) -> None:
        """Note a request that is sent to the engine."""
        if self._is_idle:
            self._since_s = now
        self._waiting[request] = context_tokens

    def note_tokens(self, request: str, now: float) -> None:
        """Note that the engine has sent tokens of a request, or that it has read a prefix."""
        if request in self._waiting:
            self._decoding[request] = self._waiting.pop(request)
        self._since_s = now
        self.suspected = False

    def note_unread(self, tokens: int, now: float) -> None:
        """Note how many tokens of waiting prompts the engine reports as not read yet."""
        if tokens < self._unread_tokens:
            self._since_s = now
        self._unread_tokens = tokens

    def end(self, request: str, now: float) -> None:
        """Note that a request is not on the engine any more, for whatever reason."""
        self._waiting.pop(request, None)
        self._decoding.pop(request, None)
        if self._is_idle:
            self._since_s = now

    def begin_load(self) -> None:
        """Expect no sign while weights are loaded."""
        self._loads += 1

    def end_load(self, now: float) -> None:
        """Expect signs again, as weights are loaded."""
        self._loads -= 1
        self._since_s = now

    @property
    def is_loading(self) -> bool:
        """Return whether weights are being loaded."""
        return self._loads > 0

    def silent_s(self, now: float) -> float:
        """Return the seconds since the last sign, or since the engine got work."""
        return now - self._since_s

    def due_s(self, curve: DecodeCurve | None) -> float:
        """Return when the next sign is due at the latest; infinity while none is due. curve: None
        while it is not known."""
        if self._is_idle or self._loads:
            return math.inf
        known = curve if curve is not None and curve.prefill_tokens_per_s else SLOWEST
        longest = max(self._waiting.values(), default=0)
        # The next sign comes after the longest prompt at the latest, and after what is read in the
        # same pass.
        new_tokens = min(sum(self._waiting.values()), longest + PASS_TOKENS)
        prefill_s = (
            new_tokens / known.prefill_tokens_per_s
            + known.prefill_pair_s * new_tokens * 0.5 * longest
        )
        kv_tokens = sum(self._decoding.values())
        step_s = (
            known.base_s
            + known.per_sequence_s * len(self._decoding)
            + known.per_kv_token_s * kv_tokens
        )
        return self._since_s + self.stall_s + PATIENCE * (prefill_s + self.tokens_a_chunk * step_s)

    def judge(self, curve: DecodeCurve | None, now: float) -> bool:
        """Suspect the engine where a sign is overdue. Returns whether the suspicion is new."""
        if self.suspected or now < self.due_s(curve):
            return False
        self.suspected = True
        return True

    def suspect(self) -> None:
        """Suspect the engine, as a probe of it failed."""
        self.suspected = True

    def is_probe_due(self, now: float) -> bool:
        """Return whether to request a token from the engine: it has nothing to do, and no token has
        come for a while."""
        rest_s = SUSPECT_PROBE_S if self.suspected else IDLE_PROBE_S
        return self._is_idle and not self._loads and now - self._since_s >= rest_s

    @property
    def _is_idle(self) -> bool:
        return not self._waiting and not self._decoding

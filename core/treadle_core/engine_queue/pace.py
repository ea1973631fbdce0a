"""Measure the pace of an engine: its decode curve, learned from its work, and whether it makes
progress or hangs.

`EngineWork` receives each request of an engine and its tokens as they arrive, and cuts the engine's
time into windows of a few steps. In a window the engine decoded `steps` steps and passes of
prefill, so by the decode curve its seconds are

    base_s * steps + per_sequence_s * sequences + per_kv_token_s * KV + token_s * prefilled tokens +
    pair_s * pairs

where sequences and KV are sums over the window's decode steps. A pass of prefill counts as a step,
as it reads all weights too. `MeasuredCurve` fits the five coefficients to windows of all kinds: an
equation for each window, by least squares of the relative error without negative coefficients.
Windows in which something else took time, e.g. the host, come out far off and hardly count; so do
old windows, except where nothing newer separates the coefficients.

An engine that hangs may still answer requests: its HTTP server is another process than the one that
generates. So `EngineProgress` receives each request that is on the engine and each sign of
progress, and computes when the next sign is due. Where none comes in time, the engine is suspected.
Only a probe that gets all of its tokens ends a suspicion. A sign is a token, the end of a prefill,
or that fewer tokens of the waiting prompts are unread, which an engine that reads in chunks reports
after each. An idle engine owes no sign; its sidecar probes it now and then (`is_probe_due`).

How long an engine may be silent: `stall_s`, and PATIENCE times the time by its decode curve of the
prefill and the decode steps before the next sign. An engine that only prefills is never suspected
for it.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from treadle_core.compiled import Flags, Floats
from treadle_core.model import DecodeCurve

WINDOW_STEPS = 4  # a token may come a tenth of a step late: 2% of four steps
LEAST_WINDOWS = 8  # for the first fit: more than there are coefficients
WINDOWS_A_CELL = 8  # the latest of each kind
# kinds of windows; in use are some tens, by powers of two of batch, context and prefilled tokens
MOST_CELLS = 128
RECENT_WINDOWS = 32  # what the engine does now
DRIFT = 0.2  # a change that is worth a new plan: predictions of lengths are 20% off at best
# a fit with less than this share of another's error is the better one; nearer ones differ by chance
CLEARLY = 0.8
ROUNDS = 6  # of fitting and weighting by the error; the weights settle in about five
OUTLIER = 2.0  # a window that is this many median errors off counts half
LEAST_ERROR = 0.01  # a fit better than this is exact, and its errors mean nothing
# Prefill so fast that steps do not show it is declared as this fast. No engine of one accelerator
# reaches it.
LEAST_PREFILL_TOKEN_S = 1e-6
LEAST_BASE_S = 1e-6  # a step takes time

# Below this share of the target's norm, a gradient counts as zero, and so does what a column adds:
# double precision leaves about 1e-15 of noise a row, and another processor other noise.
SLACK = 1e-10

# Curves are measured with short prompts, and other programs share the machine.
PATIENCE = 4.0
# SGLang reads waiting prompts in passes of so many tokens (--max-prefill-tokens), a longer prompt
# in a pass of its own.
PASS_TOKENS = 16_384
# An engine whose curve is not known is taken for slower than any on one CPU core.
SLOWEST = DecodeCurve(base_s=1.0, per_sequence_s=0.0, prefill_tokens_per_s=100.0)
IDLE_PROBE_S = 10.0  # a few tokens of an idle engine each so often take about 1% of its time
SUSPECT_PROBE_S = (
    2.0  # between the probes of an engine that is suspected, which has nothing else to do
)


class Window(NamedTuple):
    """Work of an engine in some of its steps, and its seconds; fields as in the module's
    docstring."""

    steps: float
    sequences: float
    kv_tokens: float
    new_tokens: float
    pairs: float
    seconds: float


NEW_TOKENS, PAIRS = Window._fields.index("new_tokens"), Window._fields.index("pairs")

# The latest windows of each kind, with a number that counts all.
Cells: TypeAlias = OrderedDict[tuple[int, ...], deque[tuple[int, Window]]]


class EngineWork:
    """Cutter of an engine's time into windows, which it gives to `take`. Times are seconds of one
    monotonic clock.

    One decoding request, the lead, counts the steps: it gets a token in each. A window ends at a
    token of the lead. Where the lead ends, or a request ends before its first token, the work of
    the open window is unknown, and the window is dropped.
    """

    def __init__(self, take: Callable[[Window], None]) -> None:
        self._take = take
        self._waiting: dict[str, int] = {}  # requests without a token yet: tokens of their context
        # the same of the others, in the order of their first tokens
        self._decoding: dict[str, int] = {}
        self._kv_tokens = 0  # of those that decode
        self._lead = ""
        self._open(None)

    def _open(self, now: float | None) -> None:
        """Open a window at `now`; None: no window is open."""
        self._began_s = now
        self._steps = self._sequences = self._window_kv = self._new_tokens = 0
        self._passes = 0  # of prefill since the lead's last token
        self._pairs = 0.0

    def begin(self, request: str, context_tokens: int, now: float) -> None:
        """Note a request that is sent to the engine."""
        if not self._waiting and not self._decoding:
            self._open(now)  # the engine was idle
        self._waiting[request] = context_tokens

    def add(self, request: str, tokens: int, cached_tokens: int, now: float) -> None:
        """Note new tokens of a request. cached_tokens: tokens of its context that the engine did
        not compute."""
        context = self._waiting.pop(request, None)
        if context is not None:
            self._first_token(request, context, max(context - cached_tokens, 0), now)
        elif request == self._lead:
            self._steps += tokens + self._passes
            self._passes = 0
            self._sequences += tokens * len(self._decoding)
            self._window_kv += tokens * self._kv_tokens
            if self._began_s is None:
                self._open(now)
            elif self._steps >= WINDOW_STEPS or self._new_tokens:
                work = (
                    self._steps,
                    self._sequences,
                    self._window_kv,
                    self._new_tokens,
                    self._pairs,
                )
                if now > self._began_s:
                    self._take(Window(*work, now - self._began_s))
                self._open(now)
        self._decoding[request] += tokens
        self._kv_tokens += tokens

    def end(self, request: str) -> None:
        """Note the end of a request."""
        unknown = self._waiting.pop(request, None) is not None or request == self._lead
        self._kv_tokens -= self._decoding.pop(request, 0)
        if unknown:
            self._open(None)
        if request == self._lead:
            # the one that is likely to stay longest
            self._lead = next(reversed(self._decoding), "")

    def _first_token(self, request: str, context: int, new_tokens: int, now: float) -> None:
        self._decoding[request] = context
        self._kv_tokens += context
        if not self._lead:
            self._lead = request
        if self._began_s is None:
            if self._lead == request:
                self._open(now)
            return
        self._passes = 1
        self._new_tokens += new_tokens
        self._pairs += new_tokens * (context - 0.5 * new_tokens)


class MeasuredCurve:
    """Measured curve of one engine. `declared` is None until enough is known; it changes only where
    the engine takes other seconds for its present work, by more than DRIFT, so that callers may act
    on each change. given: a curve that the engine's settings declare, which counts instead."""

    def __init__(self, given: DecodeCurve | None = None) -> None:
        self.declared: DecodeCurve | None = None
        self._given = given
        # By kind, so that what the engine does all day does not displace what it does rarely.
        self._cells: Cells = OrderedDict()
        self._recent: deque[Window] = deque(maxlen=RECENT_WINDOWS)
        self._taken = 0
        self._fitted = 0

    def known(self) -> DecodeCurve | None:
        """Return the given curve, else the measured one; None while neither is known."""
        return self._given or self.declared

    def take(self, window: Window) -> None:
        """Note a window of the engine's work."""
        sizes = (
            window.sequences / window.steps,
            window.kv_tokens / max(window.sequences, 1.0),
            window.new_tokens,
        )
        cell = tuple(int(size).bit_length() for size in sizes)
        self._cells.setdefault(cell, deque(maxlen=WINDOWS_A_CELL)).append((self._taken, window))
        self._cells.move_to_end(cell)
        if len(self._cells) > MOST_CELLS:
            self._cells.popitem(last=False)
        self._recent.append(window)
        self._taken += 1

    def update(self) -> bool:
        """Fit again, and declare the result where it differs. Returns whether it did. Takes some
        milliseconds."""
        if self._taken == self._fitted or self._taken < LEAST_WINDOWS:
            return False
        self._fitted = self._taken
        if self.declared is not None and not self._has_drifted(self.declared):
            return False
        found, error = _fit(self._cells)
        if self.declared is not None:
            # Either the engine's work is of a kind that the fit did not know, or the engine itself
            # has changed.
            changed = self._rescaled(slowness(self.declared, self._recent))
            found_changed, error_changed = _fit(changed)
            if error_changed < CLEARLY * error or self._has_drifted(found):
                self._cells, found = changed, found_changed
        self.declared = found
        return True

    def _has_drifted(self, curve: DecodeCurve) -> bool:
        """Return whether the curve is off in the same direction in both halves of the recent
        windows."""
        recent = list(self._recent)
        halves = [
            slowness(curve, half)
            for half in (recent[: len(recent) // 2], recent[len(recent) // 2 :])
        ]
        return min(halves) > 1.0 + DRIFT or max(halves) < 1.0 / (1.0 + DRIFT)

    def _rescaled(self, factor: float) -> Cells:
        """Return the windows as if all of the engine's work had always taken `factor` times as
        long, as it does now."""
        # so many are new where both halves are off
        since = self._taken - 3 * len(self._recent) // 4
        return OrderedDict(
            (
                cell,
                deque(
                    [(at, _longer(each, factor if at < since else 1.0)) for at, each in kept],
                    WINDOWS_A_CELL,
                ),
            )
            for cell, kept in self._cells.items()
        )


def _fit(cells: Cells) -> tuple[DecodeCurve, float]:
    return fit_windows([window for cell in cells.values() for _, window in cell])


def _longer(window: Window, factor: float) -> Window:
    return window._replace(seconds=window.seconds * factor)


def slowness(curve: DecodeCurve, windows: Sequence[Window]) -> float:
    """Return how many times as long as by the curve the windows took, as the median."""
    return float(np.median([window.seconds for window in windows] / predict_s(curve, windows)))


def predict_s(curve: DecodeCurve, windows: Sequence[Window]) -> Floats:
    """Return the seconds of each window by a curve."""
    token_s = 1.0 / curve.prefill_tokens_per_s if curve.prefill_tokens_per_s else 0.0
    terms = (
        curve.base_s,
        curve.per_sequence_s,
        curve.per_kv_token_s,
        token_s,
        curve.prefill_pair_s,
    )
    seconds: Floats = np.array(windows)[:, :-1] @ np.array(terms)
    return seconds


def fit_windows(windows: Sequence[Window]) -> tuple[DecodeCurve, float]:
    """Return the curve with the least relative errors, where windows that are far off hardly count;
    and the mean error, at most 1 for a window. Reading a prompt is never left to its pairs of
    tokens alone: windows that other programs disturb may look so, and short prompts would seem to
    cost nothing."""
    rows = np.array(windows)
    matrix = rows[:, :-1] / rows[:, -1:]
    weights = np.ones(len(rows))
    for _ in range(ROUNDS):
        terms = non_negative_least_squares(matrix * weights[:, None], weights)
        if terms[PAIRS] > 0.0 and terms[NEW_TOKENS] == 0.0:
            without_pairs = matrix * weights[:, None]
            without_pairs[:, PAIRS] = 0.0
            terms = non_negative_least_squares(without_pairs, weights)
        errors = np.abs(matrix @ terms - 1.0)
        weights = 1.0 / np.hypot(
            1.0, errors / (OUTLIER * max(float(np.median(errors)), LEAST_ERROR))
        )
    base_s, per_sequence_s, per_kv_token_s, token_s, pair_s = terms.tolist()
    curve = DecodeCurve(
        base_s if base_s + per_sequence_s > LEAST_BASE_S else LEAST_BASE_S,
        per_sequence_s,
        per_kv_token_s,
        1.0 / max(token_s, LEAST_PREFILL_TOKEN_S),
        pair_s,
    )
    return curve, float(np.minimum(errors, 1.0).mean())


def non_negative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """Return the argmin over x >= 0 of |matrix x - target|: matrix (rows, columns), target (rows,),
    result (columns,).

    Lawson and Hanson's active set, on columns scaled to norm 1. Raises ValueError for values that
    are not finite.
    """
    if not (np.isfinite(matrix).all() and np.isfinite(target).all()):
        raise ValueError("least squares of values that are not finite")
    norms = np.linalg.norm(matrix, axis=0)
    scale = np.where(norms > 0, norms, 1.0)
    scaled = matrix / scale
    slack = SLACK * float(np.linalg.norm(target))
    solution = np.zeros(matrix.shape[1])
    free = np.zeros(matrix.shape[1], dtype=bool)
    for _ in range(3 * matrix.shape[1]):  # ends long before where columns are not nearly parallel
        gradient = np.where(free, 0.0, scaled.T @ (target - scaled @ solution))
        if not (gradient > slack).any():
            break
        # Of columns that help alike, mostly parallel ones, the first: rounding must not choose.
        free[int(np.argmax(gradient >= gradient.max() - slack))] = True
        solution = _solve_free(scaled, target, solution, free)
    return np.asarray(np.where(solution > slack, solution, 0.0) / scale)


def _solve_free(matrix: Floats, target: Floats, solution: Floats, free: Flags) -> Floats:
    """Move `solution` to the least squares of the free columns; a column that would turn negative
    on the way is fixed at zero."""
    while True:
        aim = np.zeros_like(solution)
        aim[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        below = free & (aim <= 0.0)
        if not below.any():
            return aim
        room = np.full_like(solution, np.inf)
        room[below] = solution[below] / (solution[below] - aim[below] + np.finfo(float).tiny)
        first = int(np.argmin(room))
        solution = solution + min(float(room[first]), 1.0) * (aim - solution)
        free[first] = False
        solution[~free] = 0.0


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
        """Suspect the engine, as a probe of it failed, unless it sends tokens of other requests:
        then their silence counts (`judge`)."""
        self.suspected = self.suspected or not self._decoding

    def trust(self) -> None:
        """Suspect the engine no more, as a probe got all of its tokens."""
        self.suspected = False

    def is_probe_due(self, now: float) -> bool:
        """Return whether to request a token from the engine: it has nothing to do, and no token has
        come for a while."""
        rest_s = SUSPECT_PROBE_S if self.suspected else IDLE_PROBE_S
        return self._is_idle and not self._loads and now - self._since_s >= rest_s

    @property
    def _is_idle(self) -> bool:
        return not self._waiting and not self._decoding

"""Watch the engine: whether it answers and makes progress, what it is (its profile), and which
weights it serves.

An engine that refuses connections is lost at once; one that is slow to answer only after several
polls, because a CPU engine in a long prefill answers late. One that answers but makes no progress
(`treadle_core.engine_queue.pace`) is lost too, until it generates again: SGLang answers polls
without the process that generates.
"""

import asyncio
import dataclasses
import math
import time
from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from treadle_core.engine_queue.pace import EngineProgress, EngineWork
from treadle_core.model import INCOMPLETE, DecodeCurve
from treadle_runtime.errors import FailedPrecondition, Unavailable
from treadle_runtime.fields import require
from treadle_runtime.http.sglang import (
    INCREMENTAL_FLAG,
    LARGEST_INT32,
    LARGEST_INT64,
    PROTOCOL_ERRORS,
    EngineClient,
    EngineLost,
    EngineRefused,
    as_count,
    as_text,
    end_token_ids,
    protocol_broken,
)

from treadle_sidecar.engine.process import SPARE_REQUESTS

log = structlog.get_logger()

POLL_S = 1.0
# polls in a row without an answer, each as long as EngineClient waits, after which an engine is
# lost
SLOW_POLLS = 3
RETRY_LOST_ENGINE_S = 2.0
GIB = 1024**3
GB = 10**9
# SGLang keeps these below its context length (Scheduler: max_req_len, and num_reserved tokens of
# max_req_input_len).
INPUT_MARGIN_TOKENS = 4
MEMORY = ("weights", "kv_cache", "cuda_graph")  # SGLang's tags of what it can give away
# So an engine names its weights while some of its memory is given away: asleep-<tags with +
# between>:<version>.
ASLEEP = "asleep-"
STREAMING = "incremental_streaming_output"  # the argument in SGLang's /server_info


@dataclass(frozen=True)
class EngineProfile:
    """Profile of a running engine. Sizes in tokens; `vocab_size` 0 and empty `end_token_ids` where
    they are not known."""

    model_path: str
    weight_version: str
    max_input_tokens: int
    max_sequence_tokens: int  # prompt and output together
    kv_tokens: int
    host_kv_tokens: int  # of HiCache's copies in the host's memory, 0 without
    kv_bytes_per_token: int
    slots: int
    page_tokens: int
    tensor_parallel: int
    storage: bool  # HiCache with a storage backend: KV can move
    deterministic: bool  # honours seeds, and dies of min_p together with them
    incremental: bool  # a chunk of a stream has the new tokens alone, not all tokens so far
    tokens_a_chunk: int
    vocab_size: int
    end_token_ids: frozenset[int]
    memory_saver: bool  # it can give memory away
    keeps_weights: bool  # a copy of the weights stays in the host's memory meanwhile
    asleep: frozenset[str] = frozenset()  # of MEMORY

    @property
    def can_run(self) -> bool:
        """Return whether its weights are whole and all of its memory is there."""
        return not self.asleep and not self.weight_version.startswith(INCOMPLETE)

    @property
    def storage_suffixes(self) -> tuple[str, ...]:
        """Return what HiCache's file backend appends to a page's key: for KV by rank, and for KV
        that ranks share (MLA)."""
        name = self.model_path.replace("/", "-")
        return (f"_{name}_0_{self.tensor_parallel}.bin", f"_{name}.bin")

    def require_known(self, field: str, token_ids: "array[int]") -> None:
        """Raise InvalidArgument for an id outside the vocabulary, which would kill the engine."""
        highest, known = max(token_ids, default=0), self.vocab_size
        require(
            not known or highest < known,
            f"{field}.int32_le",
            f"must hold ids below {known}, holds {highest}",
        )


def read_profile(
    server: Mapping[str, Any], model: Mapping[str, Any], vocab_size: int
) -> EngineProfile:
    """Build the profile from what `EngineClient.describe` returns, and from the model's own files
    where they are here.

    Raises EngineRefused for an engine with which no step can run, naming SGLang's argument, and
    EngineLost for answers that SGLang would not give.
    """
    try:
        return _read_profile(server, model, vocab_size)
    except (*PROTOCOL_ERRORS, OSError) as error:  # a path may be no path
        raise protocol_broken("the engine", "/server_info and /model_info", error) from None


def _read_profile(
    server: Mapping[str, Any], model: Mapping[str, Any], vocab_size: int
) -> EngineProfile:
    _require_supported(server, model)
    state = (server.get("internal_states") or [{}])[0]
    memory = state.get("memory_usage") or {}
    kv_tokens = as_count(memory.get("token_capacity") or server.get("max_total_num_tokens") or 0)
    max_input = as_count(server.get("max_req_input_len") or 0, LARGEST_INT32 - INPUT_MARGIN_TOKENS)
    kv_bytes = float(memory.get("kvcache") or 0.0) * GIB / kv_tokens if kv_tokens else 0.0
    slots = (
        state.get("effective_max_running_requests_per_dp")
        or server.get("max_running_requests")
        or 1
    )
    model_path = as_text(model["model_path"])
    weight_version, asleep = read_name(as_text(model["weight_version"]))
    return EngineProfile(
        model_path=model_path,
        weight_version=weight_version,
        max_input_tokens=max_input,
        max_sequence_tokens=max_input + INPUT_MARGIN_TOKENS,
        kv_tokens=kv_tokens,
        host_kv_tokens=_host_kv_tokens(server, kv_tokens, kv_bytes),
        kv_bytes_per_token=as_count(round(kv_bytes)),
        slots=max(as_count(slots) - SPARE_REQUESTS, 1),
        page_tokens=as_count(server.get("page_size") or 1),
        tensor_parallel=as_count(server.get("tp_size") or 1),
        storage=bool(server.get("hicache_storage_backend")),
        deterministic=bool(server.get("enable_deterministic_inference")),
        incremental=bool(server[STREAMING]),
        tokens_a_chunk=as_count(server.get("stream_interval") or 1),
        vocab_size=vocab_size,
        end_token_ids=end_token_ids(
            _model_folder(model_path), tokenizer=not server.get("skip_tokenizer_init")
        ),
        memory_saver=bool(server.get("enable_memory_saver")),
        keeps_weights=bool(server.get("enable_weights_cpu_backup")),
        asleep=asleep,
    )


def read_name(name: str) -> tuple[str, frozenset[str]]:
    """Return the weight version and the sleeping memory that an engine's name for its weights
    contains."""
    if name.startswith(ASLEEP):
        tags, _, version = name.removeprefix(ASLEEP).partition(":")
        asleep = frozenset(tags.split("+"))
        if asleep <= set(MEMORY):
            return version, asleep
    return name, frozenset()


def write_name(weight_version: str, asleep: frozenset[str]) -> str:
    """Return the name that the engine is to give its weights. The engine alone keeps it, so that it
    goes when the engine does."""
    return f"{ASLEEP}{'+'.join(sorted(asleep))}:{weight_version}" if asleep else weight_version


def _require_supported(server: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    if STREAMING not in server:
        raise EngineRefused(
            f"its /server_info does not say how it streams ({STREAMING}); use SGLang 0.5.23, and "
            f"start it with {INCREMENTAL_FLAG}"
        )
    mode = server.get("disaggregation_mode") or "null"
    if mode != "null":
        raise EngineRefused(
            f"it runs with --disaggregation-mode {mode}, which no step can use; start it without"
        )
    if not model.get("is_generation", True):
        raise EngineRefused(
            "its model does not generate; start it with a language model and without --is-embedding"
        )


def _host_kv_tokens(server: Mapping[str, Any], kv_tokens: int, kv_bytes: float) -> int:
    """Return the tokens of the host's copies, which the engine sizes by GB where hicache_size is
    set, else by a ratio of its own KV."""
    if not server.get("enable_hierarchical_cache"):
        return 0
    size_bytes = float(server.get("hicache_size") or 0.0) * GB
    ratio = float(server.get("hicache_ratio") or 0.0)
    return as_count(
        int(size_bytes / kv_bytes if size_bytes and kv_bytes else ratio * kv_tokens), LARGEST_INT64
    )


def _model_folder(model_path: str) -> Path:
    """Return the folder of a local model, or of a hub model in its cache beside the engine; it need
    not exist."""
    folder = Path(model_path)
    if folder.is_dir():
        return folder
    hub = Path.home() / ".cache" / "huggingface" / "hub"
    snapshots = hub / f"models--{model_path.replace('/', '--')}" / "snapshots"
    return max(snapshots.glob("*"), default=folder)


@dataclass(frozen=True)
class EngineNotes:
    """Notes of all requests on the engine, which its client hands in: the observer of
    `treadle_runtime.http.sglang`."""

    work: EngineWork
    """Tokens of the streams, from which the decode curve is measured."""
    progress: EngineProgress
    """Signs that the engine generates."""

    def begin(self, rid: str, context_tokens: int, *, streamed: bool) -> None:
        now = time.monotonic()
        if streamed:
            self.work.begin(rid, context_tokens, now)
        self.progress.begin(rid, context_tokens, now)

    def receive(self, rid: str, new_tokens: int, cached_tokens: int) -> None:
        now = time.monotonic()
        self.progress.note_tokens(rid, now)
        if new_tokens:
            self.work.add(rid, new_tokens, cached_tokens, now)

    def end(self, rid: str) -> None:
        self.progress.end(rid, time.monotonic())
        self.work.end(rid)

    def begin_load(self) -> None:
        self.progress.begin_load()

    def end_load(self) -> None:
        self.progress.end_load(time.monotonic())


class EngineWatch:
    """Watch over one engine. `profile` is None until the engine has answered for the first time; it
    is kept while the engine is away.

    curve: of the engine, None while it is not known. `healthy`: the engine answers, and is not
    suspected. `doubted`: set when a call has found the engine lost; whoever probes it clears that.
    `on_name`: called when the profile has other weights, or other memory that sleeps, before
    anything runs under them.
    """

    def __init__(
        self,
        engine: EngineClient,
        progress: EngineProgress,
        curve: Callable[[], DecodeCurve | None],
    ) -> None:
        self._engine, self._progress, self._curve = engine, progress, curve
        self.profile: EngineProfile | None = None
        self.on_name: Callable[[], None] = lambda: None
        self.answers = False
        self.healthy = False
        self.doubted = asyncio.Event()
        self.probe_problem = ""  # of the last probe
        self.kv_tokens_used = 0
        self._problem = "the engine has not answered yet"
        self._calls: set[asyncio.Timeout] = set()
        self._changed = asyncio.Event()
        self._poll_now = asyncio.Event()
        self._weight_reports = 0
        self._version_told_s = -math.inf  # when a stream last reported it; monotonic

    async def run(self) -> None:
        """Poll the engine until cancelled."""
        missed = 0
        while True:
            self._poll_now.clear()
            try:
                await self._poll()
                missed, self.answers = 0, True
            except EngineRefused as error:  # it runs but is not ready, or cannot be used
                self._note_problem(f"the engine cannot be used: {error}")
                self.answers = False
            except EngineLost as error:
                missed += 1
                if error.is_gone or (missed >= SLOW_POLLS and not self._progress.is_loading):
                    self._note_problem(str(error))
                    self.answers = False
            self.judge()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._poll_now.wait()

    def judge(self) -> None:
        """Decide whether the engine is healthy; where it no longer is, end the calls under way."""
        now = time.monotonic()
        if self.answers and self._progress.judge(self._curve(), now):
            log.warning("the engine is silent", silent_s=round(self._progress.silent_s(now), 1))
        healthy = self.answers and not self._progress.suspected
        if healthy == self.healthy:
            return
        self.healthy = healthy
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if not healthy:
            log.warning("engine is lost", problem=self.problem)
            for call in tuple(self._calls):
                call.reschedule(0.0)

    @property
    def problem(self) -> str:
        """Return why the engine is not healthy."""
        if not self.answers:
            return self._problem
        why = f": {self.probe_problem}" if self.probe_problem else ""
        return f"the engine answers but makes no progress{why}"

    def set_name(self, name: str) -> None:
        """Record how the engine names its weights (`read_name`)."""
        self._weight_reports += 1
        profile = self.profile
        version, asleep = read_name(name)
        if profile is not None and (version, asleep) != (profile.weight_version, profile.asleep):
            self.profile = dataclasses.replace(profile, weight_version=version, asleep=asleep)
            self.on_name()

    def hear_weight_version(self, weight_version: str, now: float) -> None:
        """Record the version that a stream reports; meanwhile no poll requests it. now: monotonic
        seconds."""
        self._version_told_s = now
        self.set_name(weight_version)

    def require_profile(self) -> EngineProfile:
        """Return the profile of a healthy engine. Raises Unavailable ENGINE_LOST."""
        if self.profile is None or not self.healthy:
            raise engine_lost(self.problem)
        return self.profile

    @asynccontextmanager
    async def calling(
        self, what: str, reason: str = "ENGINE_REFUSED", **metadata: object
    ) -> AsyncIterator[None]:
        """Call the engine within the block, which ends when the engine is lost. Raises what an RPC
        answers where the engine refuses `what` (FailedPrecondition) or is lost (Unavailable)."""
        try:
            async with asyncio.timeout(None) as call:
                self._calls.add(call)
                try:
                    yield
                finally:
                    self._calls.discard(call)
        except TimeoutError as error:
            raise engine_lost(self.problem) from error
        except EngineRefused as error:
            raise FailedPrecondition(
                reason, f"the engine refused {what}: {error}", **metadata
            ) from error
        except EngineLost as error:
            self._poll_now.set()  # because a stream broke
            if error.loss != "garbled":  # a chunk that cannot be read says nothing of the others
                self.doubted.set()
            raise engine_lost(str(error)) from error

    async def until_healthy(self) -> EngineProfile:
        """Wait until the engine is healthy, and return its profile."""
        while not self.healthy or self.profile is None:
            await self._changed.wait()
        return self.profile

    async def until_lost(self) -> None:
        """Wait until the engine is lost."""
        while self.healthy:
            await self._changed.wait()

    async def _poll(self) -> None:
        if not self.answers or self.profile is None:
            self.profile = read_profile(*await self._engine.describe())
            self.on_name()
            self._engine.incremental = self.profile.incremental
            self._engine.vocab_size = self.profile.vocab_size
            self._progress.tokens_a_chunk = self.profile.tokens_a_chunk
            log.info("engine answers", profile=self.profile)
            if not self.profile.incremental:
                log.warning(
                    f"long outputs take less of the processor with SGLang's {INCREMENTAL_FLAG}"
                )
        elif time.monotonic() - self._version_told_s > POLL_S:
            reports = self._weight_reports
            name = await self._engine.name_of_weights()
            if reports == self._weight_reports:  # else an update has overtaken the answer
                self.set_name(name)
        self.kv_tokens_used, unread_tokens = await self._engine.kv_tokens()
        self._progress.note_unread(unread_tokens, time.monotonic())

    def _note_problem(self, problem: str) -> None:
        if problem != self._problem:
            log.warning(problem)
        self._problem = problem


def engine_lost(message: str) -> Unavailable:
    """Return the error of every RPC that needs the engine while it is lost."""
    return Unavailable("ENGINE_LOST", message, retry_after_s=RETRY_LOST_ENGINE_S)

"""Check SGLang servers that somebody else started: whether a sidecar can stand beside them, and
what they lose as they are.

A server is only read (/server_info, /model_info). What the sidecar itself refuses is a problem here
too, because the same function reads the answers.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from treadle_runtime.config import is_loopback
from treadle_runtime.http.sglang import (
    INCREMENTAL_FLAG,
    EngineClient,
    EngineLost,
    EngineRefused,
    Limits,
    open_session,
)
from treadle_sidecar.engine.process import PAGE_TOKENS, SPARE_REQUESTS
from treadle_sidecar.engine.watch import EngineProfile, read_profile

from treadle_cli.doctor.findings import OK, PROBLEM, WARNING, Finding
from treadle_cli.exits import UsageProblem
from treadle_cli.mesh.engines import KEY_VARIABLE

TESTED_VERSION = "0.5.23"  # of SGLang
ANSWER_S = 10.0  # a CPU engine in a long prefill answers late
NEEDS_KEY = (401, 403)
STORAGE_FLAGS = (
    f"--page-size {PAGE_TOKENS} --enable-hierarchical-cache --hicache-write-policy write_through "
    "--hicache-storage-prefetch-policy wait_complete --hicache-storage-backend file"
)
STORAGE_FOLDER = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
# What two engines must have in common so that one can read the KV that the other has stored.
SHARED = {
    "page_size": "--page-size",
    "tp_size": "--tp-size",
    "dtype": "--dtype",
    "kv_cache_dtype": "--kv-cache-dtype",
}


@dataclass(frozen=True)
class Server:
    """One server and its answers. problem: why nothing is known of it; empty: `server` and `model`
    are its answers."""

    url: str
    server: Mapping[str, Any]
    model: Mapping[str, Any]
    problem: str = ""
    do: str = ""

    def name(self, host: str) -> str:
        """Return its id in a mesh: host and port. host: name of this machine in that mesh, for a
        server on the loopback interface, so that servers of two machines have two names."""
        parts = urlsplit(self.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        named = host if is_loopback(f"{parts.hostname}:{port}") else str(parts.hostname)
        return f"{named}-{port}".replace(":", ".")


def clean_urls(urls: Sequence[str]) -> list[str]:
    """Return the URLs without a slash at the end, each once. Raises UsageProblem."""
    cleaned = []
    for given in urls:
        url = (given if "://" in given else f"http://{given}").rstrip("/")
        try:
            parts = urlsplit(url)
            valid = (
                parts.scheme in ("http", "https")
                and bool(parts.hostname)
                and parts.port != 0
                and not parts.path
            )
        except ValueError:
            valid = False
        if not valid:
            raise UsageProblem(
                f"{given}: must be the URL of a SGLang server, e.g. http://127.0.0.1:30000"
            )
        if url in cleaned:
            raise UsageProblem(f"{given}: is given twice")
        cleaned.append(url)
    return cleaned


async def read_servers(urls: Sequence[str]) -> list[Server]:
    """Read all servers at once, and return them in the order of the URLs."""
    limits = Limits(connect_s=ANSWER_S, answer_s=ANSWER_S)
    async with open_session(os.environ.get(KEY_VARIABLE, "")) as session:
        clients = [EngineClient(url, session, limits) for url in urls]
        return list(await asyncio.gather(*map(_read, clients)))


async def _read(client: EngineClient) -> Server:
    answers: list[Mapping[str, Any]] = []
    for path, question in (
        ("/server_info", client.server_info),
        ("/model_info", client.model_info),
    ):
        try:
            answers.append(await question())
        except (EngineLost, EngineRefused) as error:
            return Server(client.url, {}, {}, *_explain(path, error))
    return Server(client.url, server=answers[0], model=answers[1])


def _explain(path: str, error: EngineLost | EngineRefused) -> tuple[str, str]:
    """Return why a server has not answered, and what to do."""
    if isinstance(error, EngineRefused):
        if error.status in NEEDS_KEY:
            return ("it asks for an API key", f"Set {KEY_VARIABLE} to that of its --api-key.")
        return (
            f"{path} answers HTTP {error.status}, so it is no SGLang {TESTED_VERSION}",
            f"Give the URL of a server of SGLang {TESTED_VERSION}, not of a router.",
        )
    if error.loss == "silent":
        return (
            f"{path} has no answer within {ANSWER_S:.0f} s",
            "It hangs, or is busy: look at its log, and try again.",
        )
    if error.loss == "garbled":
        return (
            f"{path} answers no JSON object",
            f"Give the URL of a server of SGLang {TESTED_VERSION}.",
        )
    cause = error.__cause__
    return f"does not answer: {str(cause) or type(cause).__name__}", "Is the server up at this URL?"


def check_servers(servers: Sequence[Server]) -> Iterator[Finding]:
    """Yield the findings of each server, then those of what they have in common."""
    for server in servers:
        yield from check_server(server)
    known = [server for server in servers if not server.problem]
    if len(known) > 1:
        yield from _compare(known)


def check_server(server: Server) -> Iterator[Finding]:
    """Yield findings of what a mesh can do with one server."""
    found = partial(Finding, server.url)
    if server.problem:
        yield found("answers", PROBLEM, server.problem, server.do)
        return
    try:
        profile = read_profile(server.server, server.model, 0)
    except (EngineRefused, EngineLost) as error:
        yield found("engine", PROBLEM, str(error), "A sidecar registers no such engine.")
        return
    yield found("engine", OK, _describe(server, profile))
    for check in (
        _radix_cache,
        _version,
        _slots,
        _streaming,
        _storage,
        _cache_report,
        _data_parallel,
    ):
        yield check(server.server, profile, found)


def _describe(server: Server, profile: EngineProfile) -> str:
    seeds = (
        "honoured" if profile.deterministic else "not honoured (--enable-deterministic-inference)"
    )
    return (
        f"{profile.model_path}, weights {profile.weight_version!r}, {profile.kv_tokens:,} KV "
        f"tokens, sequences of up to {profile.max_sequence_tokens:,}, TP "
        f"{profile.tensor_parallel}; sampling seeds are {seeds}"
    )


Found = Callable[..., Finding]


def _radix_cache(server: Mapping[str, Any], profile: EngineProfile, found: Found) -> Finding:
    if server.get("disable_radix_cache"):
        do = (
            "Start it without --disable-radix-cache: each turn and each resumed step would compute "
            "its whole context again, which costs more than any schedule wins."
        )
        return found("radix cache", PROBLEM, "is off", do)
    return found("radix cache", OK, "is on: a next turn computes only what is new")


def _version(server: Mapping[str, Any], profile: EngineProfile, found: Found) -> Finding:
    version = str(server.get("version") or "unknown")
    if version == TESTED_VERSION:
        return found("version", OK, f"SGLang {version}")
    do = (
        f"The mesh is tested with {TESTED_VERSION}: install that, or try your own loop on one "
        "engine first."
    )
    return found("version", WARNING, f"SGLang {version}", do)


def _slots(server: Mapping[str, Any], profile: EngineProfile, found: Found) -> Finding:
    says = f"{profile.slots} steps at once, {SPARE_REQUESTS} requests are left for moves"
    if server.get("max_running_requests"):
        return found("slots", OK, says)
    do = (
        "--max-running-requests N makes priorities bite: of more steps than N, the longest "
        "trajectories run first. Without it SGLang admits as many as its KV holds. --slots of "
        "treadle attach does the same in front of it."
    )
    return found("slots", WARNING, f"{says}; no limit is set", do)


def _streaming(server: Mapping[str, Any], profile: EngineProfile, found: Found) -> Finding:
    if profile.incremental:
        return found("streaming", OK, "each chunk has the new tokens alone")
    do = (
        f"Add {INCREMENTAL_FLAG}: else each chunk repeats all tokens so far, which long outputs "
        "pay for."
    )
    return found("streaming", WARNING, "each chunk has all tokens so far", do)


def _storage(server: Mapping[str, Any], profile: EngineProfile, found: Found) -> Finding:
    if not profile.storage:
        do = (
            "A move computes the context again on the other engine. To move KV instead, add "
            f"{STORAGE_FLAGS} and {STORAGE_FOLDER}=FOLDER, the same for all engines, and give "
            f"treadle attach --kv-folder FOLDER."
        )
        return found("moves", WARNING, "no shared storage of KV", do)
    wrong = {
        "--hicache-write-policy": (server.get("hicache_write_policy"), "write_through"),
        "--hicache-storage-prefetch-policy": (
            server.get("hicache_storage_prefetch_policy"),
            "wait_complete",
        ),
    }
    other = [
        f"{flag} {best} (it is {given})"
        for flag, (given, best) in wrong.items()
        if given not in (None, best)
    ]
    if other:
        why = "else a move finds less than the whole context in storage, and the rest is computed"
        return found(
            "moves",
            WARNING,
            f"through {server['hicache_storage_backend']}",
            f"Set {', '.join(other)}: {why}.",
        )
    return found("moves", OK, f"KV goes through {server['hicache_storage_backend']}")


def _cache_report(server: Mapping[str, Any], profile: EngineProfile, found: Found) -> Finding:
    if server.get("enable_cache_report"):
        return found("cache report", OK, "answers say how many prompt tokens were cached")
    do = (
        "Add --enable-cache-report: usage.prompt_tokens_details of OpenAI answers is missing "
        "without it."
    )
    return found("cache report", WARNING, "OpenAI answers do not say what was cached", do)


def _data_parallel(server: Mapping[str, Any], profile: EngineProfile, found: Found) -> Finding:
    ranks = server.get("dp_size") or 1
    if ranks == 1:
        return found("data parallel", OK, "one replica a server")
    do = (
        "Start a server for each replica, without --dp-size: SGLang spreads the turns of a "
        "trajectory over its ranks, "
        "whose caches are apart, and the mesh sees one engine where there are several."
    )
    return found("data parallel", WARNING, f"{ranks} ranks in one server", do)


def _compare(servers: Sequence[Server]) -> Iterator[Finding]:
    """Yield findings of differences: engines of one mesh serve the same model and weights, and read
    each other's KV."""
    found = partial(Finding, "all servers")
    one_model = (
        "A trajectory may go on at any engine of a mesh: attach only servers of one model together."
    )
    one_version = (
        "A trajectory that moves between them has spans of both versions: load the same "
        "weights first."
    )
    checks = (
        ("model", "model_path", PROBLEM, one_model),
        ("weights", "weight_version", WARNING, one_version),
    )
    for check, key, level, do in checks:
        named = {server.url: str(server.model.get(key)) for server in servers}
        if len(set(named.values())) == 1:
            yield found(check, OK, f"all serve {next(iter(named.values()))!r}")
        else:
            yield found(
                check, level, ", ".join(f"{url}: {value}" for url, value in named.items()), do
            )
    differ = [
        flag
        for key, flag in SHARED.items()
        if len({str(server.server.get(key)) for server in servers}) > 1
    ]
    if not differ:
        yield found("KV", OK, "is of one kind")
    elif any(server.server.get("hicache_storage_backend") for server in servers):
        do = "Give all servers the same: a move between different ones computes the context again."
        yield found("KV", WARNING, f"differs in {', '.join(differ)}", do)

"""Check a mesh that runs: who answers, how long certificates are good, whether clocks agree, and
its engines.

Nothing is changed. A check that needs an identity which this process lacks reports that.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc
from treadle.certificates import CERTIFICATE, FOLDER_VARIABLE, Certificates, open_channel
from treadle.errors import TreadleError
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle_runtime.probe import NATS, NOT_SERVING, SERVING

from treadle_cli.doctor.findings import OK, PROBLEM, WARNING, Finding
from treadle_cli.exits import UsageProblem
from treadle_cli.mesh.scheduler import own_certificates, reach_scheduler

if TYPE_CHECKING:
    from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

ASK_S = 5.0
SECONDS_A_DAY = 86_400.0
SOON_DAYS = 14.0  # a certificate that ends within these is due
LATE_S = 15.0  # how old a load may be: leases of 10 s are renewed at a third of them
EARLY_S = 2.0  # how far a clock may be ahead of this machine's
START = "Start one with treadle up or treadle attach URL, or give the address that they print."
RESTART_NATS = (
    "Is nats-server up? Where its disk was full it stores nothing more, also once there is space: "
    "free some, then restart nats-server."
)
IDENTIFY = f"Set {FOLDER_VARIABLE} to the folder of an operator's certificate of that mesh."
MISSING = {  # what a mesh does without a service
    "tools": "clients run their tools themselves",
    "rollout": "no groups, shaping or sample buffer",
    "predictor": "lengths are guessed from siblings alone",
    "placement": "trajectories are placed by rule, and not by plan",
    "migrator": "no trajectory moves",
}


async def check_mesh(addresses: str) -> list[Finding]:
    """Return the findings of the mesh whose scheduler is at `addresses` (host:port, with commas
    between several)."""
    subject = f"mesh at {addresses}"
    found = partial(Finding, subject)
    try:
        certificates = own_certificates()
    except UsageProblem as problem:
        return [found("certificate", PROBLEM, str(problem), IDENTIFY)]
    # A scheduler whose NATS does not answer refuses all calls but that of its health.
    nats = await _nats(subject, _schedulers(addresses), certificates)
    try:
        async with reach_scheduler(addresses) as stub:
            return [found("scheduler", OK, "serves"), *await _look(stub, addresses, certificates)]
    except UsageProblem as problem:
        return [
            *nats,
            found(
                "scheduler",
                PROBLEM,
                str(problem),
                START if certificates is None else f"{START} {IDENTIFY}",
            ),
        ]
    except TreadleError as error:
        refused = error.code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
        return [
            *nats,
            found(
                "scheduler",
                PROBLEM,
                str(error),
                IDENTIFY if refused else "Look at the scheduler's log.",
            ),
        ]


async def _look(
    stub: SchedulerServiceAsyncStub, addresses: str, certificates: Certificates | None
) -> list[Finding]:
    directory = await stub.GetDirectory(pb.GetDirectoryRequest(), timeout=ASK_S)
    engines = list((await stub.ListEngines(pb.ListEnginesRequest(), timeout=ASK_S)).engines)
    weights = (await stub.GetWeights(pb.GetWeightsRequest(), timeout=ASK_S)).weights
    services = {name: str(getattr(directory, f"{name}_address")) for name in MISSING}
    servers = _schedulers(addresses)
    servers += [(name, address) for name, address in services.items() if address]
    servers += [("sidecar", str(engine.info.address)) for engine in engines]
    healths = await asyncio.gather(
        *[_health(name, address, certificates) for name, address in servers]
    )
    subject = f"mesh at {addresses}"
    own = [] if certificates is None else [_own_certificate(subject, certificates)]
    dated = [] if certificates is None else await _certificates(subject, servers, certificates)
    return [
        *_services(subject, servers, healths, services),
        *await _nats(subject, servers, certificates),
        *own,
        *dated,
        *_clocks(subject, engines, time.time()),
        *_engines(subject, engines, weights),
    ]


def _schedulers(addresses: str) -> list[tuple[str, str]]:
    return [("scheduler", each.strip()) for each in addresses.split(",")]


async def _nats(
    subject: str, servers: Sequence[tuple[str, str]], certificates: Certificates | None
) -> list[Finding]:
    """Return one finding of whether NATS answers those servers that use it; none where no server
    says so."""
    ask = [_health(name, address, certificates, NATS) for name, address in servers]
    healths = dict(zip(servers, await asyncio.gather(*ask), strict=True))
    away = [
        f"{name} ({address})" for (name, address), said in healths.items() if said == NOT_SERVING
    ]
    if away:
        says = f"NATS does not answer, or does not store, for {', '.join(away)}"
        return [Finding(subject, "NATS", PROBLEM, says, RESTART_NATS)]
    if SERVING in healths.values():
        return [Finding(subject, "NATS", OK, "answers and stores")]
    return []


async def _health(
    service: str, address: str, certificates: Certificates | None, of: str = ""
) -> str:
    """Return SERVING, another status, or why there is none. of: a name under which a server reports
    health; empty: the server itself."""
    async with open_channel(address, service, certificates) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=of), timeout=ASK_S)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _services(
    subject: str,
    servers: Sequence[tuple[str, str]],
    healths: Sequence[str],
    services: dict[str, str],
) -> Iterator[Finding]:
    serving = [
        (name, address)
        for (name, address), health in zip(servers, healths, strict=True)
        if health == "SERVING"
    ]
    yield Finding(subject, "services", OK, f"{len(serving)} of {len(servers)} processes serve")
    leads = any(name == "scheduler" for name, _ in serving)
    for (name, address), health in zip(servers, healths, strict=True):
        if health == "SERVING":
            continue
        if name == "scheduler" and leads and health == "NOT_SERVING":
            yield Finding(subject, name, OK, f"{address} stands by")
            continue
        yield Finding(
            subject, name, PROBLEM, f"{address}: {health}", "Look at its log, and start it again."
        )
    for name, address in services.items():
        if not address:
            do = (
                f"Without it: {MISSING[name]}. Name it in TREADLE_SCHEDULER_{name.upper()} of "
                "the scheduler."
            )
            yield Finding(subject, name, WARNING, "the scheduler names none", do)


def _own_certificate(subject: str, certificates: Certificates) -> Finding:
    file = Path(certificates.folder) / CERTIFICATE
    until = x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
    return _dated(
        subject, f"certificate {file}", (until - datetime.now(UTC)).total_seconds() / SECONDS_A_DAY
    )


async def _certificates(
    subject: str, servers: Sequence[tuple[str, str]], certificates: Certificates
) -> list[Finding]:
    """Return the findings of the servers' certificates, by a handshake with each; those that end
    later than SOON_DAYS are one finding."""
    days = await asyncio.gather(
        *[_days_left(name, address, certificates) for name, address in servers]
    )
    known = {
        f"certificate of {name} {at}": left
        for (name, at), left in zip(servers, days, strict=True)
        if left is not None
    }
    if not known:
        return []
    due = [_dated(subject, name, left) for name, left in known.items() if left < SOON_DAYS]
    return due or [_dated(subject, "certificates of services", min(known.values()))]


async def _days_left(service: str, address: str, certificates: Certificates) -> float | None:
    """Return the days until the certificate of a server ends; None where there is no handshake,
    which the check of its health reports."""
    try:
        async with asyncio.timeout(ASK_S):
            _, writer = await certificates.open_tls(address, service)
    except (OSError, TimeoutError):  # SSLError is an OSError
        return None
    peer = writer.get_extra_info("peercert")
    writer.close()
    return (ssl.cert_time_to_seconds(peer["notAfter"]) - time.time()) / SECONDS_A_DAY


def _dated(subject: str, check: str, days: float) -> Finding:
    if days >= SOON_DAYS:
        return Finding(subject, check, OK, f"good for {days:.0f} days")
    do = "Make new ones with treadle certs FOLDER, or with your authority: nothing has to restart."
    return Finding(subject, check, PROBLEM if days < 0 else WARNING, f"ends in {days:.1f} days", do)


def _clocks(
    subject: str, engines: Sequence[pb.RegisteredEngine], now_s: float
) -> Iterator[Finding]:
    """Yield findings of the clocks. A load carries its time by the scheduler's clock, and how far
    the clock of its sidecar's machine is ahead of that."""
    ages = {
        str(engine.info.engine_id): now_s - engine.load.measured_at.ToNanoseconds() / 1e9
        for engine in engines
        if engine.load.HasField("measured_at")
    }
    apart = {name: age for name, age in ages.items() if not -EARLY_S <= age <= LATE_S}
    skews = {str(engine.info.engine_id): engine.load.clock_ahead_s for engine in engines}
    skews = {name: skew_s for name, skew_s in skews.items() if abs(skew_s) > EARLY_S}
    for name, skew_s in skews.items():
        says = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the scheduler's"
        do = "Set the clocks by NTP. Steps run all the same; certificates and logs follow clocks."
        yield Finding(subject, "clocks", WARNING, f"{name}: its machine's clock is {says}", do)
    do = (
        "Set the clocks by NTP: deadlines and certificates follow them. A sidecar that hangs "
        "looks the same."
    )
    for name, age in apart.items():
        ahead = "ahead of" if age < 0 else "behind"
        yield Finding(
            subject,
            "clocks",
            WARNING,
            f"{name}: its load is {abs(age):.0f} s {ahead} this machine's clock",
            do,
        )
    if ages and not apart and not skews:
        yield Finding(subject, "clocks", OK, f"loads are {max(ages.values()):.1f} s old at most")


def _engines(
    subject: str, engines: Sequence[pb.RegisteredEngine], weights: pb.Weights
) -> Iterator[Finding]:
    if not engines:
        yield Finding(
            subject,
            "engines",
            PROBLEM,
            "none is registered",
            "Add some: treadle attach URL --scheduler ADDRESS --nats-url NATS.",
        )
        return
    slots = sum(engine.info.slot_limit for engine in engines)
    yield Finding(subject, "engines", OK, f"{len(engines)} with {slots} slots")
    for engine in engines:
        name, load = engine.info.engine_id, engine.load
        if load.HasField("measured_at") and not load.engine_healthy:
            do = "Look at the engine's log; its trajectories go on elsewhere."
            yield Finding(subject, name, PROBLEM, "does not generate", do)
        if load.paused:
            yield Finding(
                subject,
                name,
                WARNING,
                "is paused",
                "Its steps wait until whoever paused it resumes it.",
            )
        if engine.draining:
            yield Finding(
                subject, name, WARNING, "is drained", f"Use it again: treadle drain {name} --undo."
            )
        if load.asleep_tags:
            says = f"has given memory away: {', '.join(load.asleep_tags)}"
            yield Finding(
                subject, name, WARNING, says, "Its steps wait until the trainer wakes it."
            )
        if not engine.info.HasField("decode_curve"):
            do = (
                "Plans assume one: let the engine idle for some seconds, so that the sidecar can "
                "measure it."
            )
            yield Finding(subject, name, WARNING, "has no decode curve yet", do)
    versions = {str(engine.load.weight_version or engine.info.weight_version) for engine in engines}
    models = {str(engine.info.model) for engine in engines}
    if len(models) > 1:
        do = "One mesh serves one model: run a mesh for each."
        yield Finding(subject, "model", PROBLEM, f"engines serve {', '.join(sorted(models))}", do)
    behind = [
        each
        for each in weights.engines
        if each.state not in (pb.WEIGHTS_STATE_CURRENT, pb.WEIGHTS_STATE_UNSPECIFIED)
    ]
    if weights.weight_version and behind:
        for each in behind:
            failed = each.state == pb.WEIGHTS_STATE_FAILED
            says = (
                f"{each.engine_id} serves {each.weight_version!r}, and "
                f"{weights.weight_version!r} is wanted"
            )
            do = each.error if failed else "It loads them, or waits for the trainer's push."
            yield Finding(subject, "weights", PROBLEM if failed else WARNING, says, do)
    elif len(versions) > 1:
        do = (
            "Trajectories that move have spans of several versions: set one with "
            "Client.update_weights or push it."
        )
        yield Finding(
            subject, "weights", WARNING, f"engines serve {', '.join(sorted(versions))}", do
        )
    else:
        yield Finding(subject, "weights", OK, f"all serve {next(iter(versions))!r}")

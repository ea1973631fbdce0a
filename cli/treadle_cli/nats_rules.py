"""Configure a NATS server that knows each service by its certificate, and what each may write and
read.

A service is a user, by the DNS name in its certificate. It publishes the facts of its own kinds,
keeps its own buckets, and reads answers under its own inbox; nothing else.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from treadle.certificates import AUTHORITY, CERTIFICATE, KEY
from treadle_runtime.facts import STREAM, SUBJECT_ROOT

from treadle_cli.authority import RESOURCES_NAME

PUBLISHES = {
    "scheduler": (
        *("trajectory-opened", "trajectory-closed", "trajectory-predicted"),
        *("engine-joined", "engine-lost", "plan-made"),
    ),
    "sidecar": (
        "step-queued",
        "step-started",
        "step-preempted",
        "step-finished",
        "weights-updated",
    ),
    "tools": ("tool-started", "tool-finished", "reward-ended"),
    "migrator": ("migration-ended",),
    "rollout": ("group-settled",),
}
HEARS_FACTS = frozenset({"scheduler", "predictor", "tools", "rollout", "console"})
BUCKETS = {
    "scheduler": ("treadle_trajectories",),
    "predictor": ("TREADLE_PREDICTOR_HISTORY",),
    "placement": (),
    "migrator": ("treadle-migrations",),
    "tools": ("treadle-tools-gpus", "treadle-tools-rewards"),
    "rollout": ("treadle-rollout-log", "treadle-rollout-payload", "treadle-rollout-history"),
    "gateway": (),
    "console": (),
    "sidecar": (),  # one for each engine: all but those of `_of_others`
}


def nats_config(certificate: Path, *, in_pod: bool = False) -> str:
    """Return the configuration of a server that speaks TLS alone, from the first byte on.
    certificate: the folder of its own. in_pod: with what one in Kubernetes needs too, where several
    may be a cluster."""
    files = {"cert_file": CERTIFICATE, "key_file": KEY, "ca_file": AUTHORITY}
    lines = [f"  {name}: {json.dumps(str(certificate / file))}" for name, file in files.items()]
    users = [f"  {json.dumps(user)}" for user in _users()]
    tls = ["tls {", *lines, "  verify_and_map: true", "  handshake_first: true", "}"]
    pod = (
        ['http: "127.0.0.1:8222"', "cluster { tls {", *lines, "  verify: true", "} }"]
        if in_pod
        else []
    )
    return "\n".join([*tls, *pod, "authorization {", "users: [", *users, "]", "}", ""])


def _users() -> Iterator[dict[str, object]]:
    for service in BUCKETS:
        publish: dict[str, list[str]] = {"allow": [*_facts(service), *_own_buckets(service)]}
        if service == "sidecar":
            publish = {
                "allow": [*_facts(service), "$KV.>", "$JS.API.>", "$JS.ACK.>"],
                "deny": _of_others(service),
            }
        subscribe = [
            f"_INBOX.treadle-{service}.>",
            *(["treadle.deliver.>"] if service in HEARS_FACTS else []),
        ]
        yield {
            "user": f"{service}.treadle",
            "permissions": {"publish": publish, "subscribe": {"allow": subscribe}},
        }
    looks = {"publish": {"deny": [">"]}, "subscribe": {"allow": [f"{SUBJECT_ROOT}.>"]}}
    yield {"user": RESOURCES_NAME, "permissions": looks}  # an operator


def _facts(service: str) -> list[str]:
    """Return the subjects by which a service writes and reads facts, and makes their stream:
    whichever starts first makes it."""
    asks = [f"$JS.API.STREAM.{verb}.{STREAM}" for verb in ("CREATE", "UPDATE", "INFO")]
    verbs = (
        ("CREATE", "DURABLE.CREATE", "INFO", "RESET", "DELETE") if service in HEARS_FACTS else ()
    )
    hears = [
        *(f"$JS.API.CONSUMER.{verb}.{STREAM}.>" for verb in verbs),
        *([f"$JS.ACK.{STREAM}.>"] if verbs else ()),
    ]
    return [*(f"{SUBJECT_ROOT}.{kind}.>" for kind in PUBLISHES.get(service, ())), *asks, *hears]


def _own_buckets(service: str) -> list[str]:
    buckets = (*BUCKETS[service], f"treadle_requests_{service}")
    return [subject for bucket in buckets for subject in _bucket(bucket)]


def _of_others(service: str) -> list[str]:
    others = [subject for other in BUCKETS if other != service for subject in _own_buckets(other)]
    facts = [
        f"{SUBJECT_ROOT}.{kind}.>"
        for other, kinds in PUBLISHES.items()
        if other != service
        for kind in kinds
    ]
    keeps = [f"$JS.API.STREAM.{verb}.{STREAM}" for verb in ("DELETE", "PURGE")]
    return [
        *others,
        *facts,
        *keeps,
        f"$JS.API.STREAM.MSG.DELETE.{STREAM}",
        f"$JS.API.CONSUMER.*.{STREAM}.>",
    ]


def _bucket(bucket: str) -> list[str]:
    """Return the subjects of all that its owner does with a bucket, which is a stream."""
    stream = f"KV_{bucket}"
    return [
        f"$KV.{bucket}.>",
        f"$JS.API.STREAM.*.{stream}",
        f"$JS.API.STREAM.MSG.*.{stream}",
        f"$JS.API.CONSUMER.*.{stream}",
        f"$JS.API.CONSUMER.*.{stream}.>",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.>",
        f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.>",
        f"$JS.API.DIRECT.GET.{stream}",
        f"$JS.API.DIRECT.GET.{stream}.>",
        f"$JS.ACK.{stream}.>",
    ]

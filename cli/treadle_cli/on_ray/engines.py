"""Find the SGLang servers that run inside Ray actors, and where each one is.

A framework names its server actors and gives them a method that returns host and port; a table here
holds those of released frameworks. `__ray_call__` reads inside an actor where it is (node,
placement group, bundle), so the cluster needs no dashboard, and the engine's environment needs no
Treadle.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)
from treadle_runtime.config import is_loopback

from treadle_cli.doctor.servers import clean_urls
from treadle_cli.exits import UsageProblem

ANSWER_S = 10.0  # an actor that is still in its constructor answers later
DEFAULT_METHOD = "get_server_address"
# the resource by which Ray keeps an actor in its bundle
BUNDLE = re.compile(r"bundle_group_(\d+)_")


@dataclass(frozen=True)
class EngineActors:
    """Actors that each run one SGLang server. pattern: a regular expression of their whole names.
    method: returns host and port, "host:port" or a URL. source: where this is defined."""

    pattern: str
    method: str = DEFAULT_METHOD
    source: str = "--engine-actor"

    @classmethod
    def parse(cls, given: str) -> EngineActors:
        """Return the actors of NAME or NAME:METHOD, as --engine-actor takes it. Raises
        UsageProblem."""
        name, _, method = given.partition(":")
        try:
            re.compile(name)
        except re.error as error:
            raise UsageProblem(
                f"--engine-actor {given}: the name is no regular expression: {error}"
            ) from None
        if not name or (":" in given and not method.isidentifier()):
            raise UsageProblem(
                f"--engine-actor {given}: must be NAME or NAME:METHOD, e.g. my_engine_.*:get_url"
            )
        return cls(name, method or DEFAULT_METHOD)


# verl: servers of a replica's first node, which alone answers HTTP; those of reward models and
# teachers have other names. slime names no actor (--engine-url), SkyRL 0.3.0 runs vLLM, and ROLL
# 0.3.0 runs SGLang without HTTP.
KNOWN = (
    EngineActors(
        r"sglang_server_\d+_0",
        "get_server_address",
        "verl 0.9.1, verl/workers/rollout/sglang_rollout/async_sglang_server.py",
    ),
)


@dataclass(frozen=True)
class Place:
    """Node, placement group and bundle of an engine. group: None: it is in none."""

    node_id: str
    group: Any = None
    bundle: int = -1

    @property
    def strategy(self) -> Any:
        """Return the strategy by which Ray puts another actor there, and nowhere else."""
        if self.group is None:
            return NodeAffinitySchedulingStrategy(self.node_id, soft=False)
        return PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=self.bundle
        )


@dataclass(frozen=True)
class Engine:
    """A SGLang server. label: the actor's name, or the URL that an operator gave."""

    label: str
    url: str
    place: Place


@dataclass(frozen=True)
class Found:
    """Engines that one search has found. silent: labels of actors that did not answer. problems: by
    label."""

    engines: Sequence[Engine]
    silent: frozenset[str]
    problems: dict[str, str]


async def find_engines(actors: Sequence[EngineActors], urls: Sequence[str]) -> Found:
    """Request the addresses of all actors of these names, and place the servers at `urls` by the
    addresses of the cluster's nodes."""
    asked = [(name, _ask(name, namespace, method)) for name, namespace, method in _named(actors)]
    answers = await asyncio.gather(*[answer for _, answer in asked], return_exceptions=True)
    engines, silent, problems = list[Engine](), set[str](), dict[str, str]()
    for (name, _), answer in zip(asked, answers, strict=True):
        if isinstance(answer, Engine):
            engines.append(answer)
        elif isinstance(answer, TimeoutError | RayError | ValueError | UsageProblem):
            silent.add(name)
            problems[name] = (
                "does not say its address: "
                f"{' '.join(str(answer).split())[-200:] or 'no answer in time'}"
            )
        elif isinstance(answer, BaseException):
            raise answer
    nodes = {
        node["NodeManagerAddress"]: str(node["NodeID"]) for node in ray.nodes() if node["Alive"]
    }
    for url in urls:
        node_id = await asyncio.to_thread(_node_of, url, nodes)
        if node_id is None:
            problems[url] = (
                f"no node of the cluster has this address: the nodes are {', '.join(sorted(nodes))}"
            )
        else:
            engines.append(Engine(url, url, Place(node_id)))
    return Found(engines, frozenset(silent), problems)


def _named(actors: Sequence[EngineActors]) -> Iterator[tuple[str, str, str]]:
    """Yield name, namespace and method of each actor that runs an engine."""
    for each in ray.util.list_named_actors(all_namespaces=True):
        name = str(each["name"] or "")
        kind = next((kind for kind in actors if re.fullmatch(kind.pattern, name)), None)
        if kind is not None:
            yield name, str(each["namespace"]), kind.method


async def _ask(name: str, namespace: str, method: str) -> Engine:
    async with asyncio.timeout(ANSWER_S):
        actor = ray.get_actor(name, namespace=namespace)
        if not hasattr(actor, method):
            raise UsageProblem(
                f"the actor has no method {method}: --engine-actor {name}:METHOD names another"
            )
        said, (node_id, group, held) = await asyncio.gather(
            getattr(actor, method).remote(), actor.__ray_call__.remote(_say_place)
        )
    return Engine(name, _url_of(said), Place(node_id, group, _bundle(node_id, group, held)))


def _say_place(_: object) -> tuple[str, Any, list[str]]:
    """Return the node, the placement group, and the names of the resources that the actor holds; it
    runs in the engine's actor."""
    import ray

    try:  # Ray's public call leaves out of which bundle a resource is
        held = list(ray._private.worker.global_worker.core_worker.resource_ids())
    except AttributeError:
        held = []
    return ray.get_runtime_context().get_node_id(), ray.util.get_current_placement_group(), held


_say_place.__module__ = (
    "__main__"  # is then pickled with its code, for environments without this package
)


def _bundle(node_id: str, group: Any, held: Sequence[str]) -> int:
    """Return the bundle that the actor holds something of, else one of the group on its node."""
    if group is None:
        return -1
    ours = [int(found[1]) for found in map(BUNDLE.match, held) if found is not None]
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return next((bundle for bundle in (*ours, *nodes) if nodes.get(bundle) == node_id), -1)


def _url_of(said: object) -> str:
    """Return the URL in what a method returned. Raises UsageProblem where it is no address."""
    if isinstance(said, tuple | list) and len(said) == 2:
        host, port = said
        said = f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
    return clean_urls([str(said)])[0]


def _node_of(url: str, nodes: dict[str, str]) -> str | None:
    host = url.partition("://")[2].rpartition(":")[0].strip("[]")
    if is_loopback(f"{host}:0"):  # an address of the node that runs this
        return str(ray.get_runtime_context().get_node_id())
    try:
        return nodes.get(socket.gethostbyname(host))
    except OSError:
        return None

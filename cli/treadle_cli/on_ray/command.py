"""Run `treadle up --ray` and `treadle down --ray`: start a mesh on a Ray cluster, and end it.

The actors are detached: the mesh outlives the command that has started it.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from treadle_cli import exits
from treadle_cli.doctor.findings import Finding, print_alike
from treadle_cli.exits import UsageProblem
from treadle_cli.options import print_json

INSTALL = (
    "Ray is not installed here: pip install 'treadle[ray]', with the version of Ray that "
    "the cluster has"
)
CONNECT_S = 10.0
DRAIN_S = 90.0  # sidecars, services and NATS, one after the other
END_S = 30.0  # after Ray was called to end all actors
PAUSE_S = 0.2


@dataclass(frozen=True)
class RayOptions:
    """Options of `treadle up --ray`. secure: None: with certificates where the cluster has several
    nodes."""

    address: str
    port: int
    secure: bool | None
    slots: int
    kv_folder: Path | None
    actors: Sequence[str]
    urls: Sequence[str]
    cpus: float
    folder: Path | None
    runtime_env: str


def up_on_ray(given: RayOptions, as_json: bool, out: Console) -> None:
    """Start the mesh, or find the one that runs, and print where it is. Raises UsageProblem."""
    from treadle_cli.doctor.servers import clean_urls

    environment = _parse_environment(given.runtime_env)
    with _connected(given.address, environment) as ray:
        from treadle_cli.on_ray.actors import NAMESPACE, ON_HEAD, STEWARD, RayPlan, Steward
        from treadle_cli.on_ray.engines import EngineActors

        nodes = sum(node["Alive"] for node in ray.nodes())
        secure = nodes > 1 if given.secure is None else given.secure
        actors = tuple(map(EngineActors.parse, given.actors))
        folder = given.folder and given.folder.absolute()
        urls = tuple(clean_urls(given.urls))
        alone = nodes == 1 and not secure
        settings = {"TREADLE_SIDECAR_SLOTS": str(given.slots)}
        if given.kv_folder is not None:
            settings["TREADLE_SIDECAR_KV_STORAGE_DIR"] = str(given.kv_folder.absolute())
        plan = RayPlan(given.port, alone, secure, folder, settings, given.cpus, actors, urls)
        options = {
            "name": STEWARD,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
        }
        options |= {"num_cpus": given.cpus, "max_restarts": -1, "resources": ON_HEAD}
        with exits.err.status("starting the mesh"):
            steward = ray.remote(Steward).options(**options).remote(plan)
            problem = _get(ray, steward.until_serving.remote())
            if problem:
                _end_mesh(ray)
                raise UsageProblem(f"the mesh did not start: {problem}")
        mesh = _get(ray, steward.describe.remote())
    if as_json:
        print_json(mesh)
        return
    _show(mesh, given.address, out)


def end_on_ray(address: str) -> list[str]:
    """End all actors of the mesh on a cluster; return their names. Raises UsageProblem."""
    with _connected(address, {}) as ray, exits.err.status("ending the mesh"):
        return _end_mesh(ray)


@contextmanager
def _connected(address: str, runtime_env: Mapping[str, Any]) -> Iterator[Any]:
    """Connect to the cluster as a driver, and yield Ray. Raises UsageProblem."""
    try:
        import ray
        import ray.exceptions  # also where a folder of that name is all that Python finds
    except ModuleNotFoundError:
        raise UsageProblem(INSTALL) from None
    from treadle_cli.on_ray.actors import NAMESPACE

    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdigit():  # Ray tries for minutes
            socket.create_connection((host, int(port)), CONNECT_S).close()
        options = {
            "log_to_driver": False,
            "logging_level": "ERROR",
            "runtime_env": dict(runtime_env),
        }
        ray.init(address, namespace=NAMESPACE, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageProblem(f"--ray {address}: {' '.join(str(error).split())}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _get(ray: Any, answer: Any) -> Any:
    """Return an actor's answer. Raises UsageProblem where the actor cannot run."""
    try:
        return ray.get(answer)
    except ray.exceptions.RayError as error:
        raise UsageProblem(
            f"the actor `treadle` cannot run on the cluster: {str(error).strip()}\nIs treadle "
            "installed on its nodes? "
            'Else give --runtime-env, e.g. \'{"pip": ["treadle[ray]"]}\''
        ) from error


def _end_mesh(ray: Any) -> list[str]:
    """End all actors of the mesh; return their names."""
    from treadle_cli.on_ray.actors import NAMESPACE, STEWARD

    def names() -> list[str]:
        return [
            each["name"]
            for each in ray.util.list_named_actors(all_namespaces=True)
            if each["namespace"] == NAMESPACE
        ]

    ended = names()
    if STEWARD in ended:
        try:
            ray.get(ray.get_actor(STEWARD, namespace=NAMESPACE).stop.remote(), timeout=DRAIN_S)
        except ray.exceptions.RayError as error:
            exits.err.print(f"the mesh did not drain: {error}", highlight=False, markup=False)
    give_up_at = time.monotonic() + END_S
    while left := names():
        for name in left:
            try:
                ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
            except ValueError:
                continue  # it has ended meanwhile
        if time.monotonic() > give_up_at:
            raise UsageProblem(f"Ray still has {', '.join(left)}: run treadle down again")
        time.sleep(PAUSE_S)
    return sorted(ended)


def _parse_environment(given: str) -> dict[str, Any]:
    try:
        found = json.loads(given or "{}")
    except json.JSONDecodeError as error:
        raise UsageProblem(f"--runtime-env: must be a JSON object ({error})") from None
    if not isinstance(found, dict):
        raise UsageProblem(
            '--runtime-env: must be a JSON object, e.g. \'{"pip": ["treadle[ray]"]}\''
        )
    return found


def _show(mesh: Mapping[str, Any], address: str, out: Console) -> None:
    from rich.table import Table

    from treadle_cli.exits import cell

    table = Table("part", "where", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("scheduler", "gateway", "console", "nats"):
        table.add_row(name, cell(mesh[name]))
    for engine_id, engine in mesh["engines"].items():
        where = f"beside actor {engine['actor']}, SGLang at {engine['url']}"
        table.add_row(cell(f"sidecar of {engine_id}"), cell(where))
    out.print(table)
    print_alike([Finding(**each) for each in mesh["findings"]], out)
    for label, reason in mesh["refused"].items():
        out.print(cell(f"✗ {label} has no sidecar: {reason}"), highlight=False)
    if not mesh["engines"]:
        out.print("No engine yet: each one is found within seconds of its start.", highlight=False)
    out.print(
        f"In a job of the cluster: TREADLE_ADDRESS=ray. End it: treadle down --ray {address}",
        highlight=False,
    )

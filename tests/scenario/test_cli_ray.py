"""`treadle up --ray` on a real Ray cluster, beside engines that are Ray actors in a placement
group."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from treadle_cli.certs import make_certificates

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'treadle[ray]'")

from support import other_user as other  # noqa: E402
from support import ray_cluster as cluster  # noqa: E402 - it imports Ray
from support.fake_sglang import expected  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]
COMMAND_S = 300.0
TRAJECTORIES, TURNS = 12, 12
PROMPT = list(range(10, 40))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster."""
    with cluster.ray_cluster() as address:
        yield address


@pytest.fixture
def job(address: str) -> Iterator[cluster.Job]:
    """A framework's, on the cluster."""
    with cluster.driver(address) as job:
        yield job


def treadle(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "treadle_cli", *arguments],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    return done.returncode, done.stdout, " ".join(done.stderr.split())


@pytest.fixture
def up(address: str, job: cluster.Job, tmp_path: Path) -> Iterator[Any]:
    """Start a mesh; it is ended with the test."""

    def start(*options: str) -> dict[str, Any]:
        folder = str(tmp_path / "mesh")
        code, said, errors = treadle(
            "up", "--ray", address, "--port", "0", "--ray-folder", folder, "--json", *options
        )
        assert code == 0, errors
        return json.loads(said)  # type: ignore[no-any-return]

    yield start
    treadle("down", "--ray", address)


def describe() -> dict[str, Any]:
    return ray.get(cluster.mesh_actor("treadle").describe.remote())  # type: ignore[no-any-return]


def test_actors_and_processes_are_killed_in_a_rollout_and_nothing_is_lost(
    address: str, job: cluster.Job, up: Any
) -> None:
    """Two engines in two bundles. While trajectories run, the scheduler's actor is killed, then a
    sidecar's, then the process of NATS, then the actor that keeps the others. Result: Ray starts
    each again, every trajectory has the tokens of an undisturbed engine, and the sidecars stand
    where their engines do."""
    servers = [job.start_server(f"sglang_server_{index}_0", index) for index in range(2)]
    mesh = up()
    assert {engine["actor"] for engine in mesh["engines"].values()} == {
        "sglang_server_0_0",
        "sglang_server_1_0",
    }
    sidecars = {
        engine["actor"]: f"sidecar-{engine_id}" for engine_id, engine in mesh["engines"].items()
    }
    for bundle, server in enumerate(servers):
        engine = f"sglang_server_{bundle}_0"
        assert cluster.place_of(server) == (job.group.id.hex(), bundle)
        assert cluster.place_of(cluster.mesh_actor(sidecars[engine])) == (
            job.group.id.hex(),
            bundle,
        )
    rollout = ray.remote(cluster.Rollout).options(num_cpus=0).remote()
    playing = rollout.play.remote(TRAJECTORIES, TURNS)

    def pace(token_s: float) -> None:
        ray.get([server.take_for_a_token.remote(token_s) for server in servers])

    def kill_once(steps: int, name: str, kill: Any) -> None:
        cluster.until(lambda: ray.get(rollout.count_steps.remote()) >= steps)
        pid = cluster.pid_of(name)
        pace(10 * cluster.TOKEN_S)  # else the rollout may be over before the process is back
        kill(pid)
        cluster.until(lambda: cluster.pid_of(name) not in (0, pid))
        cluster.until(lambda: not psutil.pid_exists(pid))  # it is killed once its actor has ended
        pace(cluster.TOKEN_S)

    kill_once(8, "scheduler", lambda _: ray.kill(cluster.mesh_actor("scheduler"), no_restart=False))
    kill_once(
        30,
        sidecars["sglang_server_0_0"],
        lambda _: ray.kill(cluster.mesh_actor(sidecars["sglang_server_0_0"]), no_restart=False),
    )
    kill_once(60, "nats", lambda pid: os.kill(pid, signal.SIGKILL))
    ray.kill(cluster.mesh_actor("treadle"), no_restart=False)
    assert ray.get(rollout.count_steps.remote()) < TRAJECTORIES * TURNS, (
        "it was over before the faults were"
    )
    assert ray.get(playing, timeout=COMMAND_S) == []
    assert ray.get(rollout.count_steps.remote()) == TRAJECTORIES * TURNS
    cluster.until(lambda: describe()["engines"] == mesh["engines"])
    assert describe()["scheduler"] == mesh["scheduler"]
    assert cluster.place_of(cluster.mesh_actor(sidecars["sglang_server_0_0"])) == (
        job.group.id.hex(),
        0,
    )
    pids = [cluster.pid_of(name) for name in cluster.mesh_actors() - {"treadle"}]
    code, said, errors = treadle("down", "--ray", address, "--json")
    assert code == 0 and len(json.loads(said)["ended"]) == len(pids) + 1, errors
    assert cluster.mesh_actors() == set()
    cluster.until(lambda: not [pid for pid in pids if psutil.pid_exists(pid)])
    assert cluster.left_behind() == []
    assert [ray.get(server.called.remote()) for server in servers] == [[], []], (
        "the servers are as they were"
    )


def test_engines_that_come_and_go_are_followed_over_two_nodes(
    address: str, job: cluster.Job, up: Any, tmp_path: Path
) -> None:
    """An empty mesh on two nodes, which then has certificates. An engine starts on each, one is
    restarted on another port, another one has a flag that cannot be, one has an operator's own
    name, and the second node ends. Result: sidecars follow, each on the node of its engine."""
    with cluster.another_node(address, tmp_path):
        mesh = up("--engine-actor", "own_.*:get_server_address")
        assert mesh["engines"] == {} and mesh["secure"] and mesh["gateway"].startswith("https://")
        first, second = (
            job.start_server("sglang_server_0_0", 0),
            job.start_server_elsewhere("sglang_server_1_0"),
        )
        cluster.until(lambda: len(describe()["engines"]) == 2)
        engines = {
            engine["actor"]: engine_id for engine_id, engine in describe()["engines"].items()
        }
        nodes = [
            cluster.node_of(cluster.mesh_actor(f"sidecar-{engines[name]}"))
            for name in sorted(engines)
        ]
        assert nodes == [cluster.node_of(first), cluster.node_of(second)] and nodes[0] != nodes[1]
        rollout = (
            ray.remote(cluster.Rollout).options(num_cpus=0, resources={"second": 0.1}).remote()
        )
        assert ray.get(rollout.play.remote(4, 2)) == []
        cluster.until(
            lambda: ray.get(rollout.ask_gateway.remote(PROMPT)) == expected(PROMPT, cluster.TOKENS)
        )
        before = engines["sglang_server_0_0"]
        ray.kill(first, no_restart=False)
        cluster.until(
            lambda: before not in describe()["engines"] and len(describe()["engines"]) == 2
        )
        cluster.until(lambda: f"sidecar-{before}" not in cluster.mesh_actors())
        job.start_server("sglang_server_2_0", 1, {"disable_radix_cache": True})
        job.start_server("own_7", 1)
        cluster.until(
            lambda: "sglang_server_2_0" in describe()["refused"] and len(describe()["engines"]) == 3
        )
        assert "without --disable-radix-cache" in describe()["refused"]["sglang_server_2_0"]
        assert ray.get(rollout.play.remote(4, 2)) == []
    cluster.until(lambda: engines["sglang_server_1_0"] not in describe()["engines"])
    assert {engine["actor"] for engine in describe()["engines"].values()} == {
        "sglang_server_0_0",
        "own_7",
    }
    assert up("--secure")["scheduler"] == mesh["scheduler"], "the mesh that runs is the one"


def test_a_server_that_no_actor_runs_is_placed_on_the_node_with_its_address(
    address: str, job: cluster.Job, up: Any
) -> None:
    """A mesh of one node, without certificates. One URL is of a server on this node, the other of
    no node."""
    server = job.start_server("nobody_knows", 0)
    url = "http://{}:{}".format(*ray.get(server.get_server_address.remote()))
    mesh = up("--engine-url", url, "--engine-url", "http://192.0.2.77:30000")
    assert [engine["url"] for engine in mesh["engines"].values()] == [url] and not mesh["secure"]
    assert "no node of the cluster has this address" in mesh["refused"]["http://192.0.2.77:30000"]
    rollout = ray.remote(cluster.Rollout).options(num_cpus=0).remote()
    assert ray.get(rollout.play.remote(2, 2)) == []


@other.needs_root
@pytest.mark.parametrize("option", ["--no-secure", "--secure"])
def test_another_user_of_the_head_node_gets_no_right_on_the_mesh(
    address: str, job: cluster.Job, option: str
) -> None:
    """That user has made the mesh's folder first, with an authority in it. Result: nothing starts
    there; in a folder of root's the mesh is as closed as that of `treadle up`."""
    job.start_server("sglang_server_0_0", 0)
    folder = Path(tempfile.mkdtemp(prefix="tr-"))
    folder.chmod(0o755)
    theirs, ours = folder / "theirs", folder / "ours"
    make_certificates(theirs / "state" / "certificates")
    for path in (theirs, *theirs.rglob("*")):
        os.chown(path, other.OTHER_USER, other.OTHER_USER)
    start = ("up", "--ray", address, "--port", "0", "--json", option, "--ray-folder")
    try:
        code, _, errors = treadle(*start, str(theirs))
        assert code == 2 and f"{theirs} belongs to another user" in errors
        code, said, errors = treadle(*start, str(ours))
        assert code == 0, errors
        mesh = json.loads(said)
        cluster.until(lambda: cluster.pid_of("gateway"))
        processes = [
            psutil.Process(cluster.pid_of(name)) for name in cluster.mesh_actors() - {"treadle"}
        ]
        certificates = ours / "state" / "certificates" if mesh["secure"] else None
        assert (certificates is not None) == (option == "--secure")
        other.require_closed_files(other.files_of(processes, ours))
        page, nats = urlsplit(mesh["console"]), urlsplit(mesh["nats"])
        secrets = [page.query.removeprefix("token="), nats.password, mesh["api_key"]]
        pids = [process.pid for process in processes]
        assert other.require_quiet_processes(pids, filter(None, secrets))
        others = {other.address_of(mesh[name]) for name in ("nats", "gateway", "console")}
        other.require_grpc(set(other.listeners_of(processes)) - others, certificates)
        other.require_nats(mesh["nats"])
        other.require_console(mesh["console"])
        other.require_gateway(mesh["gateway"], mesh["api_key"])
    finally:
        treadle("down", "--ray", address)
        shutil.rmtree(folder, ignore_errors=True)


def test_what_was_given_wrong_is_named_and_nothing_starts(
    address: str, job: cluster.Job, tmp_path: Path
) -> None:
    folder = ("--ray-folder", str(tmp_path))
    for options, says in (
        (("--ray", "127.0.0.1:1"), "--ray 127.0.0.1:1: "),
        (("--ray", address, "--runtime-env", "[]"), "--runtime-env: must be a JSON object"),
        (
            ("--ray", address, "--engine-actor", "a:b c"),
            "--engine-actor a:b c: must be NAME or NAME:METHOD",
        ),
        (
            ("--ray", address, "--engine-url", "ftp://h"),
            "ftp://h: must be the URL of a SGLang server",
        ),
        (
            ("--ray", address, "--model", "m", "--seed", "1"),
            "--model --seed has no effect with --ray",
        ),
    ):
        code, _, errors = treadle("up", *options, *folder)
        assert code == 2 and says in errors, errors
    assert cluster.mesh_actors() == set()
    assert treadle("down", "--ray", address)[:2] == (0, "no mesh runs there\n")

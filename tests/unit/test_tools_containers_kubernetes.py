"""Pods, against a fake API server: what is asked of a cluster, and what is made of its answers."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import kubernetes_validate
import pytest
from support.fake_api_server import NAMESPACE, FakeApiServer
from support.fleets import COUNTER, fleet_on, make_recipe
from treadle_tools.builtin import PYTHON
from treadle_tools.sandbox.containers.kubernetes import (
    KubernetesHost,
    can_resize,
    make_label,
    make_pod,
)
from treadle_tools.sandbox.sandboxes import SandboxLost
from treadle_tools.tool import Granted, Status

PATHS = sorted({str(path.parent) for path, _ in make_recipe(COUNTER).code})


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApiServer]:
    """A fake API server, to which KUBECONFIG leads."""
    fake = FakeApiServer(PATHS)
    monkeypatch.setattr(
        "kubernetes_asyncio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION",
        str(await fake.start(tmp_path)),
    )
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield fake
    await fake.stop()


def host() -> KubernetesHost:
    return KubernetesHost(owner="my mesh:7405", namespace=NAMESPACE)


async def test_a_pod_is_made_asked_resized_and_deleted(
    server: FakeApiServer, tmp_path: Path
) -> None:
    pods = host()
    assert await pods.check() == "kubernetes v1.35.0-fake"
    async with fleet_on([pods], tmp_path / "state", tools=[COUNTER]) as fleet:
        sandbox = await fleet.take("counter")
        await sandbox.ask("open", {"start": 1}, COUNTER.limits, 64)
        reply = await sandbox.ask("step", {"add": 2}, Granted(cpu_cores=4, cores=(0, 1, 2, 3)), 64)
        assert (reply["output"], reply["status"]) == ("3", "ok")
        assert (
            await sandbox.ask(
                "step", {"code": "print('x' * 200_000)"}, Granted(output_bytes=10**6), 64
            )
        )["output"] == ("x" * 200_000 + "\n")
        pod = server.pods[sandbox.name]
        cores = [patch["spec"]["containers"][0]["resources"] for patch in pod.resized]
        assert {"limits": {"cpu": "4"}} in cores
        assert pod.body["metadata"]["labels"]["treadle.tools/owner"] == "my-mesh-7405"
        sandbox.close()
    assert server.pods == {}


async def test_an_old_server_is_asked_for_no_resize(server: FakeApiServer, tmp_path: Path) -> None:
    server.minor = "32"
    pods = host()
    await pods.check()
    async with fleet_on([pods], tmp_path / "state", tools=[PYTHON]) as fleet:
        sandbox = await fleet.take("python")
        assert (await sandbox.ask("call", {"code": "1"}, Granted(cpu_cores=2), 64))[
            "output"
        ] == "1\n"
        assert server.pods[sandbox.name].resized == []
    assert not any(path.endswith("/resize") for _, path in server.requests)


async def test_sessions_of_pods_outlive_the_service(server: FakeApiServer, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    async with fleet_on([host()], folder, tools=[COUNTER], keep_on_exit=True) as fleet:
        sandbox, warm = await fleet.take("counter"), await fleet.take("counter")
        fleet.records.bind({"session_id": "s-1", "tool": "counter"}, sandbox.name)
        await sandbox.ask("open", {"start": 1}, COUNTER.limits, 64)
        await sandbox.ask("step", {"add": 2}, COUNTER.limits, 64, request_id="s1")
    assert sandbox.name in server.pods and warm.name not in server.pods
    async with fleet_on([host()], folder, tools=[COUNTER]) as fleet:
        (found,) = fleet.found
        assert found.sandbox is not None
        assert (await found.sandbox.ask("recall", None, COUNTER.limits, 64))["output"] == "3"
        assert (await found.sandbox.ask("step", {"add": 2}, COUNTER.limits, 64))["output"] == "5"
    assert server.pods == {}


async def test_a_pod_that_the_kernel_killed_for_memory_is_reported_so(
    server: FakeApiServer, tmp_path: Path
) -> None:
    async with fleet_on([host()], tmp_path / "state", tools=[COUNTER]) as fleet:
        sandbox = await fleet.take("counter")
        await sandbox.ask("open", {}, COUNTER.limits, 64)
        process = server.pods[sandbox.name].process
        assert process is not None
        process.terminate()
        process.wait()
        with pytest.raises(SandboxLost) as lost:
            await sandbox.ask("step", {"add": 1}, COUNTER.limits, 64)
        assert lost.value.status is Status.OUT_OF_MEMORY
        sandbox.close()


async def test_a_refused_or_hopeless_pod_is_tried_again_and_not_left(
    server: FakeApiServer, tmp_path: Path
) -> None:
    """A quota that is full for a moment; then an image that nobody has."""
    server.refuses = [403, 500]
    async with fleet_on([host()], tmp_path / "state", tools=[PYTHON]) as fleet:
        sandbox = await fleet.take("python")
        sandbox.close()
    created = [path for method, path in server.requests if method == "POST"]
    assert len(created) >= 3
    server.waiting = "ImagePullBackOff"
    pods = host()
    recipe = make_recipe(PYTHON, "nobody/has-it", code_in_image=True)
    with pytest.raises(Exception, match="ImagePullBackOff: told so"):
        await pods.make(recipe, "pod-x")
    await pods.close()
    assert server.pods == {}


def test_a_pod_is_valid_and_restricted() -> None:
    """Against the schemas of Kubernetes; and the rules of its `restricted` standard, one by one."""
    recipe = make_recipe(PYTHON, code_in_image=True)
    pod = make_pod(recipe, name="pod-x", owner="me", runtime_class="gvisor")
    kubernetes_validate.validate(json.loads(json.dumps(pod)), "1.37", strict=True)
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["volumes"][0]["emptyDir"]["sizeLimit"] == str(PYTHON.work_bytes)
    assert pod["metadata"]["labels"]["treadle.tools/network"] == "none"


@pytest.mark.parametrize(
    ("minor", "resized"), [("31", False), ("32+", False), ("33", True), ("35+", True)]
)
def test_servers_resize_from_a_version_on(minor: str, resized: bool) -> None:
    assert can_resize("1", minor) is resized


def test_an_owner_becomes_a_label() -> None:
    assert make_label("host.example:7405") == "host.example-7405"
    assert len(make_label("x" * 100)) == 63

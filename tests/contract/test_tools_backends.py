"""What is refused, and how it is said, where a backend of containers is not there or not set up."""

from pathlib import Path

import grpc
import grpc.aio
import pytest
from pydantic import ValidationError
from support.processes import StartService
from support.rpc import error_of
from support.tools import own_tools, tools
from treadle.tools.v1 import tools_pb2 as pb
from treadle_tools.config import ToolsSettings
from treadle_tools.registry import RegistrationError, Registry
from treadle_tools.tool import Kind, Tool

BACKENDS = {
    "no daemon": (
        {"BACKEND": "docker", "IMAGE": "python"},
        "start the Docker daemon, or set TREADLE_TOOLS_DOCKER_HOSTS",
    ),
    "no image": ({"BACKEND": "docker"}, "set TREADLE_TOOLS_IMAGE"),
    "no cluster": ({"BACKEND": "kubernetes", "IMAGE": "python"}, "set KUBECONFIG"),
}


@pytest.mark.parametrize("case", sorted(BACKENDS))
async def test_a_backend_that_is_not_there_refuses_calls_and_says_what_to_do(
    start_service: StartService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The service starts; a caller's own mistake is told first; a good call is refused with what is to be done."""
    settings, remedy = BACKENDS[case]
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    settings = {**settings, "DOCKER_HOSTS": f"unix://{tmp_path}/nobody.sock", "STATE_DIR": str(tmp_path / "state")}
    async with tools(start_service, "python", "frozen_lake", **settings) as calls:
        assert (await calls.stub.ListTools(pb.ListToolsRequest(), timeout=10)).sandbox == ""
        with pytest.raises(grpc.aio.AioRpcError) as mistaken:
            await calls.invoke({"cod": ""}, tool="python")
        assert error_of(mistaken.value).code == grpc.StatusCode.INVALID_ARGUMENT
        for call in (calls.python("1"), calls.open("frozen_lake")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            error = error_of(refused.value)
            assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SANDBOX_UNAVAILABLE")
            assert remedy in str(refused.value.details())


async def test_a_tool_on_a_backend_that_is_missing_leaves_the_others_alone(
    start_service: StartService, tmp_path: Path
) -> None:
    declared = """
from treadle_tools.tool import Kind, Tool
TOOLS = [Tool("docker_only", Kind.STATELESS, "", "own_code:f", {}, backend="docker", image="python")]
"""
    settings = {"BUILTIN": "python", "DOCKER_HOSTS": f"unix://{tmp_path}/nobody.sock"}
    async with own_tools(start_service, tmp_path, declared, "", **settings) as calls:
        assert (await calls.python("1 + 1")).output == "2\n"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await calls.invoke({}, tool="docker_only")
        assert error_of(refused.value).reason == "SANDBOX_UNAVAILABLE"


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("networks", "host", "not host"),
        ("networks", "egress,host", "not host"),
        ("networks", "container:other", "not host"),
        ("modules", "not a name", "Python module names"),
        ("cores", "-1", "greater than or equal to 0"),
        ("cgroups", "maybe", "'auto' or 'off'"),
        ("keep_s", "-1", "greater than or equal to 0"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(setting: str, value: str, says: str) -> None:
    """The host's own network cannot be allowed either."""
    with pytest.raises(ValidationError, match=says):
        ToolsSettings.model_validate({setting: value})


def test_a_network_or_backend_that_nobody_allowed_is_refused_at_start() -> None:
    def tool(network: str = "", backend: str = "") -> Tool:
        return Tool("x", Kind.STATELESS, "", "m:f", {}, network=network, backend=backend)

    with pytest.raises(RegistrationError, match="'egress' is not in TREADLE_TOOLS_NETWORKS"):
        Registry([tool(network="egress", backend="docker")])
    with pytest.raises(RegistrationError, match="backend must be one of bubblewrap, docker, kubernetes"):
        Registry([tool(backend="podman")])
    assert len(list(Registry([tool(network="egress", backend="docker")], networks=["egress"]))) == 1

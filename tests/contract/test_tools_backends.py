"""What is refused, and how it is said, where a backend of containers is not there or not set up."""

from pathlib import Path

import grpc
import pytest
from pydantic import ValidationError
from support.processes import StartService
from support.rpc import refusal_of, refused
from support.tools import tools
from treadle.tools.v1 import tools_pb2 as pb
from treadle_tools.config import ToolsSettings
from treadle_tools.registry import RegistrationError, Registry
from treadle_tools.tool import Kind, Tool

BACKENDS = {
    "no bubblewrap": ({"BWRAP": "/nowhere/bwrap"}, "apt-get install bubblewrap"),
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
    """The service starts; a caller's own mistake is told first; a good call is refused with what is
    to be done."""
    settings, remedy = BACKENDS[case]
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    settings = {
        **settings,
        "DOCKER_HOSTS": f"unix://{tmp_path}/nobody.sock",
        "STATE_DIR": str(tmp_path / "state"),
    }
    async with tools(start_service, "python", "frozen_lake", **settings) as calls:
        listed = await calls.stub.ListTools(pb.ListToolsRequest(), timeout=10)
        assert (listed.sandbox, {tool.name for tool in listed.tools}) == (
            "",
            {"python", "frozen_lake"},
        )
        mistaken = await refusal_of(calls.invoke({"cod": ""}, tool="python"))
        assert mistaken.code is grpc.StatusCode.INVALID_ARGUMENT
        for call in (calls.python("1"), calls.open("frozen_lake")):
            with refused("SANDBOX_UNAVAILABLE", grpc.StatusCode.FAILED_PRECONDITION, says=remedy):
                await call


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
    with pytest.raises(
        RegistrationError, match="backend must be one of bubblewrap, docker, kubernetes"
    ):
        Registry([tool(backend="podman")])
    assert len(list(Registry([tool(network="egress", backend="docker")], networks=["egress"]))) == 1

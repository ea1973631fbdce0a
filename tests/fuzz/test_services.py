"""Hostile requests to each RPC of each service, in a mesh with certificates.

Whatever is sent: the process lives and answers a good request afterwards; the answer comes within
the deadline; an error has a reason, names the field where the request is wrong, and is not one that
no table knows; and a caller of one tenant receives nothing that only another tenant knows.
"""

import asyncio
import math
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzed_mesh import WORDS, FuzzedMesh
from support.fuzzing import BATCH, EXAMPLES, fuzz
from support.hostile_messages import Request, requests
from support.secure_mesh import SERVICES, secure_mesh
from support.secure_mesh import rpcs as all_rpcs

# come before anything is done
CHECKS = {"INVALID_ARGUMENT", "MESSAGE_MALFORMED", "OF_ANOTHER_TENANT"}
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(0)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FuzzedMesh]:
    arguments = {"enable_memory_saver": True}
    with pytest.MonkeyPatch.context() as patched:
        # Nobody closes what hostile requests open, so that they would take all sessions in time.
        patched.setenv("TREADLE_TOOLS_SESSION_IDLE_S", "10")
        async with secure_mesh(tmp_path_factory.mktemp("fuzzed"), arguments=arguments) as secure:
            mesh = FuzzedMesh(secure, await secure.sealer())
            await mesh.give_acme()
            await mesh.settle()
            yield mesh
            await mesh.close()


def rpcs_of(service: str) -> list[MethodDescriptor]:
    """RPCs of a service, without the deprecated ones, which no service answers."""
    rpcs = [rpc for rpc in all_rpcs() if rpc.containing_service.full_name == service]
    return [rpc for rpc in rpcs if not rpc.GetOptions().deprecated]


@pytest.mark.parametrize("service", SERVICES)
async def test_no_request_harms_a_service(mesh: FuzzedMesh, service: str) -> None:
    loop = asyncio.get_running_loop()

    rpcs = rpcs_of(service)
    batch = rpcs * math.ceil(BATCH / len(rpcs))  # as many of each

    @fuzz(EXAMPLES // len(batch))
    @given(st.tuples(*(requests(rpc, WORDS) for rpc in batch)))
    def send(batch: tuple[Request, ...]) -> None:
        problems = asyncio.run_coroutine_threadsafe(mesh.send_all(batch), loop).result()
        assert not problems, "\n".join(problems)

    await asyncio.to_thread(send)
    unreached = {
        rpc.name: mesh.answers_to(rpc) for rpc in rpcs if not mesh.answers_to(rpc).keys() - CHECKS
    }
    assert not unreached, "no request to these passes the checks of its fields"

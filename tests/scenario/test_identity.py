"""Who may call what, in a mesh with certificates: each RPC, each kind of caller, and another
tenant's names."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio
import treadle
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from support.conditions import until, until_said
from support.fake_sglang import expected
from support.rpc import error_of, refused
from support.secure_mesh import SERVICES, TENANTS, SecureMesh, call, every_rpc, rpcs, secure_mesh
from treadle.certificates import Certificates, open_channel
from treadle.common.v1 import access_pb2, tokens_pb2
from treadle.engine.v1 import engine_pb2, engine_pb2_grpc
from treadle.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from treadle.tools.v1 import tools_pb2, tools_pb2_grpc
from treadle_cli.certs import Authority, Identity, identities, make_certificates
from treadle_runtime.identity import KINDS, caller_in, may_call

pytestmark = pytest.mark.asyncio(loop_scope="module")
DENIED, UNKNOWN, AWAY = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNAVAILABLE,
)
# Each identity that `treadle certs` makes, and the kind of caller that its holder is; "" is nobody.
IDENTITIES = {
    name: caller.kind if (caller := caller_in(made.uri)) else ""
    for name, made in sorted(identities(TENANTS).items())
}
OF_TENANT = {"client": "client-acme", "trainer": "trainer-acme"}
REFUSALS = {"NO_IDENTITY", "CALLER_NOT_ALLOWED"}
Channels = Callable[[str, str], grpc.aio.Channel]
PROMPT = list(range(10, 40))
TIMEOUT_S, WAIT_S = 10.0, 60.0
ALL = scheduler_pb2.ListTrajectoriesRequest(page_size=1000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecureMesh]:
    async with secure_mesh(tmp_path_factory.mktemp("secure")) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channels(mesh: SecureMesh) -> AsyncIterator[Channels]:
    """A channel of an identity to a service, which tests share."""
    async with AsyncExitStack() as stack:
        opened: dict[tuple[str, str], grpc.aio.Channel] = {}

        def channel(identity: str, service: str) -> grpc.aio.Channel:
            if (identity, service) not in opened:
                opened[identity, service] = mesh.channel(identity, service)
                stack.push_async_callback(opened[identity, service].close)
            return opened[identity, service]

        yield channel


def path_of(rpc: MethodDescriptor) -> str:
    return f"/{rpc.containing_service.full_name}/{rpc.name}"


def owned_paths(kind: Descriptor) -> Iterator[tuple[FieldDescriptor, ...]]:
    """The fields that name something of a tenant, each as a path from the request."""
    for field in kind.fields:
        if field.GetOptions().Extensions[access_pb2.owned]:
            yield (field,)
        elif field.message_type is not None:
            yield from ((field, *path) for path in owned_paths(field.message_type))


def with_name(kind: Descriptor, path: tuple[FieldDescriptor, ...], name: str) -> Message:
    request = at = GetMessageClass(kind)()
    for field in path[:-1]:
        at = getattr(at, field.name).add() if field.is_repeated else getattr(at, field.name)
    if path[-1].is_repeated:
        getattr(at, path[-1].name).append(name)
    else:
        setattr(at, path[-1].name, name)
    return request


@pytest.mark.parametrize("rpc", rpcs(), ids=path_of)
async def test_an_rpc_admits_the_identities_that_its_rule_names(
    channels: Channels, rpc: MethodDescriptor
) -> None:
    """Of all identities; of a sidecar as that of another engine than the one that is called."""
    allowed = may_call(path_of(rpc))
    assert allowed, "a new RPC needs the option `access`"
    for identity, kind in IDENTITIES.items():
        channel = channels(identity, SERVICES[rpc.containing_service.full_name])
        try:
            await call(channel, rpc, GetMessageClass(rpc.input_type)())
            reason = ""
        except grpc.aio.AioRpcError as error:
            code, reason, *_ = error_of(error)
            assert (code is DENIED) == (bool(kind) and kind not in allowed), (identity, code)
        refusal = "NO_IDENTITY" if not kind else "" if kind in allowed else "CALLER_NOT_ALLOWED"
        assert (reason if reason in REFUSALS else "") == refusal, (identity, reason)


async def test_every_kind_of_caller_has_an_identity_and_every_rpc_a_rule() -> None:
    """Also the RPCs of a process that is no service, `treadle up`."""
    assert set(IDENTITIES.values()) - {""} == KINDS
    assert all(may_call(path_of(rpc)) <= KINDS for rpc in every_rpc())
    assert not [path_of(rpc) for rpc in every_rpc() if not may_call(path_of(rpc))]


@pytest.mark.parametrize("rpc", rpcs(), ids=path_of)
async def test_a_name_of_another_tenant_is_refused_in_every_field(
    mesh: SecureMesh, rpc: MethodDescriptor
) -> None:
    kinds = may_call(path_of(rpc)) & {"client", "trainer"}
    for kind in kinds:
        async with mesh.channel(
            OF_TENANT[kind], SERVICES[rpc.containing_service.full_name]
        ) as channel:
            for path in owned_paths(rpc.input_type):
                with refused("OF_ANOTHER_TENANT", DENIED, says=path[-1].name):
                    await call(channel, rpc, with_name(rpc.input_type, path, "beta::x"))


async def test_every_field_that_names_something_of_a_tenant_says_so() -> None:
    """An id that a tenant's caller may send is owned, or stands here."""
    of_the_mesh = {"engine_id", "pinned_engine_id", "prompt_id", "prompt_ids", "push_id"}

    def ids(kind: Descriptor) -> Iterator[FieldDescriptor]:
        for field in kind.fields:
            if field.message_type is not None:
                yield from ids(field.message_type)
            elif field.type == field.TYPE_STRING and (
                field.name.endswith(("_id", "_ids")) or field.name == "job"
            ):
                yield field

    silent = {
        f"{rpc.input_type.name}.{field.full_name}"
        for rpc in rpcs()
        if may_call(path_of(rpc)) & {"client", "trainer"}
        for field in ids(rpc.input_type)
        if not field.GetOptions().Extensions[access_pb2.owned] and field.name not in of_the_mesh
    }
    assert silent == {"GenerateRequest.treadle.common.v1.Ticket.job"}  # sealed by the scheduler


@pytest.mark.parametrize("service", sorted(set(SERVICES.values())))
@pytest.mark.parametrize("who", ["nobody", "of another authority", "expired"])
async def test_a_caller_without_a_good_certificate_reaches_no_rpc(
    mesh: SecureMesh, service: str, who: str, tmp_path: Path
) -> None:
    identity = Identity("treadle://operator")
    trusted = Authority.at(mesh.certificates)
    if who == "nobody":
        options = (("grpc.ssl_target_name_override", f"{service}.treadle"),)
        credentials = grpc.ssl_channel_credentials((mesh.certificates / "ca.crt").read_bytes())
        channel = grpc.aio.secure_channel(mesh.address(service), credentials, options)
    else:
        issuer = trusted if who == "expired" else Authority.create()
        issuer.issue(tmp_path, identity, timedelta(minutes=-1 if who == "expired" else 9))
        (tmp_path / "ca.crt").write_bytes((mesh.certificates / "ca.crt").read_bytes())
        channel = mesh.channel(tmp_path, service)
    async with channel:
        for rpc in rpcs():
            if SERVICES[rpc.containing_service.full_name] == service:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call(channel, rpc, GetMessageClass(rpc.input_type)())
                assert raised.value.code() is AWAY, path_of(rpc)


@pytest.mark.parametrize(
    ("who", "says"),
    [
        ("of another authority", "the server refuses this certificate"),
        ("expired", "the server refuses this certificate"),
        ("before a foreign server", "the server is not the scheduler of this mesh"),
    ],
)
async def test_the_client_says_at_once_why_a_certificate_is_refused(
    mesh: SecureMesh, who: str, says: str, tmp_path: Path
) -> None:
    trusted = Authority.at(mesh.certificates)
    issuer = trusted if who == "expired" else Authority.create()
    issuer.issue(
        tmp_path,
        Identity("treadle://client/acme"),
        timedelta(minutes=-1 if who == "expired" else 9),
    )
    if who == "of another authority":
        (tmp_path / "ca.crt").write_bytes((mesh.certificates / "ca.crt").read_bytes())
    async with mesh.client(str(tmp_path)) as client:
        with pytest.raises(treadle.TreadleError, match=says) as raised:
            await client.open(prompt_id="p", sample=0, prompt=PROMPT)
    assert (raised.value.code, raised.value.reason) == (UNKNOWN, "CERTIFICATE_REFUSED")


async def test_a_certificate_without_an_identity_is_nobodys(
    mesh: SecureMesh, tmp_path: Path
) -> None:
    for number, uri in enumerate(
        ("treadle://client", "treadle://scheduler/acme", "treadle://root", "spiffe://operator")
    ):
        folder = tmp_path / str(number)
        Authority.at(mesh.certificates).issue(folder, Identity(uri), timedelta(days=1))
        async with mesh.channel(folder, "scheduler") as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            with refused("NO_IDENTITY", UNKNOWN):
                await stub.GetPolicy(scheduler_pb2.GetPolicyRequest(), timeout=TIMEOUT_S)


async def test_a_tenant_sees_its_own_and_nothing_else(mesh: SecureMesh) -> None:
    async with (
        mesh.client("client-acme", job="run") as acme,
        mesh.client("client-beta", job="run") as beta,
    ):
        own = await acme.open(prompt_id="p", sample=0, prompt=PROMPT)
        other = await beta.open(prompt_id="p", sample=0, prompt=PROMPT)
        assert own.trajectory_id.startswith("acme::") and other.trajectory_id.startswith("beta::")
        async with mesh.channel("client-acme", "scheduler") as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            listed = await stub.ListTrajectories(ALL, timeout=TIMEOUT_S)
            jobs = await stub.ListJobs(scheduler_pb2.ListJobsRequest(), timeout=TIMEOUT_S)
        assert {each.trajectory_id.partition("::")[0] for each in listed.trajectories} == {"acme"}
        assert [job.job for job in jobs.jobs] == ["acme::run"]
        async for _ in own.generate(treadle.Sampling(max_new_tokens=8, temperature=0.0)):
            pass
        assert own.steps[-1].token_ids == expected(PROMPT, 8)
        async with mesh.channel("operator", "scheduler") as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            everything = await stub.ListTrajectories(ALL, timeout=TIMEOUT_S)
        assert {own.trajectory_id, other.trajectory_id} <= {
            each.trajectory_id for each in everything.trajectories
        }


async def test_a_tenant_has_sessions_rewards_and_batches(mesh: SecureMesh) -> None:
    async def agent(trajectory: treadle.Trajectory, _: treadle.Prompt) -> treadle.PendingReward:
        async for _chunk in trajectory.generate(
            treadle.Sampling(max_new_tokens=4, temperature=0.0)
        ):
            pass
        async with await trajectory.open_session("frozen_lake", {"seed": 1}) as session:
            assert (await session.step({"action": "right"})).ok
        return await trajectory.score("exact_match", {"answer": "a", "expected": "a"})

    async with mesh.client("trainer-acme", job="whole") as client:
        result = await client.rollout(
            [treadle.Prompt("p", PROMPT)], agent, samples_per_prompt=2, rollout_id="chosen"
        )
        assert [(each.outcome, each.reward) for each in result.trajectories] == [
            ("finished", 1.0)
        ] * 2
        batch = await client.get_batch(result.rollout_id)
        assert [len(group.trajectories) for group in batch.groups] == [2]
    async with mesh.channel("trainer-beta", "rollout") as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        with refused("ROLLOUT_NOT_FOUND"):  # its own of this name
            await stub.GetRollout(
                rollout_pb2.GetRolloutRequest(rollout_id="chosen"), timeout=TIMEOUT_S
            )
    async with mesh.channel("client-acme", "tools") as channel:
        tools = tools_pb2_grpc.ToolsServiceStub(channel)
        opening = tools_pb2.OpenSessionRequest(
            request_id="open", tool="frozen_lake", arguments_json="{}"
        )
        session = (await tools.OpenSession(opening, timeout=TIMEOUT_S)).session.session_id
        assert session.partition("::")[0] == "acme"
        closing = tools_pb2.CloseSessionRequest(request_id="close", session_id=session)
        await tools.CloseSession(closing, timeout=TIMEOUT_S)


async def test_the_same_request_of_two_tenants_makes_two_trajectories(mesh: SecureMesh) -> None:
    made = []
    for tenant in ("acme", "beta"):
        async with mesh.channel(f"client-{tenant}", "scheduler") as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            request = scheduler_pb2.OpenTrajectoryRequest(
                request_id="the-same", prompt_id="p", prompt_tokens=4
            )
            made.append(
                (await stub.OpenTrajectory(request, timeout=TIMEOUT_S)).trajectory.trajectory_id
            )
    assert [name.partition("::")[0] for name in made] == ["acme", "beta"]


async def test_no_engine_takes_a_ticket_that_the_scheduler_did_not_make(mesh: SecureMesh) -> None:
    async with (
        mesh.client("client-acme") as client,
        mesh.channel("client-acme", "scheduler") as to_scheduler,
        mesh.channel("client-acme", "sidecar") as to_sidecar,
    ):
        trajectory = await client.open(
            prompt_id="p", sample=0, prompt=PROMPT, pinned_engine_id="e0"
        )
        asked = scheduler_pb2.ScheduleStepRequest(
            request_id="ticket",
            trajectory_id=trajectory.trajectory_id,
            context_tokens=len(PROMPT),
            max_new_tokens=4,
        )
        stub = scheduler_pb2_grpc.SchedulerServiceStub(to_scheduler)
        ticket = (await stub.ScheduleStep(asked, timeout=TIMEOUT_S)).ticket
        engine = engine_pb2_grpc.EngineServiceStub(to_sidecar)
        ids = tokens_pb2.TokenIds(
            int32_le=b"".join(token.to_bytes(4, "little") for token in PROMPT)
        )

        async def present(**changed: object) -> None:
            sampling = tokens_pb2.SamplingParams(max_new_tokens=4)
            request = engine_pb2.GenerateRequest(ticket=ticket, prompt=ids, sampling=sampling)
            for name, value in changed.items():
                if isinstance(value, Message):
                    getattr(request.ticket, name).CopyFrom(value)
                else:
                    setattr(request.ticket, name, value)
            async for _ in engine.Generate(request, timeout=TIMEOUT_S):
                pass

        later = type(ticket.expires_at)(seconds=ticket.expires_at.seconds + 3600)
        forged: list[dict[str, object]] = [
            {"seal": ""},
            {"seal": "x" + ticket.seal},
            {"priority": ticket.priority + 1e9},
            {"ticket_id": "acme::another"},
            {"expires_at": later},
            {"job_weight": 1000.0},
            {"job": "beta::run"},
        ]
        for change in forged:
            with refused("SEAL_REFUSED", DENIED):
                await present(**change)
        await present()


async def test_a_ticket_opens_its_own_engine_only_also_after_both_have_started_again(
    mesh: SecureMesh,
) -> None:
    async with mesh.client("client-acme") as client:
        trajectory = await client.open(
            prompt_id="p", sample=0, prompt=PROMPT, pinned_engine_id="e1"
        )
        asked = scheduler_pb2.ScheduleStepRequest(
            request_id="kept",
            trajectory_id=trajectory.trajectory_id,
            context_tokens=len(PROMPT),
            max_new_tokens=4,
        )
        async with mesh.channel("client-acme", "scheduler") as to_scheduler:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(to_scheduler)
            ticket = (await stub.ScheduleStep(asked, timeout=TIMEOUT_S)).ticket
        ids = tokens_pb2.TokenIds(
            int32_le=b"".join(token.to_bytes(4, "little") for token in PROMPT)
        )
        sampling = tokens_pb2.SamplingParams(max_new_tokens=4)
        request = engine_pb2.GenerateRequest(ticket=ticket, prompt=ids, sampling=sampling)

        async def present(engine_id: str) -> str:
            """The last event, or the reason of a sidecar that is not registered yet."""
            folder = Certificates(mesh.certificates / "client-acme")
            async with open_channel(mesh.where.sidecars[engine_id], "sidecar", folder) as channel:
                stream = engine_pb2_grpc.EngineServiceStub(channel).Generate(
                    request, timeout=TIMEOUT_S
                )
                try:
                    return [event.WhichOneof("event") or "" async for event in stream][-1]
                except grpc.aio.AioRpcError as error:
                    if (reason := error_of(error)[1]) != "ENGINE_NOT_REGISTERED":
                        raise
                    return reason

        with refused("SEAL_REFUSED", DENIED):
            await present("e0")
        for name in ("scheduler", "e1"):
            await mesh.restart(name)
        assert (
            await until_said(partial(present, "e1"), lambda said: said != "ENGINE_NOT_REGISTERED")
            == "finished"
        )


async def test_new_certificates_are_taken_while_calls_run(mesh: SecureMesh) -> None:
    """Every certificate is replaced, several times, while trajectories are opened, generate and
    close."""
    done: list[str] = []
    stop = asyncio.Event()

    async def work(number: int) -> None:
        async with mesh.client("client-beta") as client:
            while not stop.is_set():
                trajectory = await client.open(
                    prompt_id=f"p{number}", sample=len(done), prompt=PROMPT
                )
                async for _ in trajectory.generate(
                    treadle.Sampling(max_new_tokens=8, temperature=0.0)
                ):
                    pass
                assert trajectory.steps[-1].token_ids == expected(PROMPT, 8)
                await trajectory.close()
                done.append(trajectory.trajectory_id)

    def moved_on(since: int) -> bool:
        return len(done) >= since + 40

    old = {
        name: (mesh.certificates / name / "tls.crt").read_bytes()
        for name in ("scheduler", "client-beta")
    }
    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(work(number))
        for _ in range(3):
            before = len(done)
            make_certificates(mesh.certificates, ("acme", "beta"))
            await until(partial(moved_on, before), WAIT_S)
        stop.set()
    async with mesh.channel("client-beta", "scheduler") as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        await stub.GetPolicy(scheduler_pb2.GetPolicyRequest(), timeout=TIMEOUT_S)
    assert all(
        (mesh.certificates / name / "tls.crt").read_bytes() != each for name, each in old.items()
    )

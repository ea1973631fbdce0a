"""A mesh with certificates under hostile requests: what two tenants have there, and what an answer
may be."""

import asyncio
import json
import uuid
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp
from support.fake_sglang import expected
from support.finished_trajectories import finished
from support.hostile_messages import YEAR_2100_S, Request, Words, fill, messages_in
from support.placements import columns
from support.rpc import DETAILS_KEY, error_of
from support.secure_mesh import SERVICES, SecureMesh, rpcs
from treadle.common.v1.ticket_pb2 import Ticket
from treadle.common.v1.tokens_pb2 import SamplingParams, TokenIds
from treadle.engine.v1 import engine_pb2 as engine
from treadle.migrator.v1 import migrator_pb2 as migrator
from treadle.placement.v1 import placement_pb2 as placement
from treadle.predictor.v1 import predictor_pb2 as predictor
from treadle.rollout.v1 import rollout_pb2 as rollout
from treadle.scheduler.v1 import scheduler_pb2 as scheduler
from treadle.tools.v1 import rewards_pb2 as rewards
from treadle.tools.v1 import tools_pb2 as tools
from treadle_core.model import INCOMPLETE
from treadle_runtime.errors import PermissionDenied
from treadle_runtime.identity import Sealer, owned_names

TENANT, OTHER = "beta", "acme"  # who sends hostile requests, and whose data it must not see
SECRET = "secret-of-acme"  # in all that acme has; nobody else ever sends it
ANSWER_S = 60.0  # nothing that is quick takes so long, however busy the machine
# What may lawfully last as long as its caller allows, and how long it is given.
WAITING = {
    "ScheduleStep",
    "Generate",
    "GetBatch",
    "StreamBatch",
    "StreamTokens",
    "Invoke",
    "OpenSession",
    "PrefetchPrefix",
}
WAIT_S = 0.5
FEW = 3  # messages that are read of a stream
DEFECTS = {
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.CANCELLED,
}
PROMPT = list(range(10, 18))
TOKENS = TokenIds(int32_le=array("i", PROMPT).tobytes())
PATHS = {rpc.input_type.full_name: rpc for rpc in rpcs() if rpc.name != "StreamBatch"}
FRESH = "<fresh>"  # a name that was never used
LAKE, SNIPPET = json.dumps({"seed": 7}), json.dumps({"code": "1"})

# What a good request has, by the name of the field. A name in <> stands for one that is known when
# the request is sent.
WORDS = Words(
    {
        "request_id": [FRESH] * 7 + ["again"],
        "trajectory_id": ["<trajectory>"] * 5 + [FRESH, "<acme trajectory>", "t"],
        "OpenTrajectoryRequest.trajectory_id": ["", FRESH],
        "GenerateRequest.token_interval": [],
        "job": ["", "<job name>", "j", "<acme job>"],
        "job_id": ["<job>"] * 4 + ["", "<acme job>"],
        "rollout_id": ["<rollout>"] * 5 + ["", "<acme rollout>"],
        "rollout_ids": ["<rollout>", "r", "<acme rollout>"],
        "CreateRolloutRequest.rollout_id": ["", FRESH],
        "batch_request_id": ["<batch>", "again"],
        "session_id": ["<session>"] * 5 + ["<acme session>"],
        "InvokeRequest.session_id": ["", "", "<session>"],
        "snapshot_id": [""],
        "reward_id": ["<reward>"] * 5 + ["<acme reward>"],
        "reward_ids": ["<reward>"] * 5 + ["<acme reward>"],
        "migration_id": ["<migration>"],
        "ticket_id": ["<ticket>", FRESH],
        "Ticket.ticket_id": [f"{TENANT}::{FRESH}"],
        "Ticket.trajectory_id": ["<trajectory>"],
        "replaces_ticket_id": ["", "<ticket>"],
        "prompt_id": ["p"],
        "prompt_ids": ["p"],
        "engine_id": ["e0", "e1"],
        "Endpoint.engine_id": ["e0", "e1", FRESH],
        "PlacementEngine.engine_id": [FRESH],
        "current_engine_id": [""],
        "PlacedTrajectory.trajectory_id": [FRESH],
        "PlanPlacementRequest.trajectories": [None, None, True],
        "PlanPlacementRequest.columns": [True, None],
        "Query.trajectory_id": [FRESH],
        "WatchRewardsRequest.job": [],
        "WatchRewardsRequest.trajectory_id": [],
        "EngineInfo.engine_id": ["ghost"],
        "RenewEngineLeaseRequest.engine_id": ["ghost"],
        "DeregisterEngineRequest.engine_id": ["ghost"],
        "lease_id": ["<lease>"],
        "url": ["", "http://127.0.0.1:30000"],
        "pinned_engine_id": ["", "e0"],
        "target_engine_id": ["e0", "e1"],
        "hardware_tags": ["h200"],
        "OpenTrajectoryRequest.hardware_tags": [],
        "address": ["<e0>", "<e1>", "127.0.0.1:1"],
        "engine_address": ["<e1>", "<e0>", "127.0.0.1:1"],
        "master_address": ["127.0.0.1:29500"],
        "world_size": [4],
        "rank_offset": [1],
        "group_name": ["group"],
        "backend": ["", "gloo"],
        "page_token": [""],
        "weight_version": ["default", "1"],
        "UpdateWeightsRequest.weight_version": [FRESH],
        "PushWeightsRequest.weight_version": [FRESH, "pushed"],
        "SetWeightsRequest.weight_version": [FRESH, "1"],
        "GetBatchRequest.weight_version": [1],
        "push_id": ["push"],
        "part": [0, 0, 1],
        "distributed": [b'{"names": ["a"]}'],
        "tensor": [b'{"serialized_named_tensors": ["a"]}'],
        "ipc": [b"{}"],
        "model_path": ["fake/model"],
        "tags": ["weights", "kv_cache"],
        "InvokeRequest.tool": ["python"],
        "OpenSessionRequest.tool": ["frozen_lake"],
        "reward": ["exact_match"],
        "FinishedTrajectory.reward": [1.0],
        "CloseTrajectoryRequest.reward": [1.0],
        "arguments_json": [SNIPPET, SNIPPET, '{"action": "left"}'],
        "OpenSessionRequest.arguments_json": [LAKE, "", "{}"],
        "ScoreTrajectoryRequest.arguments_json": ['{"answer": "1", "expected": "1"}'],
        "cpu_cores": [0, 1],
        "memory_bytes": [0, 64 * 2**20],
        "output_bytes": [0, 1000],
        "int32_le": [TOKENS.int32_le],
        "float32_le": [bytes(32)],
        "loss_mask": [bytes([0] * 4 + [1] * 4)],
        "start_token": [4],
        "TokenChunk.start_token": [0, 0, 4],
        "StreamTokensRequest.part": [0],
        "min_tokens": [0, 3],
        "end_token": [8],
        "samples_per_prompt": [1, 2],
        "keep_per_prompt": [0, 1],
        "max_staleness": [-1, 1],
        "max_groups": [1, 2],
        "RolloutSpec.samples": [],
        "keep_groups": [0, 0, 0, 1],
        "max_open_groups": [0, 0, 1],
        "replace_stale": [False, False, False, True],
        "batch_groups": [0, 0, 0, 1, 2],
        "group_keep": [0, 0, 1, 2],
        "samples_in_flight": [0, 0, 2],
        "RolloutSpec.history": ["run"],
        "GetShapingRequest.history": ["", "run"],
        "budget": [1.0, 1.5],
        "most_samples": [0],
        "ceiling_tokens": [100],
        "floor_tokens": [10],
        "percentile": [0.0],
        "soft_percentile": [0.0],
        "success_reward": [0.0, 1.0],
        "most_cut_share": [0.0],
        "least_successes": [0, 1],
        "longest": [0],
        "Selection.rule": [0, 1, 1, 2],
        "saturated_samples": [0],
        "GetBatchRequest.part": [0],
        "ConfirmBatchRequest.part": [0],
        "parts": [0, 2],
        "sample": [0, 1],
        "turn": [0, 0, 1],
        "prompt_tokens": [8],
        "context_tokens": [8, 20],
        "max_new_tokens": [1, 3],
        "max_total_tokens": [0, 100],
        "top_p": [0.5],
        "top_k": [-1, 5],
        "min_p": [0.0],
        "temperature": [0.0, 1.0],
        "stop": ["x"],
        "revision": [0],
        "expected_revision": [0, 1],
        "cache_salt": ["default"],
        "slot_limit": [4],
        "tensor_parallel": [1],
        "page_size": [0, 1, 1000],
        "remaining_tokens_float64": [array("d", [3.0, 1.0]).tobytes()],
        "context_tokens_float64": [array("d", [5.0, 8.0]).tobytes()],
        "current_engine_int32": [array("i", [-1, 0]).tobytes()],
        "log_sigma_float64": [bytes(16)],
        "room_tokens_float64": [bytes(16)],
        "remaining_tool_s_float64": [bytes(16)],
        "remaining_observed_tokens_float64": [bytes(16)],
        "prompt_int32": [bytes(8)],
        "started_uint8": [bytes(2)],
        "unread_uint8": [bytes(2)],
    }
)


class FuzzedMesh:
    """Channels of all kinds of callers, and names of what tenants have.

    Beta sends the hostile requests; what acme has holds a secret, and half of its names are secrets
    too.
    """

    def __init__(self, mesh: SecureMesh, sealer: Sealer) -> None:
        self._answered: Counter[tuple[str, str]] = Counter()
        self._mesh = mesh
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        self._sealer = sealer
        self._names: dict[str, str] = {
            "<e0>": mesh.where.sidecars["e0"],
            "<e1>": mesh.where.sidecars["e1"],
        }
        self._secrets = [SECRET]
        self._acme_job = ""
        self._turn = 0
        self._processes = {
            name: mesh.plane.child(name)
            for name in [*mesh.where.services, "sidecar-e0", "sidecar-e1", "nats"]
        }

    async def close(self) -> None:
        """Hand the channels back."""
        for channel in self._channels.values():
            await channel.close()

    async def ask(self, identity: str, request: Message) -> Any:
        """The answer to a good request."""
        rpc = PATHS[request.DESCRIPTOR.full_name]
        channel = self._channel(identity, SERVICES[rpc.containing_service.full_name])
        call = channel.unary_unary(_path(rpc), type(request).SerializeToString, _reader(rpc))
        return await call(request, timeout=ANSWER_S)

    async def send_all(self, requests: Sequence[Request]) -> list[str]:
        """Send these at once, then a good request to every service. Returns what is wrong with the
        answers."""
        problems = await asyncio.gather(*(self._send(request) for request in requests))
        await self.answer_good_requests()
        return [problem for problem in problems if problem]

    def answers_to(self, rpc: MethodDescriptor) -> Counter[str]:
        """How often it was answered with what: OK, or the reason of its error."""
        return Counter(
            {said: count for (name, said), count in self._answered.items() if name == rpc.name}
        )

    async def _send(self, request: Request) -> str:
        """What is wrong with the answer to a hostile request; empty: nothing."""
        rpc = request.rpc
        data = self._bytes_of(request)
        identity = (
            f"{request.kind}-{TENANT}" if request.kind in ("client", "trainer") else request.kind
        )
        channel = self._channel(identity, SERVICES[rpc.containing_service.full_name])
        call: Any = (channel.unary_stream if rpc.server_streaming else channel.unary_unary)(
            _path(rpc)
        )
        waits = rpc.name in WAITING
        timeout_s = WAIT_S if waits else ANSWER_S
        answers: list[bytes] = []
        problem, reason = "", "OK"
        try:
            if rpc.server_streaming:
                await self._read_few(call(data, timeout=timeout_s), answers)
            else:
                answers.append(await call(data, timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            said = dict(error.trailing_metadata() or ()).get(DETAILS_KEY, b"")
            answers += [said, (error.details() or "").encode()]
            code, reason, fields, _ = error_of(error)
            late = code is grpc.StatusCode.DEADLINE_EXCEEDED
            reason = reason or code.name
            if code in DEFECTS or (late and not waits) or not (said or late):
                problem = f"{code.name} {reason}: {error.details()}"
            elif code is grpc.StatusCode.INVALID_ARGUMENT and not all(fields or [""]):
                problem = f"{reason} names no field: {error.details()}"
        self._answered[rpc.name, reason] += 1
        if identity.endswith(f"-{TENANT}") and any(
            secret.encode() in answer for answer in answers for secret in self._secrets
        ):
            problem = f"it tells what is {OTHER}'s: {answers!r}"
        return problem and f"{request!r} sent as {data[:2000]!r} was answered with {problem}"

    async def settle(self) -> None:
        """Bring the mesh into order, and give beta what the next requests name: nothing is vacuous
        for lack of it."""
        await self._wake_engine()
        await self.ask("operator", scheduler.SetPolicyRequest(request_id=_fresh(), policy=_POLICY))
        for name in ("e0", "e1"):
            await self.ask(
                "operator",
                scheduler.DrainEngineRequest(request_id=_fresh(), engine_id=name, undo=True),
            )
        weights = scheduler.SetWeightsRequest(
            request_id=_fresh(), weight_version=f"w{_fresh()}", model_path="fake/model"
        )
        await self.ask("operator", weights)
        await self.ask(f"client-{OTHER}", scheduler.RenewJobRequest(job_id=self._acme_job))
        await self._give_session(f"client-{OTHER}", self._names, "acme ")
        await self._give(f"client-{TENANT}", self._names, "")

    async def give_acme(self) -> None:
        """Acme has what beta has; some of it beta knows by name."""
        await self._give(f"client-{OTHER}", self._names, "acme ")
        self._acme_job = self._names["<acme job>"]
        hidden: dict[str, str] = {}
        await self._give(f"client-{OTHER}", hidden, "")
        self._secrets += hidden.values()

    async def _give(self, identity: str, names: dict[str, str], whose: str) -> None:
        secret = identity == f"client-{OTHER}"
        prompt_id = SECRET if secret else "p"

        def name(what: str, value: str) -> None:
            names[f"<{whose}{what}>"] = value

        name("job name", f"job-{_fresh()}")
        job = await self.ask(
            identity, scheduler.OpenJobRequest(request_id=_fresh(), job=names[f"<{whose}job name>"])
        )
        name("job", job.job_id)
        opened = await self.ask(
            identity,
            scheduler.OpenTrajectoryRequest(
                request_id=_fresh(), prompt_id=prompt_id, prompt_tokens=8, job_id=job.job_id
            ),
        )
        trajectory_id = opened.trajectory.trajectory_id
        name("trajectory", trajectory_id)
        spec = rollout.RolloutSpec(samples_per_prompt=4, max_staleness=-1, prompt_ids=[prompt_id])
        made = await self.ask(
            identity, rollout.CreateRolloutRequest(request_id=_fresh(), spec=spec)
        )
        rollout_id = made.rollout.rollout_id
        name("rollout", rollout_id)
        done = finished(trajectory_id, prompt_id)
        await self.ask(
            identity,
            rollout.SubmitTrajectoryRequest(
                request_id=_fresh(), rollout_id=rollout_id, trajectory=done
            ),
        )
        beginning = rollout.TokenChunk(
            trajectory_id=_fresh(),
            prompt_id=prompt_id,
            sample=1,
            tokens=done.tokens,
            loss_mask=done.loss_mask,
            logprobs=done.logprobs,
        )
        await self.ask(identity, rollout.PushTokensRequest(rollout_id=rollout_id, chunk=beginning))
        name("batch", _fresh())
        batch = rollout.GetBatchRequest(
            request_id=names[f"<{whose}batch>"], rollout_id=rollout_id, max_groups=1
        )
        await self.ask(identity, batch)
        said = json.dumps({"answer": prompt_id, "expected": "x"})
        score = rewards.ScoreTrajectoryRequest(
            request_id=_fresh(),
            trajectory_id=trajectory_id,
            reward="exact_match",
            arguments_json=said,
        )
        name("reward", (await self.ask(identity, score)).reward.reward_id)
        await self._give_session(identity, names, whose)
        if not secret:
            await self._give_services(names)

    async def _give_session(self, identity: str, names: dict[str, str], whose: str) -> None:
        """Open a session, unless the one that has the name is open."""
        name = f"<{whose}session>"
        if name not in names or not await self._is_open(identity, names[name]):
            session = tools.OpenSessionRequest(
                request_id=_fresh(),
                tool="frozen_lake",
                arguments_json=LAKE,
                trajectory_id=names[f"<{whose}trajectory>"],
            )
            names[name] = (await self.ask(identity, session)).session.session_id

    async def _give_services(self, names: dict[str, str]) -> None:
        names["<ticket>"] = f"{TENANT}::{_fresh()}"
        info = engine.EngineInfo(
            engine_id="ghost",
            address="127.0.0.1:1",
            model="m",
            weight_version="1",
            slot_limit=1,
            tensor_parallel=1,
            kv_tokens_capacity=1000,
            max_context_tokens=1000,
            hardware_tags=["ghostly"],
        )
        lease = await self.ask(
            "sidecar", scheduler.RegisterEngineRequest(request_id=_fresh(), info=info)
        )
        names["<lease>"] = lease.lease_id
        move = migrator.StartMigrationRequest(
            request_id=_fresh(),
            trajectory_id=names["<trajectory>"],
            cache_salt="default",
            allow_prefill=True,
            source=migrator.Endpoint(engine_id="e0", address=names["<e0>"]),
            target=migrator.Endpoint(engine_id="e1", address=names["<e1>"]),
            give_up_after=Duration(seconds=1),
            remaining_tokens=1.0,
        )
        names["<migration>"] = (await self.ask("scheduler", move)).migration.migration_id

    async def _is_open(self, identity: str, session_id: str) -> bool:
        with suppress(grpc.aio.AioRpcError):
            await self.ask(identity, tools.GetSessionRequest(session_id=session_id))
            return True
        return False

    async def _wake_engine(self) -> None:
        await self.ask(f"trainer-{TENANT}", engine.WakeRequest(request_id=_fresh()))
        await self.ask(f"trainer-{TENANT}", engine.ResumeRequest(request_id=_fresh()))
        version = (await self.ask("operator", engine.GetLoadRequest())).load.weight_version
        if version.startswith(INCOMPLETE):
            push = engine.PushWeightsRequest(
                request_id=_fresh(),
                weight_version=version.removeprefix(INCOMPLETE),
                push_id=_fresh(),
                ipc=b"{}",
                last=True,
            )
            await self.ask(f"trainer-{TENANT}", push)
        load = engine.UpdateWeightsRequest(
            request_id=_fresh(), weight_version=f"w{_fresh()}", model_path="fake/model"
        )
        await self.ask("scheduler", load)

    async def answer_good_requests(self) -> None:
        """Fails where a process has died, or one does not answer a good request as it should."""
        dead = {
            name: child.tail()
            for name, child in self._processes.items()
            if child.returncode is not None
        }
        assert not dead, dead
        await self.settle()
        got = await self.ask(
            f"client-{TENANT}",
            scheduler.GetTrajectoryRequest(trajectory_id=self._names["<trajectory>"]),
        )
        assert got.trajectory.trajectory_id == self._names["<trajectory>"]
        query = predictor.Query(trajectory_id="t", prompt_id="p", prompt_tokens=8)
        predicted = await self.ask("scheduler", predictor.PredictRemainingRequest(query=query))
        assert predicted.prediction.remaining_tokens.p90 > 0
        plan = placement.PlanPlacementRequest(
            columns=columns(2),
            engines=[placement.PlacementEngine(engine_id="e0", slot_limit=1, tensor_parallel=1)],
        )
        assert (await self.ask("scheduler", plan)).engine_int32 == bytes(8)
        moves = await self.ask("operator", migrator.ListMigrationsRequest(page_size=1))
        assert len(moves.migrations) == 1
        assert (await self.ask(f"client-{TENANT}", tools.ListToolsRequest())).tools
        assert [token async for token in self._generate()] == expected(PROMPT, 4)

    async def _generate(self) -> Any:
        ticket = Ticket(
            ticket_id=f"{TENANT}::{_fresh()}",
            trajectory_id=f"{TENANT}::{_fresh()}",
            engine_id="e0",
            expires_at=Timestamp(seconds=YEAR_2100_S),
        )
        self._sealer.seal(ticket)
        sampling = SamplingParams(max_new_tokens=4, temperature=0.0)
        request = engine.GenerateRequest(ticket=ticket, prompt=TOKENS, sampling=sampling)
        rpc = PATHS[request.DESCRIPTOR.full_name]
        channel = self._channel(f"client-{TENANT}", "sidecar")
        stream = channel.unary_stream(_path(rpc), type(request).SerializeToString, _reader(rpc))
        async for response in stream(request, timeout=ANSWER_S):
            for token in array("i", response.tokens.token_ids.int32_le):
                yield token

    async def _read_few(self, stream: Any, answers: list[bytes]) -> None:
        """A watch says nothing more while nothing changes, so it is left after a while."""
        try:
            async with asyncio.timeout(WAIT_S):
                while len(answers) < FEW and (answer := await stream.read()) is not grpc.aio.EOF:
                    answers.append(answer)
        except TimeoutError:
            pass
        finally:
            stream.cancel()

    def _bytes_of(self, request: Request) -> bytes:
        message = type(request.message)()
        message.CopyFrom(request.message)
        fill(message, lambda name: self._names.get(name, name).replace(FRESH, _fresh()))
        tickets = [part for part in messages_in(message) if isinstance(part, Ticket)]
        for ticket in tickets if request.sealed else ():
            with suppress(
                PermissionDenied
            ):  # a name of another tenant, which the scheduler would not seal
                for own in owned_names(ticket.DESCRIPTOR):
                    own(ticket, TENANT, "")
                self._sealer.seal(ticket)
        data = message.SerializeToString()
        return request.damage(data) if request.damage else data

    def _channel(self, identity: str, service: str) -> grpc.aio.Channel:
        if (identity, service) not in self._channels:
            self._channels[identity, service] = self._mesh.channel(identity, service)
        return self._channels[identity, service]


_POLICY = scheduler.Policy(
    ordering=scheduler.ORDERING_PROGRESSIVE,
    objective=scheduler.OBJECTIVE_MAKESPAN,
    placement=scheduler.PLACEMENT_RULE_LEAST_LOAD,
)


def _fresh() -> str:
    return f"f{uuid.uuid4().hex}"


def _path(rpc: MethodDescriptor) -> str:
    return f"/{rpc.containing_service.full_name}/{rpc.name}"


def _reader(rpc: MethodDescriptor) -> Any:
    return GetMessageClass(rpc.output_type).FromString

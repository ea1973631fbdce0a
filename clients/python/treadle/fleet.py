"""Call all engines of a mesh at once for a trainer: load weights, give memory away, pause.

`treadle.Client` has these calls; they are a class of their own since they are about engines, not
about trajectories.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Iterable

from google.protobuf.message import Message

from treadle import weights
from treadle.connection import Mesh, request_id
from treadle.engine.v1 import engine_pb2
from treadle.weights import WeightPush


class FleetCalls:
    """Calls to all engines, of a client that is connected."""

    def _reach(self) -> Mesh:
        """Return the mesh. Raises RuntimeError before `async with`."""
        raise NotImplementedError

    async def update_weights(
        self, model_path: str, weight_version: str, timeout_s: float | None = None
    ) -> dict[str, str]:
        """Have all engines load weights; return once each of them serves the version or could not
        load it.

        model_path: a folder or file that each engine's machine can read. Engines that join later
        load it too. Returns the error of each engine that could not, by id; it gets no steps, and
        the scheduler requests the load again. Errors: TreadleError INVALID_ARGUMENT,
        DEADLINE_EXCEEDED (default timeouts.weights_s), after which the update still continues.
        """
        mesh = self._reach()
        desired = await weights.set_weights(mesh, weight_version, model_path)
        return await weights.until_served(mesh, desired, timeout_s or mesh.timeouts.weights_s)

    async def push_weights(
        self,
        weight_version: str,
        pushes: AsyncIterable[WeightPush] | Iterable[WeightPush],
        model_path: str = "",
        timeout_s: float | None = None,
    ) -> dict[str, str]:
        """Push weights to all registered engines that do not serve the version; return once they
        serve it.

        pushes: the parts. Each goes to all engines at once. A "distributed" part is broadcast by
        the trainer: `pushes` is advanced as soon as the part is on its way, so that an async
        generator broadcasts in the line after `yield`, without blocking the event loop. After a
        "tensor" or "ipc" part it is advanced once all engines have copied it. A part must be at
        most 16 MiB of JSON. model_path: from where engines that the push has missed, or that join
        later, load the same version; without it they get no step until it is pushed to them again.
        timeout_s: of each part (default timeouts.weights_s).

        Returns the error of each engine that has not taken the push, by id: it runs nothing until
        the version is pushed again or loaded. Where one engine fails in a "distributed" part, all
        have failed, and what `pushes` waits for is cancelled: a broadcast needs all ranks. Errors:
        ValueError; TreadleError INVALID_ARGUMENT, DEADLINE_EXCEEDED; what `pushes` raises.
        """
        mesh = self._reach()
        return await weights.push_weights(
            mesh, weight_version, pushes, model_path, timeout_s or mesh.timeouts.weights_s
        )

    async def join_weights_group(
        self,
        master_address: str,
        trainer: Callable[[int], Awaitable[object]],
        *,
        group_name: str = "treadle",
        backend: str = "nccl",
        trainer_ranks: int = 1,
        engine_ids: Collection[str] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, str]:
        """Join all engines, or those named, to a process group with the trainer, for "distributed"
        parts.

        master_address: host:port of the trainer's rank 0, which broadcasts. trainer: called with
        the world size; joins the trainer's ranks, 0 to trainer_ranks - 1, meanwhile, without
        blocking the event loop. The engines have the ranks after these, each as many as its tensor
        parallelism, in the order of their ids. They generate nothing until all ranks are there.
        Returns errors by engine id; where one engine fails, all have failed.
        """
        mesh = self._reach()
        return await weights.join_group(
            *(mesh, master_address, trainer, group_name, backend, trainer_ranks, engine_ids),
            timeout_s or mesh.timeouts.weights_s,
        )

    async def leave_weights_group(
        self, group_name: str = "treadle", engine_ids: Collection[str] | None = None
    ) -> dict[str, str]:
        """Take all engines, or those named, out of a process group. Returns errors by engine id."""
        request = engine_pb2.LeaveWeightsGroupRequest(
            request_id=request_id(), group_name=group_name
        )
        return await self._call_engines("LeaveWeightsGroup", request, engine_ids)

    async def sleep(self, tags: Collection[str] = (), *, abort: bool = False) -> dict[str, str]:
        """Take the device memory of all engines for a trainer; their steps wait until `wake` has
        given all of it back.

        tags: of "weights", "kv_cache" and "cuda_graph"; none: all. abort: end running steps with
        the tokens they have. After "weights" an engine has no weights that may be used until they
        are pushed or loaded, unless SGLang runs with --enable-weights-cpu-backup. Returns errors by
        engine id, e.g. of an engine without --enable-memory-saver.
        """
        mode = engine_pb2.PAUSE_MODE_ABORT if abort else engine_pb2.PAUSE_MODE_KEEP
        return await self._call_engines(
            "Sleep", engine_pb2.SleepRequest(request_id=request_id(), mode=mode, tags=tags)
        )

    async def wake(self, tags: Collection[str] = ()) -> dict[str, str]:
        """Give memory back to all engines. tags: as of `sleep`; none: all. Returns errors by engine
        id."""
        return await self._call_engines(
            "Wake", engine_pb2.WakeRequest(request_id=request_id(), tags=tags)
        )

    async def pause(self, *, abort: bool = False) -> dict[str, str]:
        """Stop generation on all engines until `resume`. abort: end running steps with the tokens
        that they have, in place of keeping them. Returns errors by engine id."""
        mode = engine_pb2.PAUSE_MODE_ABORT if abort else engine_pb2.PAUSE_MODE_KEEP
        return await self._call_engines(
            "Pause", engine_pb2.PauseRequest(request_id=request_id(), mode=mode)
        )

    async def resume(self) -> dict[str, str]:
        """Resume generation on all engines after `pause`. Returns errors by engine id."""
        return await self._call_engines("Resume", engine_pb2.ResumeRequest(request_id=request_id()))

    async def _call_engines(
        self, name: str, request: Message, engine_ids: Collection[str] | None = None
    ) -> dict[str, str]:
        mesh = self._reach()
        return await weights.call_all(
            mesh,
            await weights.list_engines(mesh, engine_ids),
            lambda stub: getattr(stub, name)(request, timeout=mesh.timeouts.weights_s),
        )

"""Report to the mesh what verl's trainer does to the engines.

verl finds this module by the entry point `verl.plugins` of treadle-client, in each process that
imports verl. Where TREADLE_ADDRESS is set, it puts a replica of its own in the place of verl's
"sglang". While the trainer has an engine (an abort before new weights, or memory that sleeps), the
mesh is paused, so that no step and no probe reaches it. Each engine names its weights by the
trainer's step, which version spans contain and under which KV is kept. Written against verl 0.9.1.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

from treadle.adapters.calls import call_mesh, client_at, require_no_errors

NAME_S = 30.0  # an engine that loads weights may answer late
FIRST_VERSION = "default"  # SGLang's name for weights that have no other
MEMORY = ("weights", "kv_cache", "cuda_graph")  # SGLang's tags of memory that it can give away


class Hold:
    """Pause of the mesh that lasts while the trainer has at least one of the engines. It lives in
    the trainer's process."""

    def __init__(self) -> None:
        self._holders: set[object] = set()
        self._lock = threading.Lock()  # each call of verl may come with an event loop of its own

    async def begin(self, holder: object, address: str, *, abort: bool) -> None:
        """Pause the mesh for `holder`, and return once no step runs. abort: running steps end with
        the tokens that they have."""
        with self._lock:
            self._holders.add(holder)
        async with client_at(address) as client:
            require_no_errors(await client.pause(abort=abort))

    async def let_go(self, holder: object, address: str) -> None:
        """End the pause for `holder`; the last holder that ends it resumes the mesh."""
        with self._lock:
            last = self._holders == {holder}
            self._holders.discard(holder)
        if last:
            async with client_at(address) as client:
                require_no_errors(await client.resume())

    def end(self, address: str) -> None:
        """Resume the mesh, as all engines are back: verl does not report engines that wake with new
        weights, only that it generates."""
        with self._lock:
            held, self._holders = bool(self._holders), set()
        if held:
            call_mesh(address, lambda client: client.resume())


HOLD = Hold()


def name_weights(url: str, version: str) -> None:
    """Have the engine at `url` name its weights by this version. Raises OSError."""
    body = json.dumps({"new_version": version, "abort_all_requests": False}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/update_weight_version", body, headers, method="POST")
    with urllib.request.urlopen(request, timeout=NAME_S):
        pass


def replica_in_mesh(loaded: Any, remote: Callable[[Any], Any], address: str) -> Any:
    """Return verl's replica `loaded` as a class whose engine is one of the mesh's. remote:
    ray.remote."""

    class Replica(loaded):  # type: ignore[misc]
        server_class: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self._in_mesh:
                self.server_class = remote(
                    _naming(self.server_class.__ray_metadata__.modified_class)
                )

        @property
        def _in_mesh(self) -> bool:
            return not (self.is_reward_model or self.is_teacher_model)

        async def _begin(self, *, abort: bool) -> None:
            if self._in_mesh:
                await HOLD.begin(self.replica_rank, address, abort=abort)

        async def _let_go(self) -> None:
            if self._in_mesh:
                await HOLD.let_go(self.replica_rank, address)

        async def abort_all_requests(self, reject_request: bool = False) -> None:
            await self._begin(abort=True)
            await super().abort_all_requests(reject_request=reject_request)

        async def resume_generation(self) -> None:
            await super().resume_generation()
            await self._let_go()

        async def sleep(self) -> None:
            await self._begin(abort=True)
            await super().sleep()

        async def wake_up(self) -> None:
            await super().wake_up()
            await self._let_go()

    return Replica


def _naming(server: Any) -> Any:
    """Return verl's server of an engine as a class that names the engine's weights by the trainer's
    step. While memory is given away, the name has the form that a sidecar reads: a sidecar that
    starts in that time is not in any pause, and must not probe."""

    class Server(server):  # type: ignore[misc]
        _version, _asleep = FIRST_VERSION, frozenset[str]()

        async def launch_server(self, *args: Any, **kwargs: Any) -> None:
            await super().launch_server(*args, **kwargs)
            if (
                self.node_rank == 0
            ):  # this node has the HTTP server, and all calls about memory pass through its manager
                self._follow_memory(self.tokenizer_manager)

        async def set_global_steps(self, global_steps: int) -> None:
            await super().set_global_steps(global_steps)
            self._version = str(global_steps)
            await self._name(self._asleep)

        def _follow_memory(self, manager: Any) -> None:
            release, resume = manager.release_memory_occupation, manager.resume_memory_occupation

            async def release_named(request: Any, *more: Any) -> Any:
                await self._name(self._asleep | set(request.tags or MEMORY))
                return await release(request, *more)

            async def resume_named(request: Any, *more: Any) -> Any:
                answer = await resume(request, *more)
                await self._name(self._asleep - set(request.tags or MEMORY))
                return answer

            manager.release_memory_occupation, manager.resume_memory_occupation = (
                release_named,
                resume_named,
            )

        async def _name(self, asleep: frozenset[str]) -> None:
            self._asleep = asleep
            host, port = self.get_server_address()
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            name = f"asleep-{'+'.join(sorted(asleep))}:{self._version}" if asleep else self._version
            await asyncio.to_thread(name_weights, url, name)

    return Server


def register(address: str) -> None:
    """Put the replica of the mesh in the place of verl's, in this process."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    verls = RolloutReplicaRegistry._registry["sglang"]

    def load() -> Any:
        import ray

        return replica_in_mesh(verls(), ray.remote, address)

    RolloutReplicaRegistry.register("sglang", load)
    _registered.append(address)


def require_registered() -> None:
    """Raise RuntimeError where verl would abort and put to sleep engines without the mesh's
    knowledge: verl does not report a plugin that it could not load."""
    if not _registered:
        raise RuntimeError(
            "the mesh is not told what verl does to its engines: set TREADLE_ADDRESS in the "
            "trainer's environment, and "
            "VERL_USE_EXTERNAL_PLUGINS to auto, or to a list with treadle in it"
        )


_registered: list[str] = []
if os.environ.get("TREADLE_ADDRESS"):
    register(os.environ["TREADLE_ADDRESS"])

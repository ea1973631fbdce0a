"""GPU services as a file declares them (functions/declarations.py reads it).

[gpus]
gpu_bytes = 80_000_000_000
nodes = { a = [0, 1] }

[[gpu_service]]
name = "judge-7b"
bytes_per_gpu = { 1 = 30_000_000_000 }
servers = [
  { node = "a", first = 0, degree = 1, url = "http://127.0.0.1:30000" },
  { node = "a", first = 1, degree = 1, url = "http://127.0.0.1:30001" },
]
"""

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from treadle_core.tools.chunks import NODE_GPUS
from treadle_runtime.config import url

from treadle_tools.gpu.servers import Gpus, GpuService, Server, places


class _Declared(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class DeclaredServer(_Declared):
    """See servers.Server."""

    node: str
    first: int
    degree: int
    url: str

    @field_validator("url")
    @classmethod
    def _url_is_a_url(cls, value: str) -> str:
        return url(value, ("http", "https"), "http://127.0.0.1:30000").rstrip("/")


class DeclaredGpus(_Declared):
    """See servers.Gpus."""

    gpu_bytes: int = Field(gt=0)
    nodes: dict[str, list[int]] = Field(min_length=1)
    turn_s: float = Field(default=30.0, ge=0)

    @field_validator("nodes")
    @classmethod
    def _gpus_are_numbers(cls, value: dict[str, list[int]]) -> dict[str, list[int]]:
        if any(not set(numbers) <= set(range(NODE_GPUS)) for numbers in value.values()):
            raise ValueError(f"the GPUs of a node are numbers from 0 to {NODE_GPUS - 1}")
        return value


class DeclaredService(_Declared):
    """See servers.GpuService."""

    name: str = Field(min_length=1)
    bytes_per_gpu: dict[int, int] = Field(min_length=1)
    servers: list[DeclaredServer]
    serial_share: float = Field(default=0.1, ge=0, le=1)
    at_once: int = Field(default=64, ge=1)

    @model_validator(mode="after")
    def _degrees_agree(self) -> "DeclaredService":
        served = {server.degree for server in self.servers}
        if served != set(self.bytes_per_gpu):
            raise ValueError(
                f"servers are of {sorted(served)} GPUs, `bytes_per_gpu` is of {sorted(self.bytes_per_gpu)}: "
                "name the same"
            )
        return self

    def service(self) -> GpuService:
        """The noun."""
        servers = tuple(Server(self.name, one.degree, one.node, one.first, one.url) for one in self.servers)
        return GpuService(self.name, self.bytes_per_gpu, servers, self.serial_share, self.at_once)


def gpus_of(gpus: DeclaredGpus, services: list[DeclaredService]) -> Gpus:
    """All of them, where any chunk that a service may be given has its server. Raises ValueError that says which has
    not.
    """
    nodes = {node: tuple(sorted(set(numbers))) for node, numbers in gpus.nodes.items()}
    for service in services:
        for degree in service.bytes_per_gpu:
            there = sorted((one.node, one.first) for one in service.servers if one.degree == degree)
            wanted = sorted(places(nodes, degree))
            if not wanted:
                raise ValueError(f"gpu_service {service.name!r}: no node has {degree} GPUs side by side")
            if there != wanted:
                raise ValueError(
                    f"gpu_service {service.name!r}: any chunk of {degree} GPUs may be its own, so servers must be at "
                    f"{wanted} (node, first); they are at {there}"
                )
    return Gpus(nodes, gpus.gpu_bytes, tuple(service.service() for service in services), gpus.turn_s)

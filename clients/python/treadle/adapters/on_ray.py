"""Find the mesh of a Ray cluster (TREADLE_ADDRESS=ray), for adapters in processes of a Ray job.

`treadle up --ray` keeps a named actor, `treadle` in the namespace `treadle`, which returns the
addresses of the mesh and gives a process its certificate. Used with Ray 2.60.
"""

from __future__ import annotations

import os
import stat
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

import ray

ADDRESS = "ray"  # in the place of host:port
ACTOR = NAMESPACE = "treadle"
ANSWER_S = 60.0


@dataclass(frozen=True)
class RayMesh:
    """Addresses and credentials of a Ray cluster's mesh. address: of the scheduler, host:port.
    tls_folder: of this process's certificate, None where the mesh has none. gateway: URL for
    frameworks that speak HTTP. api_key: what the gateway requires; empty: nothing."""

    address: str
    tls_folder: Path | None
    gateway: str
    api_key: str


def find_mesh(identity: str = "trainer-default") -> RayMesh:
    """Request the mesh of this process's Ray cluster from its actor. identity: the folder of a
    certificate (docs/identity.md). Raises RuntimeError where this process is in no Ray job, or the
    cluster has no mesh."""
    if not ray.is_initialized():
        raise RuntimeError(
            f"TREADLE_ADDRESS={ADDRESS} is for processes of a Ray job: call ray.init first"
        )
    try:
        actor = ray.get_actor(ACTOR, namespace=NAMESPACE)
    except ValueError:
        raise RuntimeError(
            "this Ray cluster has no mesh: treadle up --ray auto starts one"
        ) from None
    found = ray.get(actor.describe.remote(), timeout=ANSWER_S)
    files = ray.get(actor.credentials.remote(identity), timeout=ANSWER_S) if found["secure"] else {}
    folder = _keep(f"{identity}@{found['scheduler']}", files) if files else None
    return RayMesh(found["scheduler"], folder, found["gateway"], found["api_key"])


def _keep(name: str, files: dict[str, bytes]) -> Path:
    """Write these files into a folder of this name and return it. It is the same for all processes
    of this user on this machine: Ray kills processes, which then remove nothing. Raises
    RuntimeError where the folder around it is another user's."""
    folder = Path(tempfile.gettempdir()) / f"treadle-ray-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RuntimeError(
            f"{folder} must be a folder that this user alone can read: it is for the key of a mesh"
        )
    (folder / name).mkdir(exist_ok=True)
    for file, content in files.items():
        part = folder / name / f"{file}.{uuid.uuid4().hex}"
        part.write_bytes(content)
        part.replace(folder / name / file)  # at once: another process may be reading it
    return folder / name

"""The client stands on grpcio and protobuf alone, so that an RL framework can take it in."""

import json
import subprocess
import sys

_PROGRAM = """
import json, sys
import grpc.aio, google.protobuf.any_pb2
before = set(sys.modules)
import treadle
for name in treadle.__all__:
    getattr(treadle, name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_importing_treadle_brings_nothing_beyond_the_standard_library_grpc_and_protobuf() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    brought = json.loads(done.stdout)
    assert "treadle.client" in brought
    ours = {"treadle", "grpc", "google"}
    foreign = [
        name for name in brought if name.partition(".")[0] not in ours | sys.stdlib_module_names
    ]
    assert foreign == []
    assert [
        name
        for name in brought
        if name.startswith("google.") and not name.startswith("google.protobuf")
    ] == []


def test_what_packs_trajectories_for_a_trainer_needs_numpy_and_neither_torch_nor_pyarrow() -> None:
    """In a process of its own, where neither can be imported."""
    program = (
        "import sys; sys.modules.update(torch=None, pyarrow=None); import treadle.training "
        "as t; print(t.pack)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

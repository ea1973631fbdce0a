"""Prepare trajectories for a trainer's own step: pack them into rows without padding, compute group
advantages, and measure how far its logprobs are from those of the rollout.

Needs numpy (`pip install 'treadle-client[training]'`), which `import treadle` does not.
`treadle.training.arrow` needs pyarrow and `treadle.training.dataset` PyTorch; both are imported by
name. No function here tokenizes: the ids that are trained on are those that were sampled.
"""

from treadle.training.objective import (
    Drift,
    DriftReport,
    group_advantages,
    measure_drift,
    measure_staleness,
)
from treadle.training.packing import IGNORED, Normalisation, PackedRow, pack

__all__ = [
    "IGNORED",
    "Drift",
    "DriftReport",
    "Normalisation",
    "PackedRow",
    "group_advantages",
    "measure_drift",
    "measure_staleness",
    "pack",
]

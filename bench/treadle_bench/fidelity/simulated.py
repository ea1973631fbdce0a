"""The same workload through the simulator, on engines fitted from what was measured on the live ones.

The simulated planner sees what the live one sees: the decode curve that each sidecar declares, not the measured one.
Predictions come from the product's own estimator on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

from treadle import Span
from treadle.scheduler.v1.scheduler_pb2 import RegisteredEngine
from treadle_core.model import DecodeCurve
from treadle_sim.cluster import Cluster
from treadle_sim.driver import Driver
from treadle_sim.engine_model import EngineModel, StepCurve
from treadle_sim.fitting.curves import MeasuredEngine
from treadle_sim.outcome import Times
from treadle_sim.predictors import Siblings
from treadle_sim.systems import System
from treadle_sim.workloads.workload import Workload

from treadle_bench.fidelity.control import Control
from treadle_bench.fidelity.live import Play, Played


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredCurve(StepCurve):
    """A measured curve of which planners see what the sidecar declared."""

    declared: DecodeCurve

    def linear(self, slots: int) -> DecodeCurve:
        """The declaration."""
        return self.declared


def engine_models(engines: Sequence[RegisteredEngine], measured: Sequence[MeasuredEngine]) -> list[EngineModel]:
    """The engines for the simulator; `measured` in the order of `engines`."""
    models = []
    for engine, fitted in zip(engines, measured, strict=True):
        said = engine.info.decode_curve
        declared = DecodeCurve(said.base_s, said.per_sequence_s, said.per_kv_token_s, said.prefill_tokens_per_s)
        model = fitted.engine
        models.append(replace(model, curve=DeclaredCurve(**asdict(model.curve), declared=declared)))
    return models


def slowness(measured: MeasuredEngine, rows: Sequence[Mapping[str, float]]) -> float:
    """How much longer the steps of `rows` took than the profile has it, as a factor. Raises ValueError without rows."""
    curve = measured.engine.curve
    return fmean(
        row["step_s"] / (curve.decode_s(row["batch"]) + curve.per_kv_token_s * row["kv_tokens"]) for row in rows
    )


def slowed(model: EngineModel, factor: float) -> EngineModel:
    """The same engine when everything on it takes `factor` times as long; what it declares stays."""
    curve = model.curve
    return replace(
        model,
        curve=replace(
            curve,
            step_s=tuple(factor * step_s for step_s in curve.step_s),
            per_kv_token_s=factor * curve.per_kv_token_s,
            prefill_fixed_s=factor * curve.prefill_fixed_s,
            prefill_token_s=factor * curve.prefill_token_s,
            prefill_pair_s=factor * curve.prefill_pair_s,
            prefill_square_s=factor * curve.prefill_square_s,
        ),
    )


def simulate(workload: Workload, models: Sequence[EngineModel], system: System, control: Control) -> Play:
    """One rollout under the system's policy."""
    cluster = Cluster(tuple(models), link=control.link, latencies=control.latencies)
    driver = Driver(workload, cluster, system.policy, system.tuning, Siblings(workload), record=True)
    outcome = driver.run()
    return Play(tuple(_played(times) for times in outcome.times), outcome.migrations)


def _played(times: Times) -> Played:
    """A step ends with its tool call, so the tool calls before a span count its turn."""
    spans, turn = [], 0
    for span in sorted(times.spans, key=lambda span: (span.start_s, span.end_s)):
        spans.append(Span(span.what, span.start_s, span.end_s, f"engine-{span.engine}", turn))  # type: ignore[arg-type]
        turn += span.what == "tool"
    return Played(times.finished_s, tuple(spans), times.preemptions, cached_tokens=0)

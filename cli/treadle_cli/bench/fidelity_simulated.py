"""The same workload through the simulator, on engines fitted from what was measured on the live ones.

The simulated planner sees what the live one sees: the decode curve that each sidecar declares, not the measured one.
Predictions come from the product's own estimator on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from treadle import Span
from treadle.scheduler.v1.scheduler_pb2 import RegisteredEngine
from treadle_core.model import DecodeCurve
from treadle_sim.cluster import Cluster
from treadle_sim.driver import Driver
from treadle_sim.engine_model import EngineModel, StepCurve
from treadle_sim.measured_profile import MeasuredEngine, fit_measured
from treadle_sim.outcome import Times
from treadle_sim.predictors import Siblings
from treadle_sim.systems import System
from treadle_sim.workload import Workload

from treadle_cli.bench.fidelity_control import Control
from treadle_cli.bench.fidelity_live import Play, Played


@dataclass(frozen=True, slots=True)
class DeclaredCurve(StepCurve):
    """A measured curve of which planners see what the sidecar declared."""

    declared: DecodeCurve

    def linear(self, slots: int) -> DecodeCurve:
        """The declaration."""
        return self.declared


def fitted(profiles: Mapping[str, dict[str, Any]]) -> dict[str, MeasuredEngine]:
    """By engine id. Raises MeasuredProfileError."""
    return {engine_id: fit_measured(document) for engine_id, document in profiles.items()}


def engine_models(engines: Sequence[RegisteredEngine], measured: Mapping[str, MeasuredEngine]) -> list[EngineModel]:
    """The engines for the simulator, in the order given."""
    models = []
    for engine in engines:
        said = engine.info.decode_curve
        declared = DecodeCurve(said.base_s, said.per_sequence_s, said.per_kv_token_s, said.prefill_tokens_per_s)
        model = measured[engine.info.engine_id].engine
        models.append(replace(model, curve=DeclaredCurve(**asdict(model.curve), declared=declared)))
    return models


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

"""Merges engines that a rollout's tail leaves idle into one of a higher degree, on the same GPUs.

Engines are merged once every trajectory has begun, where no trajectory that goes on has one of them as its engine, or
only a few have. They leave the mesh at once, and steps that they still had go on elsewhere with a new prefill; after
`switch_s` the new engine registers, empty. Which trajectories move there is the controller's decision: the new engine
declares that KV does not get to it but is prefilled again.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from treadle_sim.engine_model import EngineModel
from treadle_sim.outcome import Progress
from treadle_sim.timeline import Timeline

HOST_GPUS = 8  # an engine's GPUs are of one host


@dataclass(frozen=True, slots=True)
class Merging:
    """switch_s: from the end of the merged engines to the new one. most_left: trajectories that the merged engines may
    still have together; 0: only idle ones are merged. models: the engines to merge into, one a degree."""

    switch_s: float
    most_left: int = 0
    models: tuple[EngineModel, ...] = ()


@dataclass(slots=True)
class _Placed:
    """An engine of the mesh by its index, and its GPUs. fresh: it was merged, and no trajectory has come yet."""

    engine: int
    gpus: int
    first_gpu: int
    fresh: bool = False


@dataclass
class Merger:
    """Looks for engines to merge. Owns which GPUs each engine has; engines are laid out largest first.

    trajectories: all of the rollout. is_down: whether an engine has failed. retire: takes an engine out of the mesh.
    start: adds an engine to it and returns its index. An engine that was merged is not merged again before a trajectory
    has come.
    """

    merging: Merging
    trajectories: Sequence[Progress]
    timeline: Timeline
    is_down: Callable[[int], bool]
    retire: Callable[[int], None]
    start: Callable[[EngineModel], int]
    _placed: list[_Placed] = field(default_factory=list)

    def lay_out(self, engines: Sequence[EngineModel]) -> None:
        """Give the engines that the rollout begins with their GPUs."""
        first_gpu = 0
        for index in sorted(range(len(engines)), key=lambda index: -engines[index].gpus):
            self._placed.append(_Placed(index, engines[index].gpus, first_gpu))
            first_gpu += engines[index].gpus

    def look(self) -> None:
        """Merge what can be merged now, into the highest degree first."""
        going = [progress for progress in self.trajectories if not progress.times.finished_s]
        if not going or any(progress.engine < 0 for progress in going):
            return
        left = Counter(progress.engine for progress in going)
        for each in self._placed:
            each.fresh = each.fresh and not left[each.engine]
        lowest = min((each.gpus for each in self._placed if left[each.engine]), default=HOST_GPUS)
        longest = max(progress.work.final_context_tokens for progress in going)
        for model in sorted(self.merging.models, key=lambda model: -model.gpus):
            if model.gpus > lowest and model.kv_tokens >= longest:
                self._merge_into(model, left)

    def _merge_into(self, model: EngineModel, left: Counter[int]) -> None:
        small = [
            each for each in self._placed if each.gpus < model.gpus and not each.fresh and not self.is_down(each.engine)
        ]
        for first_gpu in sorted({each.first_gpu // model.gpus * model.gpus for each in small}):
            block = [each for each in small if first_gpu <= each.first_gpu < first_gpu + model.gpus]
            still = sum(left[each.engine] for each in block)
            if sum(each.gpus for each in block) == model.gpus and still <= self.merging.most_left:
                for each in block:
                    self._placed.remove(each)
                    self.retire(each.engine)
                self.timeline.after(self.merging.switch_s, self._start, model, first_gpu)

    def _start(self, model: EngineModel, first_gpu: int) -> None:
        self._placed.append(_Placed(self.start(model), model.gpus, first_gpu, fresh=True))

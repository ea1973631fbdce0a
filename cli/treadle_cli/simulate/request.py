"""Check the options of `treadle simulate` and make a plan of them.

Every mistake that can be found before the simulation is a UsageProblem here, in one line that names
the option and what would be right.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from treadle_sim.engine_model import EngineModel, profiles
from treadle_sim.fitting import MeasuredProfileError, fit_measured
from treadle_sim.predictors import NAMES
from treadle_sim.systems import BASELINES, HEDDLE, ORACLE, SYSTEMS, TREADLE, Setting, System
from treadle_sim.workloads.parametric import MODELS, WORKLOADS, make
from treadle_sim.workloads.resample import resample
from treadle_sim.workloads.workload import (
    TraceFileError,
    TrajectoryWork,
    Workload,
    groups,
    read_traces,
)

from treadle_cli.exits import UsageProblem
from treadle_cli.simulate.logs import Log

DEFAULT_SYSTEMS = ",".join(system.name for system in (*BASELINES, HEDDLE, TREADLE, ORACLE))
BEST = "best"
DEFAULT_PROMPTS = (
    50  # with 8 GPUs: the papers' hundred trajectories a GPU, and an answer in seconds
)
DEFAULT_SAMPLES = 16
# The model whose tool times a named workload takes if it has none of the requested one; they differ
# by a tenth.
OTHER_TOOL_TIMES = "qwen3-14b"
MOST_TRAJECTORIES = 102_400  # sixteen times the papers' batch


@dataclass(frozen=True, slots=True)
class Request:
    """Options as typed. prompts, samples None: not given, so a trace file runs unchanged. systems
    None: all but Treadle on engines of one degree. log: a logged step, which is simulated in place
    of `workload`."""

    workload: str
    llm: str
    accelerator: str
    gpus: int
    slots: int
    prompts: int | None
    samples: int | None
    systems: str | None
    degrees: str
    predictor: str
    seed: int
    repeats: int
    profile: Path | None
    log: Log | None = None


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """Plan of a simulation. settings: one a seed. degree: of every system's engines, 0 for the best
    or the system's own allocation."""

    workload: str
    settings: tuple[Setting, ...]
    systems: tuple[System, ...]
    degree: int
    from_file: bool
    log: Log | None = None

    @property
    def origin(self) -> str:
        """Return where the engines' curves come from (sim/README.md)."""
        return " and ".join(sorted({model.origin for model in self.settings[0].models}))


def make_plan(request: Request) -> SimulationPlan:
    """Return the plan after checking every option and reading the files. Raises UsageProblem."""
    systems = _parse_systems(
        DEFAULT_SYSTEMS if request.systems is None else request.systems, request.log
    )
    if request.predictor not in NAMES:
        raise UsageProblem(
            f"--predictor: there is no {request.predictor!r}; take one of {', '.join(NAMES)}"
        )
    degree = _parse_degree(request.degrees)
    _check_count(request)
    settings = _make_settings(request, _choose_models(request))
    for setting in settings:
        _check_fit(setting, degree)
    from_file = request.log is not None or request.workload not in WORKLOADS
    name = Path(request.workload).name if from_file else request.workload
    return SimulationPlan(
        request.log.name if request.log else name, settings, systems, degree, from_file, request.log
    )


def _parse_systems(names: str, log: Log | None) -> tuple[System, ...]:
    """Return the systems that are named; for a logged step also the one that stands for how it was
    run, and Treadle."""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if log is not None and chosen:
        chosen = [*filter(None, [log.way]), *chosen, TREADLE.name]
    known = ", ".join(SYSTEMS)
    if not chosen:
        raise UsageProblem(f"--systems: name at least one of {known}, with commas between")
    for name in chosen:
        if name not in SYSTEMS:
            raise UsageProblem(f"--systems: there is no {name!r}; the systems are {known}")
    return tuple(SYSTEMS[name] for name in dict.fromkeys(chosen))


def _parse_degree(text: str) -> int:
    if text == BEST:
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise UsageProblem(f"--degrees: must be {BEST} or a number of GPUs an engine, is {text!r}")
    return int(text)


def _check_count(request: Request) -> None:
    count = (request.prompts or DEFAULT_PROMPTS) * (request.samples or DEFAULT_SAMPLES)
    if count > MOST_TRAJECTORIES:
        raise UsageProblem(
            f"--prompts: at most {MOST_TRAJECTORIES:,} trajectories are simulated, with --samples "
            f"these are {count:,}"
        )


def _choose_models(request: Request) -> tuple[EngineModel, ...]:
    """Return the engines to choose from."""
    if request.profile is not None:
        return (_read_profile(request.profile),)
    if request.log is not None and request.log.model is not None:
        return (request.log.model,)
    shipped = [profile for profile in profiles() if profile.kv_tokens > 0]
    kinds = [
        profile for profile in shipped if profile.accelerator.lower() == request.accelerator.lower()
    ]
    if not kinds:
        known = ", ".join(sorted({profile.accelerator for profile in shipped}))
        raise UsageProblem(
            f"--accelerator: no engine was fitted on {request.accelerator!r}; there are {known}"
        )
    found = [profile for profile in kinds if profile.llm.lower() == request.llm.lower()]
    if not found:
        known = ", ".join(sorted({profile.llm for profile in kinds}))
        raise UsageProblem(
            f"--llm: no engine of {request.llm!r} was fitted on {kinds[0].accelerator}; there are "
            f"{known}"
        )
    return tuple(replace(profile, slots=request.slots * profile.gpus) for profile in found)


def _read_profile(file: Path) -> EngineModel:
    try:
        engine = fit_measured(json.loads(file.read_text())).engine
        if not engine.kv_tokens:
            raise MeasuredProfileError("kv_tokens is 0, and must be what the engine holds")
    except OSError as error:
        raise UsageProblem(f"--profile: {file}: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, MeasuredProfileError) as error:
        raise UsageProblem(f"--profile: {file}: {error} (format: sim/README.md)") from error
    return engine


def _make_settings(request: Request, models: tuple[EngineModel, ...]) -> tuple[Setting, ...]:
    log = request.log
    named = log is None and request.workload in WORKLOADS
    traces = log.works if log else () if named else _read_trace_file(request.workload)
    unchanged = not named and request.prompts is None and request.samples is None
    if request.predictor == "prompt-mean" and unchanged:
        raise UsageProblem(
            "--predictor: prompt-mean knows an earlier epoch, and a trace file that runs as it is "
            "has none; give --prompts, which draws a batch and an earlier epoch from it"
        )
    name, samples = (
        log.name if log else Path(request.workload).name,
        request.samples or DEFAULT_SAMPLES,
    )
    llm = models[0].llm.lower() if models[0].llm.lower() in MODELS else OTHER_TOOL_TIMES

    def draw(seed: int, epoch: int) -> Workload:
        if named:
            return make(
                request.workload,
                request.prompts or DEFAULT_PROMPTS,
                samples,
                seed,
                epoch=epoch,
                llm=llm,
            )
        return resample(
            traces, request.prompts or len(groups(traces)), samples, seed, epoch=epoch, name=name
        )

    settings = []
    for seed in range(request.seed, request.seed + request.repeats):
        batch = Workload(name, traces) if unchanged else draw(seed, 0)
        earlier = () if unchanged else draw(seed, 1).trajectories
        settings.append(Setting(batch, request.gpus, models, earlier, request.predictor, seed=seed))
    return tuple(settings)


def _read_trace_file(name: str) -> tuple[TrajectoryWork, ...]:
    path = Path(name)
    try:
        return read_traces(path)
    except FileNotFoundError:
        raise UsageProblem(
            f"WORKLOAD: there is no workload and no file {name!r}; take {', '.join(WORKLOADS)} or "
            "a trace file (docs/traces.md)"
        ) from None
    except OSError as error:
        raise UsageProblem(f"WORKLOAD: {name}: {error.strerror}") from error
    except TraceFileError as error:
        raise UsageProblem(f"WORKLOAD: {error} (format: docs/traces.md)") from error


def _check_fit(setting: Setting, degree: int) -> None:
    """Check that some engine (of `degree`, if it is not 0) holds the longest trajectory, and that
    the budget divides into such engines."""
    longest = max(work.final_context_tokens for work in setting.workload.trajectories)
    engines = f"{setting.models[0].llm} on {setting.models[0].accelerator}"
    models = [model for model in setting.models if degree in (0, model.gpus)]
    if not models:
        known = ", ".join(str(model.gpus) for model in setting.models)
        raise UsageProblem(
            f"--degrees: there is no engine of {engines} on {degree} GPUs; there are {known}"
        )
    holds = max(model.kv_tokens for model in models)
    if holds < longest:
        named, change = (f" with {degree} GPUs", f"--degrees {BEST}, ") if degree else ("", "")
        raise UsageProblem(
            f"WORKLOAD: the longest trajectory ends at {longest:,} tokens, and no engine of "
            f"{engines}{named} holds "
            f"more than {holds:,}; take {change}another --llm or --accelerator"
        )
    fitting = [model.gpus for model in models if model.kv_tokens >= longest]
    if all(setting.gpus % gpus for gpus in fitting):
        raise UsageProblem(
            f"--gpus: {setting.gpus} do not divide into engines that hold this workload, which "
            f"take {', '.join(map(str, fitting))} GPUs each"
        )

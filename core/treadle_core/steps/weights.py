"""Handlers of the weights that all engines are to serve.

Someone sets a desired version, and where it is loaded from. An engine that serves another version
is behind: it gets no new step, and its sidecar gets requests to load until the engine serves the
version. That covers an engine that joins or restarts later, and a scheduler that restarts in
between, since the desired version is stored. The steps that run on an engine wait in its sidecar
while it loads, and trajectories between two steps wait for their own engine.

Without a path, a trainer pushes the weights to the engines, and no engine gets a request to load.
An engine that the push has missed stays behind, with an error, until it is pushed to again or the
version is given a path.

An engine that cannot load is left alone for a while; its trajectories go to other engines, and the
fleet goes on. So do the trajectories of an engine that still loads at the next request when others
have loaded: it may hang.
"""

from treadle_core import actions as act
from treadle_core.events import LeaseRenewed, LoadFailed, WeightsSet, WeightsUpdated
from treadle_core.model import INCOMPLETE, EngineRecord, WeightsRecord
from treadle_core.refusals import BadField
from treadle_core.state import State
from treadle_core.steps import leases


def set_weights(state: State, event: WeightsSet, now: float) -> list[act.Action]:
    """Make a version the desired one. Raises BadField."""
    if event.weight_version.startswith(INCOMPLETE):
        raise BadField(
            "weight_version", f"must not begin with {INCOMPLETE}, which names parts of weights"
        )
    wanted, known = WeightsRecord(event.weight_version, event.model_path), state.engines.desired
    same = known is not None and known.weight_version == event.weight_version
    if known is not None and same and known.model_path not in ("", event.model_path):
        raise BadField(
            "weight_version",
            f"is that of {known.model_path}, which is desired already; name a new one",
        )
    state.engines.desire(wanted)
    return [act.EnginesChanged(), act.SaveWeights(), *ask_engines(state, now)]


def ask_engines(state: State, now: float) -> list[act.Action]:
    """Have all engines that are behind load the desired weights."""
    return [
        action
        for engine in state.engines
        for action in ask_engine(state, engine.spec.engine_id, now)
    ]


def ask_engine(state: State, engine_id: str, now: float) -> list[act.Action]:
    """Have an engine load the desired weights, if it is behind; a sidecar that loads them already
    notes nothing new.

    Weights without a path cannot be loaded: once another engine has them, the push has missed this
    one.
    """
    engine, wanted = state.engines.get(engine_id), state.engines.desired
    if engine is None or wanted is None or not engine.behind:
        return []
    state.loads.set(engine_id, now + state.tuning.load_again_s)
    if wanted.model_path:
        return [
            act.LoadWeights(
                engine_id, engine.spec.address, wanted.weight_version, wanted.model_path
            )
        ]
    if engine.load_error or not any(other.able for other in state.engines):
        return []
    missed = (
        f"{wanted.weight_version} was not pushed to it: push the version again, or set it "
        "with a model_path"
    )
    return _leave_out(state, engine_id, missed)


def ask_again(state: State, now: float) -> list[act.Action]:
    """Repeat the request to engines that are still behind, as a request may have been lost."""
    actions: list[act.Action] = []
    for engine_id in state.loads.take_due(now):
        again, asked = ask_engine(state, engine_id, now), state.engines.get(engine_id)
        if (
            again
            and asked is not None
            and not asked.load_error
            and any(engine.able for engine in state.engines)
        ):
            actions += _leave_out(state, engine_id, "it has not loaded yet, and other engines have")
        actions += again
    return actions


def renew_lease(state: State, event: LeaseRenewed, now: float) -> list[act.Action]:
    """Renew a lease, and note an engine that serves the desired weights no more. Raises
    LeaseNotFound."""
    before, actions = state.engines.get(event.engine_id), leases.renew_lease(state, event, now)
    _note_behind(state, before, now)
    return actions


def _note_behind(state: State, before: EngineRecord | None, now: float) -> None:
    """Schedule an early request to an engine that is behind since `before`; a report that was
    overtaken by another one is over then."""
    engine_id = before.spec.engine_id if before is not None else ""
    engine = state.engines.get(engine_id)
    if engine is not None and before is not None and engine.behind and not before.behind:
        state.loads.set(engine_id, now + state.tuning.load_retry_s)


def update_weights(state: State, event: WeightsUpdated, now: float) -> list[act.Action]:
    """Note the version that an engine serves, which later tickets carry."""
    before = state.engines.get(event.engine_id)
    record = state.engines.set_weight_version(event.engine_id, event.weight_version)
    if record is None:
        return []
    _note_behind(state, before, now)
    changed = before is not None and before.behind != record.behind
    return [act.SaveEngine(record), *([act.EnginesChanged()] if changed else [])]


def fail_load(state: State, event: LoadFailed, now: float) -> list[act.Action]:
    """Note that an engine could not load; where it refused, send its trajectories elsewhere."""
    engine, wanted = state.engines.get(event.engine_id), state.engines.desired
    if (
        engine is None
        or wanted is None
        or not engine.behind
        or event.weight_version != wanted.weight_version
    ):
        return []
    if not event.refused:
        state.loads.set(event.engine_id, now + state.tuning.load_retry_s)
        return []
    return _leave_out(state, event.engine_id, event.message)


def _leave_out(state: State, engine_id: str, message: str) -> list[act.Action]:
    state.engines.note_load_error(engine_id, message)
    actions: list[act.Action] = []
    for record in state.table.on(engine_id):
        if record.live_ticket is None:
            actions += leases.place_again(state, record)
    return actions

"""What the console knows of a mesh by its facts, and what it tells a page that knows a part of
it."""

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from treadle.engine.v1 import engine_pb2
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.telemetry.v1 import facts_pb2
from treadle.tools.v1 import tools_pb2
from treadle_console import convert, state
from treadle_console.convert import take_fact
from treadle_console.records import Cursor, Spans
from treadle_console.state import Mesh
from treadle_runtime.facts import KINDS, make_fact
from treadle_runtime.fields import duration, timestamp

T0 = 1_700_000_000
MOST = 1_000


def mesh(most: int = MOST, spans: int = 10_000) -> Mesh:
    return Mesh(most, spans)


class Tell:
    """Tells a mesh facts of a time in seconds since T0."""

    def __init__(self, to: Mesh) -> None:
        self.mesh = to

    def __call__(self, at_s: float, **kind: Any) -> None:
        fact = make_fact("test", **kind)
        fact.time.CopyFrom(timestamp(T0 + at_s))
        take_fact(self.mesh, fact)

    def open(self, at_s: float, id: str, rollout: str = "r", sample: int = 0) -> None:
        opened = facts_pb2.TrajectoryOpened(
            trajectory_id=id, rollout_id=rollout, prompt_id=f"p-{id}", sample=sample
        )
        self(at_s, trajectory_opened=opened)

    def start(
        self,
        at_s: float,
        id: str,
        turn: int = 0,
        engine: str = "e0",
        queue_s: float = 0.0,
        attempt: int = 1,
    ) -> None:
        step = ref(id, turn, engine)
        started = facts_pb2.StepStarted(step=step, queue_time=duration(queue_s), attempt=attempt)
        self(at_s, step_started=started)

    def finish(
        self,
        at_s: float,
        id: str,
        tokens: int,
        turn: int = 0,
        engine: str = "e0",
        prefill_s: float = 0.0,
    ) -> None:
        timing = engine_pb2.StepTiming(
            prefill=duration(prefill_s), finished_at=timestamp(T0 + at_s)
        )
        finished = facts_pb2.StepFinished(
            step=ref(id, turn, engine), output_tokens=tokens, timing=timing
        )
        self(at_s + 0.01, step_finished=finished)

    def close(
        self,
        at_s: float,
        id: str,
        tokens: int = 10,
        outcome: int = pb.OUTCOME_FINISHED,
        **names: Any,
    ) -> None:
        ledger = pb.Ledger(decode=duration(2.0), tool=duration(1.0), wall=duration(3.0))
        closed = facts_pb2.TrajectoryClosed(
            trajectory_id=id, gen_tokens=tokens, turns=1, ledger=ledger, **names
        )
        closed.outcome = outcome  # type: ignore[assignment]
        self(at_s, trajectory_closed=closed)


def ref(id: str, turn: int, engine: str) -> facts_pb2.StepRef:
    return facts_pb2.StepRef(
        ticket_id=f"{id}.{turn}.{engine}", trajectory_id=id, turn=turn, engine_id=engine
    )


def view(of: Mesh) -> dict[str, Any]:
    """All that a new page is told."""
    return Page().follow(of).known


class Page:
    """Keeps what it is told, as the script of the page does."""

    def __init__(self) -> None:
        self.cursor = Cursor()
        self.known: dict[str, Any] = {
            "rows": {},
            "spans": [],
            "events": [],
            "rollouts": {},
            "tools": {},
            "sections": {},
        }

    def follow(self, mesh: Mesh) -> "Page":
        told, self.cursor = mesh.delta(self.cursor)
        columns, known = told["rows"], self.known
        for at, number in enumerate(columns["n"]):
            known["rows"][number] = {name: column[at] for name, column in columns.items()}
        known["rows"] = {
            number: row for number, row in known["rows"].items() if number >= told["floor"]
        }
        known["spans"] += list(zip(*told["spans"].values(), strict=True))
        known["events"] += told["events"]
        known["rollouts"] |= {each["id"]: each for each in told["rollouts"]}
        known["tools"] |= {each["name"]: each for each in told["tools"]}
        known["sections"] |= told["sections"]
        return self

    def row(self, id: str) -> dict[str, Any]:
        return next(row for row in self.known["rows"].values() if row["id"] == id)


def spans_of(of: Mesh, id: str) -> list[tuple[str, float, float]]:
    """Kind, start and end in seconds since T0, by start."""
    page = Page().follow(of)
    number = page.row(id)["n"]
    kinds = ("queue", "prefill", "decode", "preempted", "tool", "move")
    found = [
        (kinds[kind], start / 1e3 - T0, (start + last) / 1e3 - T0)
        for row, kind, _, start, last in page.known["spans"]
        if row == number
    ]
    return sorted(found, key=lambda span: span[1])


def rounded(spans: list[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    return [(kind, round(start, 2), round(end, 2)) for kind, start, end in spans]


def test_a_trajectory_that_waits_runs_is_preempted_and_calls_a_tool_has_a_bar_for_each() -> None:
    seen = mesh()
    tell = Tell(seen)
    tell.open(0.0, "t")
    tell(0.1, step_queued=facts_pb2.StepQueued(step=ref("t", 0, "e0"), priority=2.5))
    assert Page().follow(seen).row("t")["state"] == "queued"
    assert Page().follow(seen).row("t")["priority"] == 2.5
    tell.start(1.1, "t", queue_s=1.0)
    tell.open(2.0, "x", sample=4)
    tell(2.0, step_queued=facts_pb2.StepQueued(step=ref("x", 0, "e0"), priority=9.0))
    tell(
        2.1,
        step_preempted=facts_pb2.StepPreempted(
            step=ref("t", 0, "e0"), output_tokens=7, by_ticket_id="x.0.e0"
        ),
    )
    assert Page().follow(seen).row("t")["state"] == "preempted"
    tell.start(3.1, "t", attempt=2)
    tell.finish(4.1, "t", 20)
    tell(4.2, tool_started=facts_pb2.ToolStarted(trajectory_id="t", tool="python"))
    assert Page().follow(seen).row("t")["tool"] == "python"
    timing = tools_pb2.ActionTiming(
        queue=duration(0.1), overhead=duration(0.2), execution=duration(0.7)
    )
    tool = facts_pb2.ToolFinished(
        trajectory_id="t", tool="python", status=tools_pb2.RESULT_STATUS_OK, timing=timing
    )
    tell(5.2, tool_finished=tool)
    tell.start(5.3, "t", turn=1)
    tell.finish(6.3, "t", 5, turn=1, prefill_s=0.4)
    tell.close(6.4, "t", tokens=25)
    assert rounded(spans_of(seen, "t")) == [
        ("queue", 0.1, 1.1),
        ("decode", 1.1, 2.1),
        ("preempted", 2.1, 3.1),
        ("decode", 3.1, 4.1),
        ("tool", 4.2, 5.2),
        ("prefill", 5.3, 5.7),
        ("decode", 5.7, 6.3),
    ]
    row = Page().follow(seen).row("t")
    assert (row["state"], row["tokens"], row["turns"], row["preemptions"]) == ("finished", 25, 1, 1)
    assert view(seen)["tools"]["python"]["execution_s"] == 0.7
    assert [each["words"] for each in view(seen)["events"]] == ["after 7 tokens, for p-x #4"]


def test_a_step_whose_end_nobody_tells_ends_with_the_next_one() -> None:
    seen = mesh()
    tell = Tell(seen)
    tell.open(0.0, "t")
    tell.start(1.0, "t", engine="e0")  # its engine is lost
    tell.start(3.0, "t", engine="e1")
    tell.close(4.0, "t")
    assert rounded(spans_of(seen, "t")) == [("decode", 1.0, 3.0), ("decode", 3.0, 4.0)]


def test_a_move_is_a_bar_and_an_event_and_changes_the_engine() -> None:
    seen = mesh()
    tell = Tell(seen)
    tell.open(0.0, "t")
    moved = facts_pb2.MigrationEnded(
        trajectory_id="t",
        source_engine_id="e0",
        target_engine_id="e1",
        moved=True,
        prefix_tokens=90,
        started_at=timestamp(T0 + 1.0),
    )
    tell(2.0, migration_ended=moved)
    stays = facts_pb2.MigrationEnded(
        trajectory_id="t", source_engine_id="e1", target_engine_id="e0", failure_reason="GAVE_UP"
    )
    tell(3.0, migration_ended=stays)
    known = view(seen)
    assert rounded(spans_of(seen, "t")) == [("move", 1.0, 2.0)]
    assert [(each["kind"], each["words"]) for each in known["events"]] == [
        ("moved", "90 tokens of KV from e0 to e1"),
        ("stays", "on e1, not to e0: gave up"),
    ]
    row = Page().follow(seen).row("t")
    assert known["sections"]["engine_names"][row["engine"]] == "e1"
    assert row["moves"] == known["rollouts"]["r"]["moves"] == 1


def test_the_straggler_tax_is_the_time_after_nine_tenths_have_ended() -> None:
    seen = mesh()
    tell = Tell(seen)
    for number in range(10):
        tell.open(0.0, f"t{number}")
    for number in range(9):
        tell.close(
            1.0 + number / 10,
            f"t{number}",
            outcome=pb.OUTCOME_TRUNCATED if number == 0 else pb.OUTCOME_FINISHED,
        )
    assert view(seen)["rollouts"]["r"]["tail_ms"] == 0
    tell.close(6.0, "t9")
    step = view(seen)["rollouts"]["r"]
    assert (step["lasted_ms"], step["tail_ms"]) == (6000, 4200)
    assert step["outcomes"] == {"truncated": 1, "finished": 9}
    assert (step["ledger_s"]["decode"], step["ledger_s"]["tool"]) == (20.0, 10.0)
    tell.close(7.0, "t9")  # told again
    assert view(seen)["rollouts"]["r"]["closed"] == 10


def test_first_predictions_are_judged_by_what_came_to_its_own_end() -> None:
    seen = mesh()
    tell = Tell(seen)
    for number, (tokens, outcome) in enumerate(
        [
            (5, pb.OUTCOME_FINISHED),
            (15, pb.OUTCOME_FINISHED),
            (25, pb.OUTCOME_FINISHED),
            (99, pb.OUTCOME_FINISHED),
            (99, pb.OUTCOME_TRUNCATED),
        ]
    ):
        id = f"t{number}"
        tell.open(0.0, id)
        for turn, shift in ((0, 0.0), (1, 50.0)):  # a later one is not judged
            predicted = facts_pb2.TrajectoryPredicted(trajectory_id=id, turn=turn)
            predicted.remaining_tokens.p10, predicted.remaining_tokens.p50 = 10 + shift, 20 + shift
            predicted.remaining_tokens.p90 = 30 + shift
            tell(0.1, trajectory_predicted=predicted)
        tell.close(1.0, id, tokens, outcome)
    assert view(seen)["sections"]["calibration"] == dict.fromkeys(state.BANDS, 1)


def test_a_plan_is_shown_with_its_bound_and_those_before_it() -> None:
    seen = mesh()
    for at_s, makespan_s in ((1.0, 9.0), (2.0, 8.0)):
        engines = [
            facts_pb2.PlanMade.Engine(
                engine_id="e0", trajectories=3, predicted_time=duration(makespan_s)
            )
        ]
        Tell(seen)(
            at_s,
            plan_made=facts_pb2.PlanMade(
                engines=engines,
                trajectories=3,
                predicted_makespan=duration(makespan_s),
                lower_bound=duration(7.5),
            ),
        )
    plan = view(seen)["sections"]["plan"]
    assert (plan["makespan_s"], plan["bound_s"], plan["engines"][0]["trajectories"]) == (
        8.0,
        7.5,
        3,
    )
    assert [each["makespan_s"] for each in plan["history"]] == [9.0, 8.0]


def test_pauses_and_drains_are_events_whoever_asked_for_them() -> None:
    """No fact tells them: they show in what the scheduler says of its engines. Result: one event
    for each change, none for what is so when the console starts."""
    seen = mesh()

    def said(
        paused: bool, draining: bool, trajectories: int, running: int = 0
    ) -> list[dict[str, Any]]:
        load = engine_pb2.Load(paused=paused, running_steps=running, engine_healthy=True)
        info = engine_pb2.EngineInfo(engine_id="e0")
        engine = pb.RegisteredEngine(
            info=info, load=load, draining=draining, trajectories=trajectories
        )
        return [convert.engine_view(engine)]

    for at, now in enumerate(
        (
            said(paused=True, draining=False, trajectories=3),
            said(paused=False, draining=False, trajectories=3),
            said(paused=False, draining=True, trajectories=2, running=1),
            said(paused=True, draining=True, trajectories=0, running=1),
            said(paused=True, draining=True, trajectories=0),
            said(paused=True, draining=True, trajectories=0),
            said(paused=True, draining=False, trajectories=0),
        )
    ):
        seen.set_engines(1000 * at, now)
    events = [(each["at_ms"], each["kind"], each["about"]) for each in view(seen)["events"]]
    assert events == [
        *((1000, "resumed", "e0"), (2000, "drains", "e0"), (3000, "paused", "e0")),
        *((4000, "empty", "e0"), (6000, "in use", "e0")),
    ]
    assert view(seen)["sections"]["engines"][0]["empty"]


def test_beyond_the_bounds_the_oldest_rows_and_bars_go() -> None:
    seen = mesh(most=100, spans=1_000)
    tell, page = Tell(seen), Page()
    for number in range(250):
        id = f"t{number}"
        tell.open(number, id)
        for turn in range(6):
            tell.start(number + turn / 10, id, turn)
            tell.finish(number + turn / 10 + 0.05, id, 1, turn)
        tell.close(number + 0.9, id)
        page.follow(seen)
    assert [row["id"] for row in page.known["rows"].values()] == [
        f"t{number}" for number in range(150, 250)
    ]
    assert view(seen)["rows"].keys() == page.known["rows"].keys()
    assert 750 <= len(view(seen)["spans"]) <= 1_000
    assert view(seen)["rollouts"]["r"]["closed"] == 250


def test_a_trajectory_whose_opening_is_forgotten_counts_in_its_rollout_when_it_closes() -> None:
    """As where the console has started an hour after the rollout. Result: no rollout without a name
    takes its place."""
    seen = mesh()
    tell = Tell(seen)
    tell.open(0.0, "young")
    tell.start(1.0, "old")
    tell(2.0, step_preempted=facts_pb2.StepPreempted(step=ref("old", 0, "e0")))
    assert list(view(seen)["rollouts"]) == ["r"]
    tell.close(5.0, "old", rollout_id="r", prompt_id="sum", sample=3)
    tell.open(6.0, "young")  # told again
    rollouts = view(seen)["rollouts"]
    assert [(id, each["closed"], each["trajectories"]) for id, each in rollouts.items()] == [
        ("r", 1, 2)
    ]
    row = Page().follow(seen).row("old")
    assert (row["prompt"], row["sample"], row["rollout"]) == ("sum", 3, "r")


def test_a_bar_of_any_engine_is_drawn() -> None:
    """Over months an elastic fleet has more engines than 16 bits count."""
    bars = Spans(10)
    bars.add(0, "decode", 2**15, 0, 1)
    assert bars.since(0, 1)[0]["engine"] == [2**15]


def test_a_page_far_behind_gets_the_bars_in_several_messages(monkeypatch: Any) -> None:
    monkeypatch.setattr(state, "MOST_SPANS_A_DELTA", 10)
    seen = mesh()
    tell = Tell(seen)
    tell.open(0.0, "t")
    for turn in range(25):
        tell.start(turn, "t", turn)
        tell.finish(turn + 0.5, "t", 1, turn)
    page = Page()
    counts = [len(page.follow(seen).known["spans"]) for _ in range(4)]
    assert counts == [10, 20, 25, 25]


def facts() -> st.SearchStrategy[Callable[[Tell, float], None]]:
    """Things that may happen to one of three trajectories on two engines, in any order."""
    ids, engines, turns = st.sampled_from("abc"), st.sampled_from(["e0", "e1"]), st.integers(0, 2)
    return st.one_of(
        st.builds(
            lambda id, r: lambda tell, at: tell.open(at, id, r),
            ids,
            st.sampled_from(["r", "s", ""]),
        ),
        st.builds(
            lambda id, turn, e: lambda tell, at: tell.start(at, id, turn, e), ids, turns, engines
        ),
        st.builds(
            lambda id, turn, e: lambda tell, at: tell.finish(at, id, 3, turn, e),
            ids,
            turns,
            engines,
        ),
        st.builds(lambda id: lambda tell, at: tell.close(at, id), ids),
        st.builds(
            lambda id, e: (
                lambda tell, at: tell(
                    at, step_preempted=facts_pb2.StepPreempted(step=ref(id, 0, e))
                )
            ),
            ids,
            engines,
        ),
        st.builds(
            lambda id: (
                lambda tell, at: tell(
                    at, tool_started=facts_pb2.ToolStarted(trajectory_id=id, tool="x")
                )
            ),
            ids,
        ),
        st.builds(
            lambda id: (
                lambda tell, at: tell(
                    at, tool_finished=facts_pb2.ToolFinished(trajectory_id=id, tool="x")
                )
            ),
            ids,
        ),
        st.builds(
            lambda id, e: (
                lambda tell, at: tell(
                    at,
                    migration_ended=facts_pb2.MigrationEnded(
                        trajectory_id=id, target_engine_id=e, moved=True
                    ),
                )
            ),
            ids,
            engines,
        ),
    )


@settings(max_examples=200)
@given(st.lists(st.tuples(facts(), st.booleans()), max_size=60))
def test_whenever_a_page_looks_it_ends_up_knowing_what_a_new_page_is_told(
    happens: list[tuple[Callable[[Tell, float], None], bool]],
) -> None:
    """Facts in any order, as after a loss of some; a page that looks at any moments between
    them."""
    seen, page = mesh(), Page()
    tell = Tell(seen)
    for at, (happen, looks) in enumerate(happens):
        happen(tell, float(at))
        if looks:
            page.follow(seen)
    page.follow(seen)
    assert page.known == view(seen)


def test_every_kind_of_fact_is_shown_or_left_out_on_purpose() -> None:
    assert KINDS - set(convert.KINDS) == {"reward_ended"}


def test_a_fact_without_times_or_names_changes_nothing_that_matters() -> None:
    """Each kind with all its fields unset, as a foreign publisher may send."""
    seen = mesh()
    for kind in sorted(KINDS):
        fact = facts_pb2.Fact()
        getattr(fact, kind).SetInParent()
        take_fact(seen, fact)
    take_fact(seen, facts_pb2.Fact())
    assert len(view(seen)["rows"]) <= 1

"""What a client measures of its trajectory: each second of its clock is in one sum, or left for a
service to count."""

from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.step import TimeAccount
from treadle.types import seconds


def sums(times: pb.ClientTimes) -> dict[str, float]:
    return {field.name: seconds(value) for field, value in times.ListFields()}


def test_a_call_is_control_but_for_what_the_services_account_for() -> None:
    """Opened at 10.5 s; a ticket takes from 11 to 14 s, 2 of them held; its step takes 5 s, 4 of
    them by its engine."""
    account = TimeAccount(10.5, 0.25)
    account.ask(11.0, replaces=False, goes_on=False)
    account.take_ticket(14.0, 2.0)
    account.end_stream(19.0, 4.0, {})

    assert sums(account.report()) == {
        "control": 0.25 + 0.5 + 1.0 + 1.0,
        "since_opening": 8.75,
        "tool": 0.0,
    } | {f"lost_{kind}": 0.0 for kind in ("queue", "prefill", "decode")}


def test_between_steps_tools_of_the_mesh_are_tool_and_without_any_the_caller_runs_its_own() -> None:
    account = TimeAccount(0.0, 0.0)
    account.add_tool(3.0)  # an environment is opened
    account.ask(4.0, replaces=False, goes_on=False)
    account.take_ticket(4.0, 0.0)
    account.end_stream(5.0, 1.0, {})
    account.add_tool(2.0)
    account.add_tool(1.0)
    account.ask(9.0, replaces=False, goes_on=False)
    account.take_ticket(9.0, 0.0)
    account.end_stream(10.0, 1.0, {})
    account.ask(12.0, replaces=False, goes_on=False)
    account.take_ticket(12.0, 0.0)
    account.end_stream(13.0, 1.0, {})
    account.ask(14.0, replaces=False, goes_on=True)  # the next call of a long turn

    assert sums(account.report())["tool"] == 3.0 + 3.0 + 2.0
    assert sums(account.report())["control"] == 1.0 + 1.0 + 0.0 + 1.0


def test_a_step_that_is_left_is_its_engines_to_account_for_and_one_that_is_replaced_the_clients() -> (
    None
):
    for replaces, decode_s in ((False, 0.0), (True, 2.0)):
        account = TimeAccount(0.0, 0.0)
        account.ask(0.0, replaces=False, goes_on=False)
        account.take_ticket(0.0, 0.0)
        account.end_stream(2.5, None, {"decode": 2.0})
        account.end_stream(3.0, None, {"decode": 2.5})  # ended already
        account.ask(4.0, replaces=replaces, goes_on=True)

        assert sums(account.report())["lost_decode"] == decode_s
        assert sums(account.report())["control"] == 0.5 + 1.5


def test_at_the_closing_a_wait_for_a_ticket_is_the_schedulers_to_count() -> None:
    account = TimeAccount(0.0, 0.0)
    account.ask(1.0, replaces=False, goes_on=False)

    times = sums(account.close(5.0, asks=True))
    assert (times["control"], times["since_opening"]) == (1.0, 5.0)

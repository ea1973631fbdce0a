"""Show how far a rollout is: one line on a terminal, a bar in a notebook (with tqdm, which RL
frameworks install)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from treadle.types import RolloutEvent

REDRAW_S = 0.5
OnEvent = Callable[[RolloutEvent], None]


@contextmanager
def show_progress(samples: int, on_event: OnEvent | None = None) -> Iterator[OnEvent]:
    """Show a bar while the block runs, and yield a function that moves it by the events it is
    called with.

    samples: how many there will be, as far as is known. on_event: called with each event too.
    Raises ImportError without tqdm.
    """
    from tqdm.auto import tqdm

    gen_tokens: dict[str, int] = {}  # of running trajectories
    tokens, opened = 0, 0

    # miniters: tokens move the line too, not only the end of a trajectory.
    with tqdm(
        total=samples, unit="trajectory", dynamic_ncols=True, miniters=0, mininterval=REDRAW_S
    ) as bar:

        def show(event: RolloutEvent) -> None:
            nonlocal tokens, opened
            closed = event.kind == "closed"
            if event.trajectory_id:
                tokens += event.gen_tokens - gen_tokens.get(event.trajectory_id, 0)
                gen_tokens[event.trajectory_id] = event.gen_tokens
            if closed:
                gen_tokens.pop(event.trajectory_id, None)
            opened += event.kind == "opened"
            bar.total = max(bar.total, opened)  # redundant samples, and those that are run again
            bar.set_postfix(running=len(gen_tokens), tokens=tokens, refresh=False)
            bar.update(closed)
            if on_event is not None:
                on_event(event)

        yield show

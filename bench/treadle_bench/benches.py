"""Figures as commands: `treadle bench NAME --json` prints what a bench's `run` gives.

Invariant: a bench prints nothing on stdout, starts what it needs and leaves nothing behind. Each lives in a module of
its own and is named in BENCHES; what was measured with them stands in the folder bench/ of the checkout.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle_bench.affinity import measure as affinity
from treadle_bench.control_plane import measure as control_plane
from treadle_bench.controller import measure as controller
from treadle_bench.fidelity import measure as fidelity
from treadle_bench.heddle4 import measure as completion
from treadle_bench.heddle12 import measure as heddle12
from treadle_bench.heddle12 import page as heddle12_page
from treadle_bench.heddle14 import measure as scheduling
from treadle_bench.heddle15 import measure as placement_rules
from treadle_bench.heddle16 import measure as parallelism
from treadle_bench.heddle_tables import measure as overheads
from treadle_bench.long_tail import measure as long_tail
from treadle_bench.options import BenchOptions
from treadle_bench.page import Draw, Write, put_down
from treadle_bench.placement import measure as placement
from treadle_bench.predictor import measure as predictor
from treadle_bench.predictor import page as predictor_page
from treadle_bench.predictor import plot as predictor_picture
from treadle_bench.replan import measure as replan
from treadle_bench.resources import measure as resources
from treadle_bench.simulator import measure as simulator
from treadle_bench.tools import measure as tools
from treadle_bench.tools import page as tools_page
from treadle_bench.tools import plot as tools_picture
from treadle_bench.workloads import measure as workloads

Run = Callable[[BenchOptions], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Bench:
    """One figure. summary: one line of help. run: measures, and gives the keys and their values. engines: how many it
    starts, each of which takes a core where there is no GPU. page, draw: what `run` gave in words and as a picture."""

    name: str
    summary: str
    run: Run
    engines: int = 0
    page: Write | None = None
    draw: Draw | None = None

    async def measured(self, options: BenchOptions) -> dict[str, Any]:
        """What `run` gives, with page and picture of it where `options.pictures` names a folder for them."""
        found = await self.run(options)
        if options.pictures is not None and self.page is not None:
            self.put_down(found, options.pictures)
        return found

    def put_down(self, found: Mapping[str, Any], folder: Path) -> None:
        """Writes the figures, their page and their picture. Raises ValueError for a bench that has no page."""
        if self.page is None:
            raise ValueError(f"bench {self.name} has no page")
        put_down(self.name, found, folder, self.page, self.draw)


BENCHES: Mapping[str, Bench] = {
    bench.name: bench
    for bench in (
        Bench(
            "control-plane",
            "What the control plane costs: ScheduleStep alone and 32 in flight, and a step through the sidecar against "
            "the engine's HTTP alone. Takes about 4 minutes on 2 cores.",
            control_plane.run,
            engines=1,
        ),
        Bench(
            "fidelity",
            "The same rollout on two live engines and in the simulator, on the profile measured on them. --repeats: "
            "live plays of each policy. Takes 2 minutes, and 2 a repeat, on 2 cores.",
            fidelity.run,
            engines=fidelity.ENGINES,
        ),
        Bench(
            "controller",
            "Events a second of the scheduler's controller, on the events of 6,400 trajectories on 64 engines. Takes "
            "about 4 minutes.",
            controller.run,
        ),
        Bench(
            "replan",
            "Milliseconds of one plan for 6,400 live trajectories: asking, solving, judging. Takes about a minute.",
            replan.run,
        ),
        Bench(
            "long-tail",
            "The longest of K log-normal lengths: a formula that is taught, against drawing. Takes seconds.",
            long_tail.run,
        ),
        Bench(
            "placement",
            "The exact placement of up to 1,000,000 trajectories on 1,024 engines, against the dynamic program. Takes "
            "about a minute.",
            placement.run,
        ),
        Bench(
            "resources",
            "The exact resource plan for 64 and 1,024 GPUs, against annealing and the best single degree. Takes about "
            "2 minutes.",
            resources.run,
        ),
        Bench(
            "workloads",
            "Lengths, steps and tool times of the simulator's workloads and of public traces (--data), and what each "
            "predictor finds of the longest. Takes about 2 minutes.",
            workloads.run,
        ),
        Bench(
            heddle12.NAME,
            "Heddle's Figure 12: coding, search and math on three models and 64 GPUs, every system and the bound; "
            "--scale for a part of it. Takes about an hour on 2 cores.",
            heddle12.run,
            page=heddle12_page.page,
            draw=heddle12_page.draw,
        ),
        Bench(
            completion.NAME,
            "Heddle's Figure 4: when trajectories end under verl. Takes about a minute.",
            completion.run,
            page=completion.page,
            draw=completion.draw,
        ),
        Bench(
            scheduling.NAME,
            "Heddle's Figure 14: which step runs first. Takes about 20 minutes, a few with --scale 0.25.",
            scheduling.run,
            page=scheduling.page,
            draw=scheduling.draw,
        ),
        Bench(
            placement_rules.NAME,
            "Heddle's Figure 15: which engine runs a step. Takes about 10 minutes, a few with --scale 0.25.",
            placement_rules.run,
            page=placement_rules.page,
            draw=placement_rules.draw,
        ),
        Bench(
            parallelism.NAME,
            "Heddle's Figure 16: engines of one degree and of mixed degrees. Takes about 10 minutes.",
            parallelism.run,
            page=parallelism.page,
            draw=parallelism.draw,
        ),
        Bench(
            overheads.NAME,
            "Heddle's Tables 1 and 2: what prediction, moves, placement and resource plans add. Takes about 2 minutes.",
            overheads.run,
            page=overheads.page,
        ),
        Bench(
            affinity.NAME,
            "RollArt's Figure 4: work on H20 against work on H800, and routing between them. Takes about 2 minutes.",
            affinity.run,
            page=affinity.page,
            draw=affinity.draw,
        ),
        Bench(
            predictor.NAME,
            "Predictors of remaining tokens (--data or --traces): history, siblings, trees, the learned one; every "
            "prompt is tested once; regret in the simulator. --model: the backbone. About 40 minutes with --data.",
            predictor.run,
            page=predictor_page.page,
            draw=predictor_picture.draw,
        ),
        Bench(
            tools.NAME,
            "Actions of tools and rewards: the elastic scheduler against pods, fixed degrees, GPU groups and retries "
            "under a virtual clock; decisions and the live service in real time. --quick: seconds. Takes 10 minutes.",
            tools.run,
            page=tools_page.page,
            draw=tools_picture.draw,
        ),
        Bench(
            simulator.NAME,
            "Wall seconds of one simulated rollout of 6,400 trajectories on 64 GPUs. Takes about 5 minutes.",
            simulator.run,
            page=simulator.page,
        ),
    )
}

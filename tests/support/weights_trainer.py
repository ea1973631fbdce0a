"""A trainer that broadcasts weights to engines: a process in the engine's venv, with one process
group over gloo.

Reads one command a line from its standard input and answers each with a line: `save FOLDER` writes
the model with two of its layers exchanged; `join ADDRESS WORLD_SIZE GROUP`; `body own|changed PART
PARTS GROUP` is SGLang's request for a part of the weights, and `broadcast own|changed PART PARTS`
sends it.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any, cast

LAYERS = ("model.layers.5.", "model.layers.6.")


def parameters(folder: Path) -> "dict[str, Any]":
    """The weights of a model, by name, in their order."""
    from safetensors.torch import load_file

    return dict(sorted(load_file(folder / "model.safetensors").items()))


def exchanged(own: "dict[str, Any]") -> "dict[str, Any]":
    """The same weights with two layers exchanged."""
    first, second = LAYERS

    def source(name: str) -> str:
        return name.replace(first, second) if first in name else name.replace(second, first)

    return {name: own[source(name)] for name in own}


def part_of(names: "list[str]", part: int, parts: int) -> "list[str]":
    """Every `parts`-th name."""
    return names[part::parts]


def body_of(weights: "dict[str, Any]", part: int, parts: int, group: str) -> "dict[str, Any]":
    """SGLang's request for a part."""
    names = part_of(list(weights), part, parts)
    return {
        "names": names,
        "dtypes": [str(weights[name].dtype).removeprefix("torch.") for name in names],
        "shapes": [list(weights[name].shape) for name in names],
        "group_name": group,
    }


def join(address: str, world_size: int, name: str) -> Any:
    """As SGLang's init_custom_process_group, whose import needs more than a trainer has."""
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    timeout = c10d.default_pg_timeout
    store, _, _ = next(rendezvous(f"tcp://{address}", 0, world_size, timeout=timeout))
    group, _ = c10d._new_process_group_helper(
        world_size,
        0,
        [],
        c10d.Backend("gloo"),
        c10d.PrefixStore(name, store),
        group_name=cast("Any", name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def main() -> None:
    """argv: the folder of the model."""
    import torch
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    model = Path(sys.argv[1])
    own = parameters(model)
    weights = {"own": own, "changed": exchanged(own)}
    group: Any = None
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        answer: dict[str, Any] = {}
        if command == "save":
            folder = Path(words[0])
            shutil.copytree(model, folder)
            save_file(weights["changed"], folder / "model.safetensors", {"format": "pt"})
        elif command == "join":
            address, world_size, name = words
            group = join(address, int(world_size), name)
        elif command == "body":
            which, part, parts, name = words
            answer = body_of(weights[which], int(part), int(parts), name)
        else:
            which, part, parts = words
            for name in part_of(list(own), int(part), int(parts)):
                torch.distributed.broadcast(weights[which][name], src=0, group=group)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

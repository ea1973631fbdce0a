"""Several trajectories read on in one run of the backbone, each from where it was left.

Purpose: on a GPU a run of eight takes as long as a run of one. Invariant: every trajectory gets the state that
`Backbone.read_on` would give it, to rounding; what is padded is masked, and cut off again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from treadle_learned.backbone import Backbone
from treadle_learned.reading import Read, cut, layers

Asked = tuple[Sequence[int], Read | None]  # all ids, and what was read of them before


# What padding may add to what is computed, of itself: someone with a step to read does not wait for a whole window.
MOST_PADDING = 0.5


def read_together(backbone: Backbone, asked: Sequence[Asked]) -> list[tuple[Tensor, Read]]:
    """The last hidden state, float32 [hidden_size], and what is read now, of each; `before` is used up. Those with
    much more to read than others come after them, in a run of their own."""
    before = [read.usable_for(tuple(ids)) if read is not None else None for ids, read in asked]
    more = [len(ids) - (len(read.ids) if read is not None else 0) for (ids, _), read in zip(asked, before, strict=True)]
    found: dict[int, tuple[Tensor, Read]] = {}
    for run in runs(more):
        if len(run) == 1:
            found[run[0]] = backbone.read_on(asked[run[0]][0], before[run[0]])
        else:
            answers = _one_run(backbone, [tuple(asked[at][0]) for at in run], [before[at] for at in run])
            found.update(zip(run, answers, strict=True))
    return [found[at] for at in range(len(asked))]


def runs(more: Sequence[int]) -> list[list[int]]:
    """Indexes of tokens to read, least first, cut where more than MOST_PADDING would be added."""
    found: list[list[int]] = []
    tokens = 0
    for at in sorted(range(len(more)), key=more.__getitem__):
        padded = more[at] * (len(found[-1]) + 1) if found else 0
        if found and padded <= (1.0 + MOST_PADDING) * (tokens + more[at]):
            found[-1].append(at)
            tokens += more[at]
        else:
            found.append([at])
            tokens = more[at]
    return found


@torch.inference_mode()
def _one_run(
    backbone: Backbone, asked: Sequence[tuple[int, ...]], before: Sequence[Read | None]
) -> list[tuple[Tensor, Read]]:
    done = [len(read.ids) if read is not None else 0 for read in before]
    more = [ids[start:] for ids, start in zip(asked, done, strict=True)]
    most_done, most_more = max(done), max(map(len, more))
    ids = torch.zeros(len(asked), most_more, dtype=torch.long)
    mask = torch.zeros(len(asked), most_done + most_more, dtype=torch.long)
    positions = torch.zeros(len(asked), most_more, dtype=torch.long)
    for row, (start, new) in enumerate(zip(done, more, strict=True)):
        ids[row, : len(new)] = torch.tensor(new)
        mask[row, most_done - start : most_done + len(new)] = 1
        positions[row] = torch.arange(start, start + most_more)
    device = backbone.device
    answer = backbone.model(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        position_ids=positions.to(device),
        past_key_values=_stacked(before, most_done),
        use_cache=True,
    )
    found = []
    for row, (start, new) in enumerate(zip(done, more, strict=True)):
        state: Tensor = answer.last_hidden_state[row, len(new) - 1].float().cpu()
        cache = cut(answer.past_key_values, row, most_done - start, most_done + len(new))
        found.append((state, Read(asked[row], cache)))
    return found


def _stacked(before: Sequence[Read | None], tokens: int) -> DynamicCache:
    """One cache of all, each pushed to the end of `tokens`."""
    stacked = DynamicCache()
    every = [layers(read.cache) if read is not None else None for read in before]
    some = next((own for own in every if own is not None), [])
    for number in range(len(some)):
        both: list[Tensor] = []
        for part in range(2):
            like = some[number][part]
            joined = like.new_zeros(len(before), like.shape[1], tokens, like.shape[3])
            for row, own in enumerate(every):
                if own is not None:
                    known = own[number][part]
                    joined[row, :, tokens - known.shape[2] :] = known[0]
            both.append(joined)
        stacked.update(both[0], both[1], number)
    return stacked

"""Several trajectories read on in one run of the backbone, each from where it was left.

Purpose: on a GPU a run of eight takes as long as a run of one. Invariant: every trajectory gets the state that
`Backbone.read_on` would give it, to rounding; what is padded is masked, and cut off again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from treadle_learned.backbone import Backbone, Read

Asked = tuple[Sequence[int], Read | None]  # all ids, and what was read of them before


@torch.inference_mode()
def read_together(backbone: Backbone, asked: Sequence[Asked]) -> list[tuple[Tensor, Read]]:
    """The last hidden state, float32 [hidden_size], and what is read now, of each; `before` is used up."""
    if len(asked) == 1:
        return [backbone.read_on(*asked[0])]
    before = [_usable(tuple(ids), read) for ids, read in asked]
    done = [len(read.ids) if read is not None else 0 for read in before]
    more = [list(ids)[start:] for (ids, _), start in zip(asked, done, strict=True)]
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
        cache = _cut(answer.past_key_values, row, most_done - start, most_done + len(new))
        found.append((state, Read(tuple(asked[row][0]), cache)))
    return found


def cache_bytes(read: Read) -> int:
    """Bytes of its keys and values."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in read.cache.layers if layer.keys is not None)


def _usable(ids: tuple[int, ...], before: Read | None) -> Read | None:
    if before is None or len(before.ids) >= len(ids) or ids[: len(before.ids)] != before.ids:
        return None
    return before


def _stacked(before: Sequence[Read | None], tokens: int) -> DynamicCache:
    """One cache of all, each pushed to the end of `tokens`."""
    some = next((read for read in before if read is not None), None)
    if some is None:
        return DynamicCache()
    stacked = DynamicCache()
    for number, layer in enumerate(some.cache.layers):
        keys = layer.keys.new_zeros(len(before), layer.keys.shape[1], tokens, layer.keys.shape[3])
        values = layer.values.new_zeros(len(before), layer.values.shape[1], tokens, layer.values.shape[3])
        for row, read in enumerate(before):
            if read is not None:
                own = read.cache.layers[number]
                keys[row, :, tokens - len(read.ids) :] = own.keys[0]
                values[row, :, tokens - len(read.ids) :] = own.values[0]
        stacked.update(keys, values, number)
    return stacked


def _cut(cache: DynamicCache, row: int, first: int, end: int) -> DynamicCache:
    own = DynamicCache()
    for number, layer in enumerate(cache.layers):
        which = slice(row, row + 1), slice(None), slice(first, end)
        own.update(layer.keys[which].clone(), layer.values[which].clone(), number)
    return own

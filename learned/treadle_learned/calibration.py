"""Sets quantiles right: each is shifted by what it takes on prompts that whoever said it was not fitted on.

Split conformal prediction (Romano et al. 2019) on each side by itself, pooled over the members of an ensemble as in
cross-conformal prediction (Vovk 2015). Invariants: what was fitted on a question has no say in it; what is censored is
left out.
There is no correction for few prompts, (n + 1) / n: one member errs by more than the mean of all that is asked later,
which makes up for it (over 20 draws of 50 mcpmark prompts .10 and .89 were below p10 and p90; with it, over 8 of them,
.08 and .92).
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle_learned.examples import Examples
from treadle_learned.head import BANDS, QuantileHead, band_of
from treadle_learned.scores import QUANTILES

FEWEST = 8  # questions; fewer shift nothing
BAND_PROMPTS = 10  # of a band that count as much as all bands together
ROWS = 4_096  # that are asked about at once: each member has a copy of the states


@torch.inference_mode()
def unseen(head: QuantileHead, examples: Examples, folds: Tensor) -> tuple[Examples, Tensor]:
    """The examples that some member was not fitted on, and what that one says before calibration, [n, targets,
    quantiles]. folds [n]: the member, below 0 for those that all were fitted on."""
    head.eval()
    which = torch.nonzero(folds >= 0)[:, 0]
    said = []
    for rows in which.split(ROWS):
        some = examples.of(rows)
        said.append(head.each(some.hidden, some.features, some.has_text)[folds[rows], torch.arange(len(rows))])
    return examples.of(which), torch.cat(said)


@torch.inference_mode()
def calibrate(head: QuantileHead, examples: Examples, folds: Tensor) -> None:
    """Sets `shift` by the `unseen`: by steps seen (`head.BANDS`), drawn to the shift of all where a band has few
    prompts."""
    shift: Tensor = head.get_buffer("shift")
    shift.zero_()
    judged, quantiles = unseen(head, examples, folds)
    whole = ~judged.censored
    errors = (judged.targets[..., None] - quantiles)[whole]
    bands, prompts = band_of(judged.features)[whole], judged.prompts[whole]
    if len(errors) < FEWEST:
        return
    shift[:] = _tails(errors)
    for at in range(len(BANDS)):
        own = bands == at
        if own.any():
            count = len(prompts[own].unique())
            shift[at] += count / (count + BAND_PROMPTS) * (_tails(errors[own]) - shift[at])


def _tails(errors: Tensor) -> Tensor:
    """Of [n, targets, quantiles], each at its own level."""
    return torch.stack([torch.quantile(errors[:, :, at], level, dim=0) for at, level in enumerate(QUANTILES)], dim=-1)

"""How well predicted lengths tell which trajectories are long: recall of the longest, and correlation (Heddle 7.2)."""

import numpy as np

from treadle_core.worksheet import Floats

LONGEST = 0.10  # of trajectories are the long tail whose recall counts


def recall_of_longest(total: Floats, predicted: Floats) -> float:
    """Of the longest tenth, the share among the tenth that was predicted longest. Where several are predicted equally
    long, what picking among them at random would find."""
    most = max(1, round(LONGEST * len(total)))
    longest = np.zeros(len(total), np.bool_)
    longest[np.argsort(-total, kind="stable")[:most]] = True
    least = -np.partition(-predicted, most - 1)[most - 1]
    above, level = predicted > least, predicted == least
    picked = (most - int(above.sum())) / int(level.sum())
    return float((longest[above].sum() + picked * longest[level].sum()) / most)


def correlation(one: Floats, other: Floats) -> float:
    """Pearson's; 0 where either does not vary."""
    if len(one) < 2 or np.ptp(one) == 0.0 or np.ptp(other) == 0.0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])

"""Score trajectories: the reward functions, the LLM judges, and the pool that scores for all jobs.

A reward that comes with the service is a module of this folder: it declares a `Tool` of kind
REWARD, has the function that its `entry` names, and stands in REWARDS below.
"""

from treadle_tools.rewards.answers import EXACT_MATCH, MATH_EQUAL
from treadle_tools.rewards.python_tests import PYTHON_TESTS

REWARDS = (EXACT_MATCH, MATH_EQUAL, PYTHON_TESTS)

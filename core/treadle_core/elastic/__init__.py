"""Action-level elastic scheduling of tools: which waiting actions start now, and with how many units each.

The algorithms of ARL-Tangram (§4, §5, appendices A and B). `decision.decide` is the whole of it; `waiting.Waiting`
holds the queue. Nothing here has a clock: times are seconds from now, given as numbers.
"""

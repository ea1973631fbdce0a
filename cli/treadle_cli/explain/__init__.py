"""Run `treadle explain`: the time of a trajectory, the decisions about it, and its end under other
policies."""

"""The main job: the same agentic work on two engines, once pinned and first come first served, once with Treadle."""

"""Run `treadle simulate`: compare systems on simulated engines, as a table, sentences and a
picture."""

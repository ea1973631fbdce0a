"""`treadle simulate`: systems compared on simulated engines, as a table, sentences and a
picture."""

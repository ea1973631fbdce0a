"""Run the demo: the same agentic work on two engines, epoch after epoch, as frameworks do it
and with Treadle."""

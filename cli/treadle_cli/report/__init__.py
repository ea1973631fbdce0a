"""Draw a run: where the time of each trajectory went, as HTML, as PNG and as a table for the
terminal."""

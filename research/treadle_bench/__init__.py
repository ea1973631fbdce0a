"""The figures of Treadle: what `treadle bench NAME` measures, writes and draws. A folder a
figure."""

"""What every room may use: places, times, sizes, processes; no kvtool knowledge."""

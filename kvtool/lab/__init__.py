"""Measuring, beside the core that answers: benchmarks, reports, the simulator of links and the charts of all three."""

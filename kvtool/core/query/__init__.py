"""Question → chunks → fused cache → answer: the work behind `kvtool query`."""

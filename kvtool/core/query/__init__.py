"""Question → chunks → fused cache → answer: what `kvtool query` runs."""

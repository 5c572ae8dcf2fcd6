"""Files → documents → chunks: readers and KVSplit."""

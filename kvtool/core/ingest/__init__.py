"""Files → chunks → prefill once → store: the steps of `kvtool ingest`."""

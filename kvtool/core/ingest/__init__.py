"""Files → chunks → prefill once → store: the work behind `kvtool ingest`."""

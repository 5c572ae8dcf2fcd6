"""Records → smaller records: fitting a profile, measuring the loss, encoding what is stored."""

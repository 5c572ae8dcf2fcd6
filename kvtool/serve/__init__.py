"""One engine that stays up: questions of many clients over HTTP, and those of this machine's shell."""

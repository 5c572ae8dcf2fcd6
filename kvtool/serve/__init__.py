"""Server with one resident engine: answers many clients over HTTP, and this machine's shell."""

"""What `samples/fitted.py` fits, and how it is judged."""

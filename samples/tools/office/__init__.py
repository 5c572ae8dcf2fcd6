"""What `samples/tools/documents.py` writes: facts that stand nowhere else, and a writer for each format."""

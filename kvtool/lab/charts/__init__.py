"""Drawing: SVG charts, HTML pages, and what each report and bench shows on them, one file a subject."""

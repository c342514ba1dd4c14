"""What a run writes: files, provenance, figures, pages, progress."""

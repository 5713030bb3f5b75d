"""Measurements: every bench checks what it times, says how it was run, and appends rows to `benches/results/`."""

"""Tasks in, attempts made and graded, trajectories and a table of results out."""

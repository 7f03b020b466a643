"""The batch job around an engine: prompt lines in, result lines out."""

"""The meaning of a run folder: records, identity, pairs of seeds, statistics, tables; no torch."""

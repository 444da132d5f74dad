"""What a run folder means: records, identity, pairs of seeds, statistics, tables. Nothing here imports torch."""

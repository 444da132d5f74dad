"""Benchmarks: cases as data, a correctness gate first, results as JSON under results/."""

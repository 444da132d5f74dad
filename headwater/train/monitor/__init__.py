"""Watching a run: metrics and loggers, progress, interrupts, the watchdog, bad steps, depth records."""

"""Many processes as one run: ranks, sharding, tensor and pipeline parallelism, the memory plan."""

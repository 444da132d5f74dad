"""Parts that every kernel needs: launching, address tables, tiles, registration with PyTorch."""

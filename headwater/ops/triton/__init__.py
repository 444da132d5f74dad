"""What every kernel needs: launching, address tables, tiles, registration with PyTorch. Imports no triton itself."""

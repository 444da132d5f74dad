"""headwater: the residual stream as a part you can swap."""

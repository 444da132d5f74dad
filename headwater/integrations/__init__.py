"""headwater inside other engines, one file each."""

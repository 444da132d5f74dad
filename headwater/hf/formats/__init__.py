"""Files: transformers folders, exports, released layouts, delta files."""

"""Programs that measure; README.md says which one made which figure."""

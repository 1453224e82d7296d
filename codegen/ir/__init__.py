"""A chain in terms that planners and templates share: segments over named values, groupings, applied operators and constants."""

"""A chain in terms that planners and templates share."""

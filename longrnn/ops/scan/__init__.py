"""The recurrence of cells without a delta rule."""

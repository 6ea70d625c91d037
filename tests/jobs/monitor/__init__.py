"""The monitor of one job."""

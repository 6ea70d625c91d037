"""Every number that the project states, as a ratio measured in one run."""

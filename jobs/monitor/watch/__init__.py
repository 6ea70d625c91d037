"""`vjob watch`: looks at a job every so often, prints, notifies and acts."""

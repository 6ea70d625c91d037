"""The `vjob` command: conf, plan, scripts, schedulers, status. No torch."""

"""Lines and events that ranks write and others read: training lines, traces, times."""

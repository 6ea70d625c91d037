"""Logs and traces to tables, findings and timelines. Only it imports pandas, pyarrow and plotly."""

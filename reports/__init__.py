"""Logs and traces to tables, figures and one HTML page. Only it imports pandas and plotly."""

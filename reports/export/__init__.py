"""The report as text, as CSV or Parquet, and as a Perfetto trace."""

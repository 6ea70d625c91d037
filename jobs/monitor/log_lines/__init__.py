"""What lines of logs say: parsed, classified by the known lines, merged by time, printed."""

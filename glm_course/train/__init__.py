"""Training loops: functions that yield a row a step, write receipts, and resume bit for bit."""

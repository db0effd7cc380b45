"""What the operator of a federation looks at and keeps: status, page, history, backup, retention."""

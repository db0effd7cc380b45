"""What came out: records, tables, plots, remarks."""

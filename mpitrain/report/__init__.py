"""What runs were like: read from their folders, drawn into one page, summed up in a table."""

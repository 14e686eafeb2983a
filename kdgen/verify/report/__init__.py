"""What ``kdgen verify`` prints and writes."""

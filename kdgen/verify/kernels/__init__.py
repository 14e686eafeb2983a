"""Each kernel alone, against float64 and by bits."""

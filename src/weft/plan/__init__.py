"""Plans as data: the actions of each pass, and the decisions with their reasons."""
